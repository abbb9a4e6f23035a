"""Scales searched for the least squared error of the outputs, under a diagonal model of the inputs.

An error of a weight costs as much as its input is large on average: the mean square of each input channel,
from calibration, weighs the search of `mse`. Channels are taken as independent of each other; what is lost
by that is what the feedback of `gptq` gains. The same idea stands behind llama.cpp's importance matrix and
the activation-weighted clipping of AWQ (https://arxiv.org/abs/2306.00978).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats
from quantkit.quantization.layout import Evidence
from quantkit.quantization.rounding.mse import search

FLOOR = 1e-3  # of the median: what this text leaves dead, another may wake


def input_power(evidence: Evidence, grid: Grid) -> Floats | None:
    """Mean square of every input channel over the mean of all; None where it says nothing."""
    assert evidence.second_moment_II is not None
    power_I = np.diagonal(evidence.second_moment_II).astype(np.float64)
    mean = power_I.mean()
    if not np.isfinite(mean) or mean <= 0:
        return None
    return floored(power_I / mean)


def floored(importance_I: NDArray[np.float64]) -> Floats:
    """Nothing is of no importance at all."""
    alive_I = importance_I[importance_I > 0]
    return np.asarray(np.maximum(importance_I, FLOOR * np.median(alive_I)), np.float32)


def least_output_error(weight_OI: Floats, grid: Grid, prepared: Floats | None) -> Encoded:
    """Errors count by the power of their input."""
    return search(weight_OI, grid, prepared)
