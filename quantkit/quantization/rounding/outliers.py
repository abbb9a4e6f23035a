"""Outlier columns: the input columns with the largest activations, whose weights stay float16.

A few columns of an input can be a hundred times as large as the others and decide the scale of its block or
token. They are multiplied in float, and the integer product reads zeros in their place. The weights of these
columns are taken out of the integer grid, so that they enlarge no scale. Where an embedding reads the same
codes, the codes stay whole, and the float columns hold what they decode to.
https://arxiv.org/abs/2208.07339
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import Floats
from quantkit.quantization.layout import Pack, Part

LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outliers:
    """The outlier columns of one pack, and their weights as runs of rows are done."""

    columns_I: NDArray[np.int64]
    is_tied: bool  # an embedding reads the codes
    weights: list[Floats] = field(default_factory=list)  # [outliers, rows] of each run

    def on_grid(self, weight_OI: Floats) -> Floats:
        """The weights to be encoded: zeros in these columns, unless the codes stay whole."""
        if self.is_tied:
            return weight_OI
        others_OI = weight_OI.copy()
        others_OI[:, self.columns_I] = 0
        return others_OI

    def in_float(self, weight_OI: Floats, decode: Callable[[], Floats]) -> Floats:
        """The weights of these columns as [columns, rows]; `decode` gives what whole codes stand for."""
        values_OI = decode() if self.is_tied else weight_OI
        return np.ascontiguousarray(values_OI[:, self.columns_I].T)

    def seen_by_fit(self, statistics: InputStatistics) -> InputStatistics:
        """Statistics of the inputs whose weights are on the grid; whole codes have all of them."""
        return statistics if self.is_tied else statistics.without(self.columns_I)

    def parts(self, name: str) -> Iterator[Part]:
        weight_IO = np.concatenate(self.weights, axis=1)
        if np.abs(weight_IO).max(initial=0) > LARGEST_HALF:
            raise InputError(
                "the weights of its outlier columns are too large for float16",
                where=name,
                allowed=f"up to {LARGEST_HALF:.0f}",
                next_step="a scheme without outlier columns holds them: --scheme int8_token",
            )
        yield f"{name}.outlier_columns", self.columns_I
        yield f"{name}.outlier_weight_IO", weight_IO.astype(np.float16)


def outliers_of(pack: Pack, statistics: InputStatistics | None) -> Outliers | None:
    """Outlier columns of a pack; None for a format without them."""
    if not pack.num_outliers:
        return None
    if statistics is None or statistics.peak_I is None:
        raise InputError(
            "its outlier columns are chosen by the peaks of its input, which were not measured",
            where=pack.name,
            next_step="a scheme without outlier columns needs none: --scheme int8_token",
        )
    is_tied = pack.layers[0].tied_to is not None
    return Outliers(columns_I=outlier_columns(statistics.peak_I, pack.num_outliers), is_tied=is_tied)


def outlier_columns(peak_I: Floats, number: int) -> NDArray[np.int64]:
    """The columns with the largest peaks, in ascending order."""
    order_I = np.argsort(-np.asarray(peak_I, np.float64), kind="stable")
    return np.sort(order_I[:number]).astype(np.int64)
