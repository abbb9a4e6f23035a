"""Records of histograms, free of torch: reports read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts in equal bins from `low` to `high`."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipping:
    """Values of the largest code, over all scales."""

    lowest: float
    median: float
    highest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PackHistograms:
    """Histograms of one pack, before and after rounding."""

    name: str
    format: str
    weights: Histogram
    rounded: Histogram
    weight_clipping: Clipping
    inputs: Histogram | None = None  # on calibration text
    input_clipping: Clipping | None = None  # of dynamic scales, which reach every value
    input_range: tuple[float, float] | None = None  # from calibration
