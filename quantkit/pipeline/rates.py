"""Rates of this machine in its present state, measured in about a second.

Programs that run beside it slow the measurement as much as the run that it stands for.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.evaluation.memory import run_and_measure
from quantkit.runtime.machine.disk import temporary_folder

ROWS = 256  # of the timed product
LARGEST_WEIGHT = 1 << 22  # values of its weight
NUM_VALUES = 1 << 20
SECONDS = 0.5  # of each rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    macs: float  # of float32 products, a second
    passes: float  # values that one function reads and writes, a second
    file_bytes: float  # written, a second
    process_seconds: float  # to start a process that imports onnxruntime


@functools.cache
def measure_rates(in_features: int, out_features: int) -> Rates:
    """The rates for a model whose typical projection has this shape."""
    rows = max(1, min(out_features, LARGEST_WEIGHT // in_features))
    inputs_TI, weight_OI, values = (
        torch.ones(shape) for shape in ((ROWS, in_features), (rows, in_features), (NUM_VALUES,))
    )
    with temporary_folder() as folder:
        write_seconds = _mean_seconds(lambda: (folder / "values").write_bytes(values.numpy().data))
    return Rates(
        macs=ROWS * weight_OI.numel() / _mean_seconds(lambda: inputs_TI @ weight_OI.T),
        passes=2 * NUM_VALUES / _mean_seconds(lambda: torch.sigmoid(values) * values),
        file_bytes=values.numpy().nbytes / write_seconds,
        process_seconds=run_and_measure([sys.executable, "-c", "import onnxruntime"]).seconds,
    )


def _mean_seconds(run: Callable[[], object]) -> float:
    """Seconds of a run; pauses for other programs count."""
    run()
    start, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - start < SECONDS:
        run()
        count += 1
    return (time.perf_counter() - start) / count
