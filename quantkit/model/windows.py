"""Windows of attention in both directions, as modules of transformers hold them."""

from __future__ import annotations

from torch import nn


def own_window(attention: nn.Module) -> int | None:
    """The distance from which on an attention module sees no token; None where it sees all."""
    sides: tuple[int, int] | None = getattr(attention, "local_attention", None)
    if sides is not None:  # transformers 4.57: the farthest token on each side, -1 for all
        return None if sides[0] < 0 else sides[0] + 1
    window: int | None = getattr(attention, "sliding_window", None)
    return window
