"""Rotary tables of graphs: cosines and sines of every position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import Attention
from quantkit.model.rope import plain_frequencies

Rotation = tuple[float | None, int | None, tuple[float, ...], float]


def rotation_of(attention: Attention) -> Rotation:
    """What a table depends on; attentions with equal rotations share one."""
    return (
        attention.rope_theta,
        attention.rotary_dim,
        attention.rope_frequencies,
        attention.rope_factor,
    )


def cosines_and_sines(
    attention: Attention, num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Each [positions, rotary_dim / 2]."""
    assert attention.rope_theta and attention.rotary_dim
    frequencies = np.array(attention.rope_frequencies, np.float32)
    if not attention.rope_frequencies:
        frequencies = plain_frequencies(attention.rope_theta, attention.rotary_dim)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    factor = attention.rope_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
