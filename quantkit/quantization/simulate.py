"""Rounding of inputs in torch, as the runtime rounds the input of each pack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.model.model_map import Role
from quantkit.plan.formats import Format

LARGEST_CODE = 127
NUM_UNSIGNED_STEPS = 255
SMALLEST_PEAK = 1e-20
Rounding = Callable[[Tensor], Tensor]


def input_hook(rounding: Rounding) -> Any:
    """A forward pre-hook that rounds the input of a module."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, *rest = inputs
        return (rounding(first), *rest)

    return hook


def rounding_of(chosen: Format, role: Role, fixed: tuple[float, int] | None) -> Rounding:
    """The runtime's rounding of inputs for this format and role; `fixed` is a calibrated scale and zero."""
    if chosen.input_bits and fixed:
        return partial(round_static, scale=fixed[0], zero=fixed[1], bits=chosen.input_bits)
    if chosen.grid.block:
        return partial(round_blocks, block=chosen.grid.block)
    return round_tokens if chosen.scales_tokens(role) else round_tensor


def beside_outliers(rounding: Rounding, columns_I: NDArray[np.int64], x: Tensor) -> Tensor:
    """The input rounded with zeros in its outlier columns, which stay as they are."""
    others = x.clone()
    others[..., columns_I] = 0
    rounded = rounding(others)
    rounded[..., columns_I] = x[..., columns_I]
    return rounded


def round_static(x: Tensor, *, scale: float, zero: int, bits: int) -> Tensor:
    """Unsigned integers in a calibrated range."""
    codes = ((x / scale).round() + zero).clamp(0, (1 << bits) - 1)
    return (codes - zero) * scale


def round_tokens(x: Tensor) -> Tensor:
    """As `round_tensor`, after every token was divided by its largest value."""
    peaks = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    return round_tensor(x / peaks) * peaks


def round_blocks(x: Tensor, block: int) -> Tensor:
    """Symmetric INT8 with one scale for each block of the last dimension."""
    width = x.shape[-1]
    padded = nn.functional.pad(x, (0, -width % block))
    blocks = padded.reshape(*padded.shape[:-1], padded.shape[-1] // block, block)
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST_CODE
    rounded = torch.where(scales > 0, (blocks / scales).round() * scales, torch.zeros_like(blocks))
    return rounded.flatten(-2)[..., :width]


def round_tensor(x: Tensor) -> Tensor:
    """Asymmetric UINT8 with one scale for the whole tensor; zero is always on the grid."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / NUM_UNSIGNED_STEPS
    zero = (-low / scale).round().clamp(0, NUM_UNSIGNED_STEPS)
    return ((x / scale).round() + zero).clamp(0, NUM_UNSIGNED_STEPS).sub(zero) * scale
