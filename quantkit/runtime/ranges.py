"""Ranges of the values of a graph on calibration texts.

The graph itself reduces each value to four numbers at once, so the memory depends on the largest value and
not on the number of values or texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError

# (lowest, highest, least peak): the least peak is the smallest among the maxima of the rows. A softmax needs
# only the scores close to a peak.
Ranges = dict[str, tuple[float, float, float]]


def observe_ranges(
    model: bytes | Path,
    names: Sequence[str],
    windows: Iterable[Mapping[str, NDArray[Any]]],
    *,
    threads: int = 0,
) -> Ranges:
    """The range of each named value over all windows; the outputs of `model` are its four numbers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    graph = str(model) if isinstance(model, Path) else model
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    ranges: Ranges = {}
    outputs = [f"{name}/{kind}" for name in names for kind in ("low", "high", "peak", "sum")]
    for window in windows:
        numbers = iter(session.run(outputs, dict(window)))
        for name in names:
            new_low, new_high, new_peak, total = (float(next(numbers)) for _ in range(4))
            if not np.isfinite([new_low, new_high, new_peak, total]).all():
                raise InputError(
                    f"'{name}' is not finite on calibration text",
                    where="calibration",
                    next_step="look at the weights in front of it, or calibrate on another text",
                )
            low, high, peak = ranges.get(name, (new_low, new_high, new_peak))
            ranges[name] = (min(low, new_low), max(high, new_high), min(peak, new_peak))
    assert ranges, "no window"
    return ranges
