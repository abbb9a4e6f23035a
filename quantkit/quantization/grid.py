"""Integer grids: encoding, decoding, and the byte layouts that operators read.

Functions are numpy and work on a few rows at a time, so that no caller needs a whole matrix at once.
Codes are int8 around zero: [-127, 127] at 8 bits and [-8, 7] at 4; a zero point is a code too. Codes of 16
bits are int16 until they are stored, as two halves of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.plan.formats import Grid

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Codes = NDArray[np.int8]  # int16 on a grid of 16 bits
LARGEST_SCALE = np.float32(np.finfo(np.float16).max)  # of a block


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Rows of a weight on a grid: the result of every fit."""

    codes: Codes  # [O, blocks, block]
    scales: Floats  # [O, blocks]
    zeros: Codes | None = None  # [O, blocks]; None where the grid is symmetric
    is_plain: bool = False  # rounded to nearest


def blocks_of(weight_OI: Floats, grid: Grid) -> Floats:
    """The rows cut into blocks, [O, blocks, block]; the last block is padded with zeros."""
    rows, columns = weight_OI.shape
    if grid.block is None:
        return weight_OI.reshape(rows, 1, columns)
    missing = -columns % grid.block
    if missing:
        weight_OI = np.pad(weight_OI, ((0, 0), (0, missing)))
    return weight_OI.reshape(rows, -1, grid.block)


def range_of(weight_OI: Floats, grid: Grid) -> tuple[Floats, Codes | None]:
    """(scales, zero points) by which the grid just reaches each block's largest and smallest value."""
    blocks = blocks_of(weight_OI, grid)
    if grid.is_symmetric:
        peaks = np.maximum(blocks.max(axis=2), -blocks.min(axis=2))
        return stored_scales(_no_zeros(peaks / np.float32(grid.largest)), grid), None
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    steps = np.float32(grid.largest - grid.lowest)
    scales = _no_zeros(high / steps - low / steps)  # apart, since their difference may overflow
    scales = stored_scales(scales, grid)
    return scales, zeros_for(low, scales, grid)


def zeros_for(low: Floats, scales: Floats, grid: Grid) -> Codes:
    """The codes that stand for 0 when the lowest code stands for `low`."""
    zeros = np.clip(np.rint(grid.lowest - low / scales), grid.lowest, grid.largest)
    return np.asarray(zeros, np.int8)


def _no_zeros(scales: Floats) -> Floats:
    scales[scales == 0] = 1  # a block of zeros: any scale will do, and 1 divides
    return np.asarray(scales, np.float32)


def stored_scales(scales: Floats, grid: Grid) -> Floats:
    """The scales that a file holds: of blocks the next float16 away from zero, so that no weight is cut off.

    Codes are rounded on these, so the only loss is a step up to a thousandth longer, or 6e-8. A scale beyond
    float16 becomes its largest number, which the writer refuses.
    """
    if grid.block is None:
        return scales
    halves = np.clip(scales, -LARGEST_SCALE, LARGEST_SCALE).astype(np.float16)
    away = np.nextafter(halves, np.copysign(np.float16(LARGEST_SCALE), halves))
    return np.where(np.abs(halves) < np.abs(scales), away, halves).astype(np.float32)


def encode(weight_OI: Floats, scales: Floats, grid: Grid, zeros: Codes | None = None) -> Codes:
    """The nearest codes, [O, blocks, block]; ties go to the even code."""
    blocks = blocks_of(weight_OI, grid)
    codes = blocks / scales[:, :, None]
    np.rint(codes, out=codes)
    if zeros is not None:
        codes += zeros[:, :, None]
    np.clip(codes, grid.lowest, grid.largest, out=codes)
    return codes.astype(np.int16 if grid.in_halves else np.int8)


def halves_of(codes: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """(high, low) of codes of 16 bits: high x 256 + low, each from -128 to 127."""
    low = codes.astype(np.int8)  # the last eight bits, with a sign
    return ((codes.astype(np.int32) - low) >> 8).astype(np.int8), low


def from_halves(high: NDArray[Any], low: NDArray[Any]) -> NDArray[np.int16]:
    return np.asarray((high.astype(np.int16) << 8) + low, np.int16)


def decode(codes: Codes, scales: Floats, in_features: int, zeros: Codes | None = None) -> Floats:
    """The values of the codes, [O, I], without the padding."""
    values = codes.astype(np.float32)
    if zeros is not None:
        values -= zeros[:, :, None]
    values *= scales[:, :, None]
    return np.ascontiguousarray(values.reshape(len(codes), -1)[:, :in_features])


def decode_all(encoded: Encoded, in_features: int) -> Floats:
    return decode(encoded.codes, encoded.scales, in_features, encoded.zeros)


def middle(bits: int) -> int:
    """The unsigned code that operators take for zero."""
    return 1 << (bits - 1)


def to_bytes(codes: Codes, bits: int = 8) -> NDArray[np.uint8]:
    """The unsigned form that block-wise operators read: code + middle, two to a byte at 4 bits.

    The first of two codes lies in the lower half; an odd number of codes is padded with the middle.
    """
    if bits == 8:
        return codes.view(np.uint8) ^ np.uint8(middle(8))
    unsigned = (codes + np.int8(middle(bits))).astype(np.uint8)
    if unsigned.shape[-1] % 2:
        filler = np.full((*unsigned.shape[:-1], 1), middle(bits), np.uint8)
        unsigned = np.concatenate([unsigned, filler], axis=-1)
    return unsigned[..., 0::2] | (unsigned[..., 1::2] << np.uint8(4))


def from_bytes(stored: NDArray[Any], bits: int = 8, count: int | None = None) -> Codes:
    """The codes of the unsigned form; `count` of the last dimension are no padding."""
    if bits == 8:
        return (np.ascontiguousarray(stored) ^ np.uint8(middle(8))).view(np.int8)
    both = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1)
    unsigned = both.reshape(*stored.shape[:-1], -1)[..., :count]
    return unsigned.astype(np.int8) - np.int8(middle(bits))
