"""Integer grids: rounding to them, coming back from them, and the byte layouts that operators read.

Everything is numpy and works on a few rows at a time, so that no caller needs a whole matrix at once.
Codes are int8 in [-127, 127]; -128 is left out, which keeps the grid symmetric.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.schemes import Grid

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]
ZERO_POINT = 128  # of the unsigned bytes that block-wise operators read


def blocks_of(weight_OI: Floats, grid: Grid) -> Floats:
    """The rows cut into blocks, [O, blocks, block], the last one filled up with zeros."""
    rows, columns = weight_OI.shape
    if grid.block is None:
        return weight_OI.reshape(rows, 1, columns)
    missing = -columns % grid.block
    if missing:
        weight_OI = np.pad(weight_OI, ((0, 0), (0, missing)))
    return weight_OI.reshape(rows, -1, grid.block)


def largest_magnitude_scales(weight_OI: Floats, grid: Grid) -> Floats:
    """Scales that map each block's largest magnitude to the largest code; [O, blocks]."""
    blocks = blocks_of(weight_OI, grid)
    peaks = np.maximum(blocks.max(axis=2), -blocks.min(axis=2))
    scales = peaks / np.float32(grid.largest)
    scales[scales == 0] = 1  # a block of zeros: any scale will do, and 1 divides
    return np.asarray(scales, np.float32)


def encode(weight_OI: Floats, scales: Floats, grid: Grid) -> Codes:
    """The nearest codes, [O, blocks, block]; ties go to the even code."""
    blocks = blocks_of(weight_OI, grid)
    codes = blocks / scales[:, :, None]
    np.rint(codes, out=codes)
    np.clip(codes, -grid.largest, grid.largest, out=codes)
    return codes.astype(np.int8)


def decode(codes: Codes, scales: Floats, in_features: int) -> Floats:
    """The weights that the codes stand for, [O, I]; the padding is cut off."""
    values = codes.astype(np.float32) * scales[:, :, None]
    return np.ascontiguousarray(values.reshape(len(codes), -1)[:, :in_features])


def to_bytes(codes: Codes) -> NDArray[np.uint8]:
    """The unsigned form that block-wise operators read: code + 128."""
    return codes.view(np.uint8) ^ np.uint8(ZERO_POINT)


def from_bytes(stored: NDArray[Any]) -> Codes:
    """The codes of that form."""
    return (np.ascontiguousarray(stored) ^ np.uint8(ZERO_POINT)).view(np.int8)
