"""What every value of a graph reaches on some texts: the graph is run with that as its outputs.

The graph itself reduces each value to four numbers as soon as it has it, so memory follows the largest
values and neither their number nor the texts'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError

# (lowest, highest, least peak): the last is the smallest among the largest values of the rows. A softmax
# needs no more of its scores than what comes close to a peak.
Ranges = dict[str, tuple[float, float, float]]


def observe_ranges(
    model: bytes | Path,
    names: Sequence[str],
    windows: Iterable[Mapping[str, NDArray[Any]]],
    *,
    threads: int = 0,
) -> Ranges:
    """The range of each named value over all windows; `model` gives its numbers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    graph = str(model) if isinstance(model, Path) else model
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    seen: Ranges = {}
    wanted = [f"{name}/{kind}" for name in names for kind in ("low", "high", "peak", "sum")]
    for window in windows:
        numbers = iter(session.run(wanted, dict(window)))
        for name in names:
            found = float(next(numbers)), float(next(numbers)), float(next(numbers))
            if not np.isfinite([*found, next(numbers)]).all():
                raise InputError(
                    f"'{name}' is not finite on calibration text",
                    where="calibration",
                    next_step="look at the weights in front of it, or calibrate on another text",
                )
            low, high, peak = seen.get(name, found)
            seen[name] = (min(low, found[0]), max(high, found[1]), min(peak, found[2]))
    assert seen, "no window"
    return seen
