"""What every value of a graph reaches on some texts: the graph is run with all of its values as outputs.

Only minima, maxima and the least peak are kept, window by window: memory does not grow with the texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

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
    """The range of each named output over all windows."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    graph = str(model) if isinstance(model, Path) else model
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    seen: Ranges = {}
    for window in windows:
        for name, values in zip(names, session.run(list(names), dict(window)), strict=True):
            peaks = values.max(axis=-1)
            found = (float(values.min()), float(peaks.max()), float(peaks.min()))
            low, high, peak = seen.get(name, found)
            seen[name] = (min(low, found[0]), max(high, found[1]), min(peak, found[2]))
    assert seen, "no window"
    assert all(np.isfinite(found).all() for found in seen.values()), "a value is not finite"
    return seen
