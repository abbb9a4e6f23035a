"""Scales searched for the least squared error of the outputs, under a diagonal model of the inputs.

The error of a weight counts by the mean square of its input channel, from calibration, in the search of
`mse`. Channels are taken as independent of each other; `gptq` uses their correlations too. llama.cpp's
importance matrix and the activation-weighted clipping of AWQ (https://arxiv.org/abs/2306.00978) weigh errors
alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quantkit.plan.formats import Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import Floats

FLOOR = 1e-3  # of the median: a channel that is dead on this text may be active on another


def input_power(statistics: InputStatistics, grid: Grid) -> Floats | None:
    """Mean square of every input channel over the mean of all; None for inputs of zeros, or not finite."""
    assert statistics.second_moment_II is not None
    power_I = np.diagonal(statistics.second_moment_II).astype(np.float64)
    mean = power_I.mean()
    if not np.isfinite(mean) or mean <= 0:
        return None
    return floored(power_I / mean)


def floored(importance_I: NDArray[np.float64]) -> Floats:
    """Importances with a lower bound."""
    alive_I = importance_I[importance_I > 0]
    return np.asarray(np.maximum(importance_I, FLOOR * np.median(alive_I)), np.float32)
