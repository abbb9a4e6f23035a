"""Rounding to the nearest code of a grid that just reaches a block's largest value: the plain fit.

It needs no calibration and is exact at the ends of each block. Reports compare every other fit with it.
"""

from __future__ import annotations

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats, encode, range_of


def round_to_nearest(weight_OI: Floats, grid: Grid, prepared: object = None) -> Encoded:
    scales, zeros = range_of(weight_OI, grid)
    codes = encode(weight_OI, scales, grid, zeros)
    return Encoded(codes=codes, scales=scales, zeros=zeros, is_plain=True)
