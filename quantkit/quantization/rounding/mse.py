"""Scales searched for the least squared error of the weights, instead of an exact largest value.

A smaller scale that clips a block's largest weight, or one by which more of the block falls near codes, often
loses less. Some scales are tried, the best is refined by least squares (the best scale for given codes, then
the best codes for that scale, and so on), and it is used only where it beats plain rounding. A 4-bit grid
reaches from -8 to +7, so its scales may be negative: the largest weight of a block then lies at -8 whatever
its sign, and steps are an eighth smaller (onnxruntime accepts negative scales). Squared errors are weighted
by the importance of each input, where one is given.

Blocks lie side by side in memory while they are searched ([groups, block, O]), so that each step is one pass
over contiguous numbers, and rows are filled up to a fixed multiple, so that sums do not depend on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Codes, Encoded, Floats, range_of, stored_scales

TILE_VALUES = 1 << 16  # three arrays of this size stay in a core's cache
ROW_MULTIPLE = 16
LEAST_ROWS = 64  # of a tile: long enough for the inner loops
REFINEMENTS = 2
SMALLEST = np.float32(np.finfo(np.float32).tiny)
# Codes at which the largest weight is tried. At eight bits strong clipping loses more on the clipped weight
# than all others gain; at four bits it may pay, and also where the largest weight has little importance.
EIGHT_BITS = (127.0, 127.45, 126.4, 125.6, 124.7, 123.8, 122.6, 121.2)
FOUR_BITS = (-7.6, -7.9, -8.2, -8.5, -8.9, -9.3, -9.8, -10.4, -11.2, -12.3, 6.8, 7.2, 7.6, 8.2, 9.0)
SHRUNK = (1.0, 1.06, 1.13, 1.21, 1.3, 1.42)  # steps over the whole range of a block with a zero point
CLIPPED_EIGHT = (132.0, 142.0, 155.0, 172.0, 195.0, 225.0, 270.0, 330.0)
CLIPPED_FOUR = (-14.0, -17.0, -21.0, -26.0, -33.0, -45.0, 10.5, 13.0, 17.0, 23.0)
CLIPPED = (1.6, 1.9, 2.4, 3.2)
# Half of the range over the weighted root mean square, where inputs differ in importance.
REACH = {4: (2.0, 2.6), 8: (4.0, 6.0)}
WIDEST_REACH = (2.0, 4.0)


@dataclass(slots=True)
class _Tile:
    """Blocks side by side, each divided by its largest magnitude, and the best scale so far of each."""

    values: Floats  # [groups, block, O]
    importance: Floats | None  # [groups, block]
    grid: Grid
    codes: Floats  # scratch [groups, block, O]: the last codes tried, less the zero point
    rest: Floats  # scratch [groups, block, O]: errors of rounding, in steps
    errors: Floats  # [groups, O], of the best scale
    steps: Floats  # [groups, O]: one over the best scale
    zeros: Floats  # [groups, O]

    def attempt(self, steps: float | Floats, zeros: Floats | None = None) -> None:
        """Round with this many steps to the largest weight, and keep them where the error is the least."""
        tried = np.asarray(steps, np.float32)
        np.multiply(self.values, tried if tried.ndim == 0 else _wide(tried), out=self.rest)
        errors = self.round_off(zeros, reach=abs(steps) if isinstance(steps, float) else np.inf)
        errors /= tried * tried
        better = errors < self.errors
        np.copyto(self.errors, errors, where=better)
        np.copyto(self.steps, tried, where=better)
        if zeros is not None:
            np.copyto(self.zeros, zeros, where=better)

    def round_off(self, zeros: Floats | None, reach: float = np.inf) -> Floats:
        """Round weights that are in steps; returns each block's error in squared steps."""
        lowest, largest = np.float32(self.grid.lowest), np.float32(self.grid.largest)
        np.rint(self.rest, out=self.codes)
        if zeros is not None:
            self.codes += _wide(zeros)
            np.clip(self.codes, lowest, largest, out=self.codes)
            self.codes -= _wide(zeros)
        elif reach > self.grid.largest + 0.5:  # else no code can lie outside
            np.clip(self.codes, lowest, largest, out=self.codes)
        self.rest -= self.codes
        return self.sums(self.rest, self.rest)

    def sums(self, first: Floats, second: Floats) -> Floats:
        """Sums of products over each block, weighted by importance."""
        if self.importance is None:
            return np.asarray(np.einsum("gno,gno->go", first, second), np.float32)
        return np.asarray(np.einsum("gn,gno->go", self.importance, first * second), np.float32)

    def refine(self) -> None:
        """Alternate the least-squares scale of the last codes and the nearest codes of that scale."""
        steps, zeros = self.steps.copy(), None if self.grid.is_symmetric else self.zeros.copy()
        self.attempt(steps, zeros)
        for _ in range(REFINEMENTS):
            power = self.sums(self.codes, self.codes)
            power[power == 0] = 1
            change = 1 + self.sums(self.rest, self.codes) / power
            steps = steps / np.maximum(change, np.float32(0.5))
            self.attempt(steps, zeros)


