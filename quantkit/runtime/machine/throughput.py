"""Throughput of this machine: read bandwidth, FP32 and INT8 arithmetic, the cost of starting a node.

The machine table holds peaks; these figures are those of onnxruntime's kernels on this machine, for the
roofline of `--device this`. Each is the median of repeated runs after a warm-up, kept with its spread.
Bandwidth is read by numpy: a plain sum keeps up with memory, and numpy releases the GIL, so that one thread
for each core reads a part of its own.

The export room builds the models, so they are passed as bytes:

    models = quantkit.export.probes.build_probe_models()
    measured = measure_throughput(**{field.name: getattr(models, field.name) for field in fields(models)})

A measurement takes about three seconds and is cached for the same processor, onnxruntime and quantkit.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quantkit.model.model_map import to_json
from quantkit.runtime.machine.cache import Key, read_measured, write_measured
from quantkit.runtime.machine.facts import read_cpu, read_memory

BUFFER_BYTES = 256 << 20  # several times the last-level cache of a desktop or a small server
BUFFER_BYTES_PER_THREAD = 32 << 20  # the cache of large servers grows with their cores, up to 12 MB for each


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    num_samples: int
    median_ms: float
    fastest_ms: float
    slowest_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Measured throughput; 1 GB = 1e9 bytes, 1 tera-op = 1e12 operations a second, a MAC counts as 2."""

    bandwidth_gb_per_s: float  # reading
    fp32_tera_ops: float
    int8_tera_ops: float  # the faster of the two integer kernels below
    integer_matmul_tera_ops: float  # MatMulInteger: the bare integer product
    block_matmul_tera_ops: float  # MatMulNBits: with the quantization of its activations
    dispatch_us: float  # one tiny node within a running graph; one that splits over threads costs more
    num_threads: int
    buffer_bytes: int
    timings: dict[str, Timing]

    @property
    def is_disturbed(self) -> bool:
        """Whether the typical run was far slower than the fastest: other programs used the machine."""
        return any(timing.median_ms > 1.5 * timing.fastest_ms for timing in self.timings.values())


def measure_throughput(
    *,
    float_matmul: bytes,
    integer_matmul: bytes,
    block_matmul: bytes,
    chain: bytes,
    num_operations: int,
    num_chain_nodes: int,
    num_threads: int | None = None,
    seconds: float = 2.5,
) -> Throughput:
    """Measure for about `seconds` plus set-up, with one thread for each usable core."""
    threads = num_threads or read_cpu().num_threads
    share = seconds / 5
    buffer_bytes = _buffer_bytes(threads, read_memory().available_bytes)
    timings = {
        "float_matmul": _time_model(float_matmul, threads, share),
        "integer_matmul": _time_model(integer_matmul, threads, share),
        "block_matmul": _time_model(block_matmul, threads, share),
        # Unoptimised, so that every node of the chain is run as it is written.
        "chain": _time_model(chain, threads, share, optimise=False),
        "read": _time_read(buffer_bytes, threads, share),
    }
    tera_ops = {
        name: num_operations / (timing.median_ms * 1e-3) / 1e12
        for name, timing in timings.items()
        if name.endswith("matmul")
    }
    return Throughput(
        bandwidth_gb_per_s=buffer_bytes / (timings["read"].median_ms * 1e-3) / 1e9,
        fp32_tera_ops=tera_ops["float_matmul"],
        int8_tera_ops=max(tera_ops["integer_matmul"], tera_ops["block_matmul"]),
        integer_matmul_tera_ops=tera_ops["integer_matmul"],
        block_matmul_tera_ops=tera_ops["block_matmul"],
        dispatch_us=timings["chain"].median_ms * 1e3 / num_chain_nodes,
        num_threads=threads,
        buffer_bytes=buffer_bytes,
        timings=timings,
    )


def read_bandwidth_gb_per_s(
    num_threads: int, *, seconds: float = 0.5, of: Literal["fastest", "median"] = "fastest"
) -> float:
    """Memory bandwidth of the fastest read, which no model on these threads beats by much, or the median."""
    num_bytes = _buffer_bytes(num_threads, read_memory().available_bytes)
    timing = _time_read(num_bytes, num_threads, seconds)
    return num_bytes / (timing.fastest_ms if of == "fastest" else timing.median_ms) / 1e6


def read_cache(key: Key) -> Throughput | None:
    """The cached measurement, or None where there is none or it is damaged: measuring again costs seconds."""
    try:
        return _from_json(read_measured("machine", key))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_cache(key: Key, throughput: Throughput) -> bool:
    return write_measured("machine", key, to_json(throughput))


def _from_json(values: Any) -> Throughput:
    """The record, or an exception where a figure is missing or impossible."""
    names = {field.name for field in dataclasses.fields(Throughput)}
    if set(values) != names:
        raise ValueError("fields differ")
    numbers = [value for name, value in values.items() if name != "timings"]
    if not all(
        isinstance(number, (int, float)) and math.isfinite(number) and number > 0 for number in numbers
    ):
        raise ValueError("a figure is not a positive number")
    timings = {name: Timing(**timing) for name, timing in values["timings"].items()}
    return Throughput(**{**values, "timings": timings})


def _time_model(model: bytes, num_threads: int, seconds: float, *, optimise: bool = True) -> Timing:
    """Run a one-input model on the CPU; small non-negative values suit every kernel."""
    import onnxruntime

    from quantkit.runtime.cpu_session import open_on_cpu

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_on_cpu(model, options)
    (model_input,) = session.get_inputs()
    generator = np.random.default_rng(0)
    values: npt.NDArray[Any] = generator.integers(0, 128, model_input.shape).astype(np.uint8)
    if model_input.type == "tensor(float)":
        values = values.astype(np.float32) / 127
    feeds = {model_input.name: values}
    return _time(lambda: session.run(None, feeds), seconds)


def _time_read(buffer_bytes: int, num_threads: int, seconds: float) -> Timing:
    """Sum a buffer of ones, each thread its own part; the sums are checked, so that no read is skipped."""
    num_values = buffer_bytes // 8 // num_threads
    with ThreadPoolExecutor(num_threads) as pool:
        parts = list(pool.map(lambda _: np.ones(num_values), range(num_threads)))

        def read() -> None:
            sums = list(pool.map(np.sum, parts))
            assert all(total == num_values for total in sums), "the buffer was not read whole"

        return _time(read, seconds)


def _time(run: Callable[[], object], seconds: float) -> Timing:
    """Two runs to warm up, then runs until the time is up, at least three."""
    run()
    run()
    samples_ms: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples_ms) < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        samples_ms.append((time.perf_counter() - start) * 1e3)
    return Timing(
        num_samples=len(samples_ms),
        median_ms=statistics.median(samples_ms),
        fastest_ms=min(samples_ms),
        slowest_ms=max(samples_ms),
    )


def _buffer_bytes(num_threads: int, available_bytes: int) -> int:
    """Well beyond the caches, at most a quarter of the free memory, a multiple of 8 bytes a thread."""
    num_bytes = min(max(BUFFER_BYTES, BUFFER_BYTES_PER_THREAD * num_threads), available_bytes // 4)
    return num_bytes // (8 * num_threads) * (8 * num_threads)
