"""Ranges of inputs from a histogram whose bins are the leading bits of a float32.

Sign, exponent and eight bits of the fraction make 131,072 bins from the smallest number to the largest, each
at most 0.4% of its values wide. So the range need not be known before, one pass is enough, and neither the
order nor the size of the batches changes a count. The values of a bin are taken as spread evenly over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.quantization.grid import Doubles

# Letters: N occupied bins, in ascending order.
DROPPED_BITS = 15  # of the 23 of the fraction
HALF = 1 << (31 - DROPPED_BITS)  # bins of one sign
NUM_BINS = 2 * HALF
NARROWEST = 2.0**-30
LEVELS = ("99", "99.9", "99.99", "99.999")  # percent of the values at or below the upper end of a range
ERROR_BITS = (8, 16)
COARSE = 2.0 ** (-np.arange(25) / 2)  # shares of the full range to try: down to 1/4096
FINE = 2.0 ** (np.arange(-4, 5) / 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """The occupied bins of a histogram."""

    below_N: Doubles  # lower edges
    above_N: Doubles  # upper edges
    counts_N: Doubles
    low: float  # the smallest and the largest value themselves
    high: float


def read_bins(counts: NDArray[np.int64], low: float, high: float) -> Bins:
    """The occupied bins, by value; in `counts` negative values come first, each sign by magnitude."""
    codes = np.arange(HALF + 1, dtype=np.uint32) << np.uint32(DROPPED_BITS)
    with np.errstate(invalid="ignore"):  # codes beyond infinity are NaN
        edges = codes.view(np.float32).astype(np.float64)
    edges[~np.isfinite(edges)] = np.finfo(np.float32).max
    below = np.concatenate([-edges[:0:-1], edges[:-1]])
    above = np.concatenate([-edges[-2::-1], edges[1:]])
    ordered = np.concatenate([counts[:HALF][::-1], counts[HALF:]])
    kept = ordered > 0
    below_N, above_N = below[kept], above[kept]
    below_N[0], above_N[-1] = max(below_N[0], low), min(above_N[-1], high)
    # Counts are spread over the width of a bin, which must not be zero at the ends.
    above_N[0] = max(above_N[0], below_N[0] + NARROWEST * (1e-30 + abs(below_N[0])))
    below_N[-1] = min(below_N[-1], above_N[-1] - NARROWEST * (1e-30 + abs(above_N[-1])))
    counts_N = ordered[kept].astype(np.float64)
    return Bins(below_N=below_N, above_N=above_N, counts_N=counts_N, low=low, high=high)


def quantile(bins: Bins, share: float) -> float:
    """The value with this share of all values at or below it."""
    ends_N = np.cumsum(bins.counts_N)
    rank = share * ends_N[-1]
    place = min(int(np.searchsorted(ends_N, rank)), len(ends_N) - 1)
    within = 1 - (ends_N[place] - rank) / bins.counts_N[place]
    value = bins.below_N[place] + within * (bins.above_N[place] - bins.below_N[place])
    return float(np.clip(value, bins.low, bins.high))


def _cubes(x_N: Doubles) -> Doubles:
    return x_N * x_N * x_N  # a power costs ten times as much


def _rounding_integral(t_N: Doubles) -> Doubles:
    """The integral of (u - round(u))^2 from 0 to t; every whole step adds 1/12."""
    whole = np.rint(t_N)
    return whole / 12 + _cubes(t_N - whole) / 3


def squared_error(bins: Bins, low: float, high: float, bits: int) -> float:
    """The sum of squared errors of rounding to an asymmetric grid over [low, high] that holds zero."""
    num_steps = 2**bits - 1
    scale = (high - low) / num_steps
    bottom = -np.rint(-low / scale) * scale
    top = bottom + num_steps * scale
    ends = np.stack([bins.below_N, bins.above_N])
    inner = np.minimum(np.maximum(ends, bottom), top)
    clipped = _cubes(ends - inner) / 3
    errors = _rounding_integral(inner / scale) * scale**3 + clipped
    return float((bins.counts_N * (errors[1] - errors[0]) / (bins.above_N - bins.below_N)).sum())


def least_error_range(bins: Bins, bits: int) -> tuple[float, float]:
    """The range whose grid has the least squared error: both ends are cut together first, then each alone."""
    full = np.array([min(bins.low, 0.0), max(bins.high, 0.0)])
    if full[1] - full[0] < np.finfo(np.float32).tiny:  # zeros alone
        return (float(full[0]), float(full[1]))
    errors: dict[tuple[float, float], float] = {}

    def error(shares: tuple[float, float]) -> float:
        if shares not in errors:
            errors[shares] = squared_error(bins, float(full[0] * shares[0]), float(full[1] * shares[1]), bits)
        return errors[shares]

    best = min(((share, share) for share in COARSE.tolist()), key=error)
    for steps in (COARSE, FINE, FINE):
        for side in (1, 0):
            centre = 1.0 if steps is COARSE else best[side]
            tried = [min(1.0, float(centre * step)) for step in steps]
            options: list[Any] = [(best[0], share) if side else (share, best[1]) for share in tried]
            best = min([best, *options], key=error)
    low, high = full * best
    return (float(low), float(high))


def ranges_of(bins: Bins) -> dict[str, tuple[float, float]]:
    """Ranges by name: "99.9" from the 0.1% to the 99.9% quantile; "mse8" of the least squared error."""
    quantiles = {
        level: (quantile(bins, 1 - float(level) / 100), quantile(bins, float(level) / 100))
        for level in LEVELS
    }
    return quantiles | {f"mse{bits}": least_error_range(bins, bits) for bits in ERROR_BITS}
