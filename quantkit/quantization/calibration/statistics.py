"""Input statistics: the results of calibration for the input of one matrix, and their names.

A fit, a transform or an activation format names the statistics that it needs; one pass over the calibration
text collects all of them. The record is plain numpy, so that whoever reads it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import Layer
from quantkit.quantization.grid import Floats

# Letters: T tokens, I channels of the input, O outputs.


@dataclass(frozen=True, kw_only=True, slots=True)
class InputStatistics:
    """Statistics of one matrix's input; None for those that were not collected."""

    num_rows: int  # tokens
    second_moment_II: Floats | None = None  # mean over tokens of x x^T
    peak_I: Floats | None = None  # largest magnitude of each channel
    mean_I: Floats | None = None
    mean_magnitude_I: Floats | None = None
    low: float | None = None  # range of the whole input
    high: float | None = None
    quantiles: Mapping[str, tuple[float, float]] | None = None  # "99.9", "mse8", "mse16" -> (low, high)
    sample_TI: Floats | None = None  # some tokens, drawn with a seed
    held_out_TI: Floats | None = None  # some tokens that the second moment leaves out
    gradient_OO: Floats | None = None  # second moment of the gradients at one projection's outputs
    num_gradients: int = 0  # tokens of that second moment

    def without(self, columns_I: NDArray[np.int64]) -> InputStatistics:
        """Statistics of the input with zeros in these columns."""

        def zeroed(values: Floats | None, axes: int) -> Floats | None:
            if values is None:
                return None
            others = values.copy()
            for axis in range(-axes, 0):
                np.moveaxis(others, axis, 0)[columns_I] = 0
            return others

        return replace(
            self,
            second_moment_II=zeroed(self.second_moment_II, 2),
            mean_I=zeroed(self.mean_I, 1),
            mean_magnitude_I=zeroed(self.mean_magnitude_I, 1),
            sample_TI=zeroed(self.sample_TI, 1),
            held_out_TI=zeroed(self.held_out_TI, 1),
        )

    def has(self, names: frozenset[str]) -> bool:
        return all(getattr(self, FIELDS[name]) is not None for name in names)


FIELDS = {  # statistic -> the field that holds it; arrays are stored under the name of their field
    "second_moment": "second_moment_II",
    "peak": "peak_I",
    "mean": "mean_I",
    "mean_magnitude": "mean_magnitude_I",
    "range": "low",
    "histogram": "quantiles",
    "sample": "sample_TI",
    "held_out": "held_out_TI",
}
StatisticsOf = Callable[[Layer], InputStatistics | None]  # None: calibration never reached the projection


def no_statistics(layer: Layer) -> None:
    """The statistics of a model that is not calibrated; named, since workers are sent it."""