def search(weight_OI: Floats, grid: Grid, importance_I: Floats | None = None) -> Encoded:
    """Codes and scales of least squared error; `importance_I` weighs the errors of each input."""
    rows, columns = weight_OI.shape
    size, count = grid.block or columns, grid.num_blocks(columns)
    scales, zeros = range_of(weight_OI, grid)  # of plain rounding
    codes = np.empty((rows, count, size), np.int8)
    importance = None if importance_I is None else _padded(importance_I, count * size).reshape(count, size)
    height = max(LEAST_ROWS, TILE_VALUES // size // ROW_MULTIPLE * ROW_MULTIPLE)
    for top in range(0, rows, height):
        run = slice(top, min(top + height, rows))
        width = -(-(run.stop - top) // ROW_MULTIPLE) * ROW_MULTIPLE
        step = max(1, TILE_VALUES // (size * width))
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            values = np.zeros(((part.stop - first) * size, width), np.float32)
            columns_here = weight_OI[run, first * size : part.stop * size]
            values[: columns_here.shape[1], : len(columns_here)] = columns_here.T
            tile_codes, tile_scales, tile_zeros = _search_tile(
                values.reshape(-1, size, width),
                None if importance is None else importance[part],
                grid,
                transposed_blocks(scales[run, part], width, filler=1),
                None if zeros is None else transposed_blocks(zeros[run, part], width, filler=0),
            )
            codes[run, part] = tile_codes[:, :, : len(columns_here)].transpose(2, 0, 1)
            scales[run, part] = tile_scales[:, : len(columns_here)].T
            if zeros is not None:
                zeros[run, part] = tile_zeros[:, : len(columns_here)].T
    return Encoded(codes=codes, scales=scales, zeros=zeros)


def _search_tile(
    values: Floats, importance: Floats | None, grid: Grid, plain_scales: Floats, plain_zeros: Floats | None
) -> tuple[Codes, Floats, Floats]:
    low, high = values.min(axis=1), values.max(axis=1)
    # The largest magnitude, with its sign where one end of the grid reaches farther than the other.
    ends = np.where(high >= -low, high, low if grid.lowest < -grid.largest else -low)
    if not grid.is_symmetric:
        ends = np.abs(ends)
    ends[ends == 0] = 1
    shape = low.shape
    tile = _Tile(
        values=values / _wide(ends),
        importance=importance,
        grid=grid,
        codes=np.empty_like(values),
        rest=np.empty_like(values),
        errors=np.full(shape, np.inf, np.float32),
        steps=np.ones(shape, np.float32),
        zeros=np.zeros(shape, np.float32),
    )
    if grid.is_symmetric:
        for steps in _tried(grid, clips=importance is not None):
            tile.attempt(steps)
    else:
        _try_ranges(tile, np.minimum(low / ends, 0), np.maximum(high / ends, 0))
    if importance is not None:
        _try_reaches(tile, importance)
    tile.refine()
    return _best_of_both(tile, values, ends, plain_scales, plain_zeros)


def _tried(grid: Grid, *, clips: bool) -> tuple[float, ...]:
    if grid.bits == 8:
        return EIGHT_BITS + (CLIPPED_EIGHT if clips else ())
    if grid.bits == 4:
        return FOUR_BITS + (CLIPPED_FOUR if clips else ())
    return tuple(sign * grid.largest * more for sign in (1, -1) for more in SHRUNK + CLIPPED)


def _try_ranges(tile: _Tile, low: Floats, high: Floats) -> None:
    """Ranges smaller than the block's, centred at its middle and a code to either side."""
    grid = tile.grid
    codes = np.float32(grid.largest - grid.lowest)
    middle, span = (low + high) / 2, high - low
    span[span == 0] = 1
    for more in SHRUNK + (CLIPPED if tile.importance is not None else ()):
        steps = codes * np.float32(more) / span
        centre = np.rint((grid.lowest + grid.largest) / np.float32(2) - middle * steps)
        for shift in (0, -1, 1):
            tile.attempt(steps, np.clip(centre + np.float32(shift), grid.lowest, grid.largest))


def _try_reaches(tile: _Tile, importance: Floats) -> None:
    """Ranges from the weighted spread of a block, however far outside an unimportant weight lies."""
    grid, total = tile.grid, importance.sum(axis=1, keepdims=True)
    total[total == 0] = 1
    mean = np.zeros_like(tile.errors)
    if not grid.is_symmetric:
        mean = np.asarray(np.einsum("gn,gno->go", importance, tile.values), np.float32) / total
    spread = np.sqrt(np.maximum(tile.sums(tile.values, tile.values) / total - mean * mean, 0))
    spread[spread < SMALLEST] = 1
    half = np.float32(grid.largest - grid.lowest) / 2
    for reach in REACH.get(grid.bits, WIDEST_REACH):
        steps = half / (np.float32(reach) * spread)
        if grid.is_symmetric:
            tile.attempt(steps)
            if grid.lowest < -grid.largest:
                tile.attempt(-steps)
        else:
            centre = np.rint((grid.lowest + grid.largest) / np.float32(2) - mean * steps)
            tile.attempt(steps, np.clip(centre, grid.lowest, grid.largest))


def _best_of_both(
    tile: _Tile, values: Floats, ends: Floats, plain_scales: Floats, plain_zeros: Floats | None
) -> tuple[Codes, Floats, Floats]:
    """(codes, scales, zeros) of the best scales, or of plain rounding where its error is no larger."""
    scales = stored_scales(ends / tile.steps, tile.grid)
    np.copyto(scales, plain_scales, where=~(np.abs(scales) >= SMALLEST))  # no scale that divides badly
    plain = np.zeros_like(scales) if plain_zeros is None else plain_zeros.astype(np.float32)
    codes, errors = _rounded(tile, values, ends, scales, tile.zeros)
    plain_codes, plain_errors = _rounded(tile, values, ends, plain_scales, plain)
    is_plain = ~(errors < plain_errors)
    np.copyto(codes, plain_codes, where=_wide(is_plain))
    return codes, np.where(is_plain, plain_scales, scales), np.where(is_plain, plain, tile.zeros)


def _rounded(
    tile: _Tile, values: Floats, ends: Floats, scales: Floats, zeros: Floats
) -> tuple[Codes, Floats]:
    """The nearest codes exactly as `encode` rounds, and each block's error in units of its largest weight."""
    np.divide(values, _wide(scales), out=tile.rest)
    errors = tile.round_off(None if tile.grid.is_symmetric else zeros)
    codes = tile.codes if tile.grid.is_symmetric else tile.codes + _wide(zeros)
    unit = scales / ends
    with np.errstate(over="ignore", invalid="ignore"):  # of weights far smaller than a float16 scale
        return codes.astype(np.int8), errors * (unit * unit)


def _wide(per_block: NDArray[Any]) -> NDArray[Any]:
    return per_block[:, None, :]


def transposed_blocks(per_block: NDArray[Any], width: int, *, filler: int) -> NDArray[Any]:
    """[O, groups] as [groups, O], padded to the width."""
    padded_GO = np.full((per_block.shape[1], width), filler, per_block.dtype)
    padded_GO[:, : len(per_block)] = per_block.T
    return padded_GO


def _padded(values: Floats, length: int) -> Floats:
    return np.pad(np.asarray(values, np.float32), (0, length - len(values)))
