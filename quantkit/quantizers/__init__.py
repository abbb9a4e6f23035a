"""Fits: how the scales of a grid are chosen. One line of the table each, and one file."""

from __future__ import annotations

from collections.abc import Callable

from quantkit.grid import Floats, largest_magnitude_scales
from quantkit.schemes import Grid

Fit = Callable[[Floats, Grid], Floats]  # weight_OI, grid -> scales [O, blocks]

QUANTIZERS: dict[str, Fit] = {
    "rtn": largest_magnitude_scales,  # round to nearest: the largest magnitude of a block is exact
}
