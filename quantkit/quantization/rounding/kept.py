"""Codes of a quantized original that lie on the grid: they are kept, and not rounded a second time."""

from __future__ import annotations

import numpy as np

from quantkit.model.weights.headers import Groups
from quantkit.model.weights.tensors import GroupSource, TensorSource
from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats, decode_all, encode


def groups_of(source: TensorSource, name: str, start: int = 0, count: int | None = None) -> Groups | None:
    """How rows of the original are integers in groups of inputs; None where they are floats, or changed."""
    return source.groups(name, start, count) if isinstance(source, GroupSource) else None


def fits(groups: Groups, grid: Grid) -> bool:
    """Whether every block of the grid lies in one group, and zero points have a place."""
    in_one = groups.scales_OG.shape[1] == 1 or (grid.block is not None and groups.size % grid.block == 0)
    has_room = groups.zeros_OG is None or not grid.is_symmetric
    return in_one and has_room and grid.block is not None and not grid.in_halves and groups.bits <= grid.bits


def kept(weight_OI: Floats, grid: Grid, groups: Groups | None) -> Encoded | None:
    """The codes of the original, if they decode to exactly these weights; None otherwise."""
    if groups is None or not fits(groups, grid):
        return None
    columns, block = weight_OI.shape[1], grid.block or 1
    group_of_block = np.arange(grid.num_blocks(columns)) * block // groups.size
    scales = groups.scales_OG[:, group_of_block]
    with np.errstate(over="ignore"):
        if (scales.astype(np.float16).astype(np.float32) != scales).any():  # as bfloat16's may be
            return None
    scales = np.where(scales == 0, np.float32(1), scales)  # a block of zeros
    zeros = None
    if not grid.is_symmetric:
        zeros = np.zeros(scales.shape, np.int8)
        if groups.zeros_OG is not None:
            zeros = np.ascontiguousarray(groups.zeros_OG[:, group_of_block])
    encoded = Encoded(codes=encode(weight_OI, scales, grid, zeros), scales=scales, zeros=zeros)
    return encoded if np.array_equal(decode_all(encoded, columns), weight_OI) else None
