"""Time of one MatMul on this machine, for each shape of a model, in float and in integers.

Timed are graphs of the operators that the exporter writes, opened with the session options of a model. A
decoded token reads every weight of a model once, so each product finds its weights in memory unless the whole
model fits into the cache; several copies of a shape, run in turn, do so too. The formats of a shape are also
measured in turns, with a pause before each, because a machine has phases and the worker threads of the
session before still spin. Kept are the median of several turns, of which each counts its fastest run, and
the distance between their quartiles.

The export room builds the graphs, so the caller passes the functions:

    build = quantkit.export.probes.write_product_probe
    num_bytes = quantkit.export.probes.product_bytes
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from quantkit.model.model_map import to_json
from quantkit.plan.min_dim import FLOAT, Product, ShapeTime
from quantkit.runtime.graph import open_graph
from quantkit.runtime.machine.cache import Key, machine_key, read_measured, write_measured
from quantkit.runtime.machine.disk import temporary_folder
from quantkit.runtime.machine.facts import cache_bytes, read_memory

USUAL_CACHE_BYTES = 32 << 20
SMALLEST_RING_BYTES, LARGEST_RING_BYTES = 128 << 20, 512 << 20
BUSY_ROWS = 16  # that take about as long to compute as their weights to read
MIN_COPIES = 8  # of a small product: starting a run is shared by them
SMALL_BYTES = 1 << 20
SHARE_OF_MEMORY = 4  # one part in four of what is free: weights are in memory twice while they are packed
SETTLING_SECONDS = 0.05
NUM_TURNS, FEWEST_TURNS = 5, 3
SHAPE_SECONDS = 4.0
TURN_SECONDS = 0.02  # of one format and number of rows, at least two runs
Build = Callable[[Path, Product, str, int], Path]
NumBytes = Callable[[Product, str], int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    threads: int
    turns: int = NUM_TURNS
    turn_seconds: float = TURN_SECONDS
    shape_seconds: float = SHAPE_SECONDS  # after which no turn begins, as long as there were three


def measure_products(
    products: Iterable[Product],
    *,
    build: Build,
    num_bytes: NumBytes,
    settings: Settings,
    formats: Iterable[str] = (),
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[ShapeTime, ...]:
    """Times of every distinct shape in float, in its own format and in `formats`, for 1 row and for a prompt.

    Kept times of this machine are not measured again. A shape too large for the memory is left out.
    `progress` counts the shapes.
    """
    products = list(products)
    shapes: dict[tuple[int, int], list[Product]] = {}
    for product in products:
        shapes.setdefault((product.in_features, product.out_features), []).append(product)
    key = {**machine_key(), **to_json(settings)}
    kept, times = read_times(key), []
    for alike in shapes.values():
        first = alike[0]
        names = dict.fromkeys((FLOAT, *formats, *(product.format_name for product in alike)))
        rows = tuple(dict.fromkeys((1, *(product.prompt_rows for product in alike))))
        copies = {
            (name, count): num_copies(
                num_bytes(first, name), sum(num_bytes(product, name) for product in products), rows=count
            )
            for name in names
            for count in rows
        }
        labels = {run: _label(first, *run, number) for run, number in copies.items()}
        fits = num_bytes(first, FLOAT) < read_memory().available_bytes // SHARE_OF_MEMORY
        if fits and not all(label in kept for label in labels.values()):
            for measured in _measure_shape(first, copies, build=build, settings=settings):
                kept[labels[measured.format_name, measured.rows]] = measured
            write_measured("shapes", key, to_json(kept))
        times += [kept[label] for label in labels.values() if label in kept]
        progress(1)
    return tuple(times)


def num_copies(one_bytes: int, model_bytes: int, *, rows: int = 1) -> int:
    """Copies of a product whose weights exceed the cache, or the bytes of the model where these are fewer.

    A cache that a virtual machine reports may be a part of the real one, hence the wide margin. Many rows
    take longer to compute than to read, so fewer copies serve them.
    """
    ring = min(
        model_bytes, max(4 * (cache_bytes() or USUAL_CACHE_BYTES), SMALLEST_RING_BYTES), LARGEST_RING_BYTES
    )
    ring = min(ring, read_memory().available_bytes // SHARE_OF_MEMORY) // max(1, rows // BUSY_ROWS)
    return max(-(-ring // one_bytes), MIN_COPIES if one_bytes < SMALL_BYTES else 1)


def _label(product: Product, name: str, rows: int, copies: int) -> str:
    """Key of a time in the cache: everything that it depends on."""
    extra = ("+bias" if product.has_bias else "") + ("+table" if product.reads_table else "")
    return f"{product.in_features} x {product.out_features}{extra}, {name}, {rows} rows, {copies} copies"


def _measure_shape(
    product: Product, copies: Mapping[tuple[str, int], int], *, build: Build, settings: Settings
) -> list[ShapeTime]:
    """All formats of one shape, in turns; `copies` by format and number of rows."""
    runs: dict[tuple[str, int], Callable[[], None]] = {}
    for (name, rows), count in copies.items():
        with temporary_folder() as folder:
            session = open_graph(build(folder, product, name, count), threads=settings.threads)
        runs[name, rows] = _runner(session, product, rows, count)
    del session
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    num_runs = dict.fromkeys(runs, 0)
    end = time.perf_counter() + settings.shape_seconds
    for turn in range(settings.turns + 1):  # the first one warms up
        if turn > FEWEST_TURNS and time.perf_counter() > end:
            break
        for key, run in runs.items():
            if settings.threads > 1:
                time.sleep(SETTLING_SECONDS)
            per_run_us, count = _take_turn(run, settings)
            if turn:
                samples[key].append(per_run_us / copies[key])
                num_runs[key] += count * copies[key]
    runs.clear()
    gc.collect()  # sessions hold their weights until they are collected
    quartiles = {key: np.quantile(values, [0.25, 0.5, 0.75]) for key, values in samples.items()}
    return [
        ShapeTime(
            in_features=product.in_features,
            out_features=product.out_features,
            format_name=name,
            rows=rows,
            median_us=round(float(quartiles[name, rows][1]), 3),
            spread_us=round(float(quartiles[name, rows][2] - quartiles[name, rows][0]), 3),
            runs=num_runs[name, rows],
        )
        for name, rows in samples
    ]


def _take_turn(run: Callable[[], None], settings: Settings) -> tuple[float, int]:
    """(microseconds of the fastest run, number of runs): one to wake the threads, then at least two.

    The fastest, since other programs only ever make a run longer, and every run reads the weights anew. One
    thread is timed by the processor time that it takes, which waiting for its turn is no part of.
    """
    clock = time.thread_time if settings.threads == 1 else time.perf_counter
    run()
    taken: list[float] = []
    end = time.perf_counter() + settings.turn_seconds
    while len(taken) < 2 or time.perf_counter() < end:
        start = clock()
        run()
        taken.append((clock() - start) * 1e6)
    return min(taken), len(taken)


def _runner(
    session: onnxruntime.InferenceSession, product: Product, rows: int, copies: int
) -> Callable[[], None]:
    """A run of all copies, which read one input and write one output.

    In a model, too, products find their input in the cache, and their outputs share memory.
    """
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, rows, product.in_features), dtype=np.float32)
    y = np.zeros((1, rows, product.out_features), np.float32)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in (x, y)]
    binding = session.io_binding()
    for number in range(copies):
        binding.bind_ortvalue_input(f"x_{number}", values[0])
        binding.bind_ortvalue_output(f"y_{number}", values[1])
    arrays = (x, y)  # the values do not keep their memory alive

    def run() -> None:
        assert arrays
        session.run_with_iobinding(binding)

    return run


def read_times(key: Key) -> dict[str, ShapeTime]:
    """Times kept for this machine, by label; none where there are none or the file is damaged."""
    try:
        kept = (read_measured("shapes", key) or {}).items()
        times = {str(label): ShapeTime(**values) for label, values in kept}
        figures = [
            figure for time in times.values() for figure in (time.median_us, time.spread_us, time.runs)
        ]
        is_sound = all(math.isfinite(figure) and figure >= 0 for figure in figures)
    except (TypeError, AttributeError):
        return {}
    return times if is_sound else {}
