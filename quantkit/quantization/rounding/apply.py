"""Quantizing a whole model a few rows at a time: parts of tensors come out as soon as they are known.

Rows are read, fitted and rounded by two threads, because reading waits for the disk and numpy lets go
of the interpreter; the parts still come out in order, so that two runs write the same bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from quantkit.errors import InputError
from quantkit.model.model_map import Layer
from quantkit.plan.formats import Format, Grid
from quantkit.quantization.grid import Encoded, Floats, decode_all, halves_of, to_bytes
from quantkit.quantization.layout import HALVES, Contents, Evidence, Pack, TableEntry
from quantkit.quantization.rounding import PLAIN, QUANTIZERS, Quantizer
from quantkit.quantization.rounding.errors import Sums, sums_of

Part = tuple[str, NDArray[Any]]
Evidences = Callable[[Layer], Evidence | None]  # what calibration saw of a projection's input
CHUNK_VALUES = 1 << 20  # 4 MB of float32: large enough for numpy, small enough for the cache
MAX_THREADS = 4


class Source(Protocol):
    """What is needed of a checkpoint."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> Floats:
        """Rows as float32."""


def quantized_parts(
    contents: Contents,
    source: Source,
    *,
    transposed: Mapping[str, bool],
    gain_offset: float = 0.0,
    fit: str = PLAIN,
    evidence: Evidences = lambda _: None,
    threads: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
    losses: dict[str, Sums] | None = None,
) -> Iterator[Part]:
    """Every tensor of `contents`, in parts and in order.

    A matrix without the evidence that its fit wants is rounded plainly. `progress` is told how many weights
    of projections were done; together they are all of them. `losses` is filled with what each pack lost.
    """
    workers = threads or min(MAX_THREADS, os.cpu_count() or 1)
    # Each worker computes alone: BLAS with threads of its own beside them would make all wait for all.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        run = _Stream(pool=pool, depth=workers + 1, source=source, progress=progress)
        run.quantizer, run.evidence = QUANTIZERS[fit], evidence
        run.losses = {} if losses is None else losses
        for pack in contents.packs:
            yield from run.pack(pack, transposed=transposed)
        for entry in contents.tables:
            yield from run.table(entry)
        for norm in contents.norms:
            # The offset goes into the gain, so that nothing later needs to know of it.
            yield (
                f"{norm.name}.weight",
                source.read(f"{norm.name}.weight").reshape(-1) + np.float32(gain_offset),
            )
            if norm.name in contents.norm_biases:
                yield f"{norm.name}.bias", source.read(f"{norm.name}.bias")
        for name, _ in contents.loose:
            yield name, source.read(name)


class _Stream:
    """The threads, and what every tensor needs; a class only to keep the arguments in one place."""

    def __init__(
        self,
        *,
        pool: ThreadPoolExecutor,
        depth: int,
        source: Source,
        progress: Callable[[int], None],
    ) -> None:
        self.pool, self.depth, self.source, self.progress = pool, depth, source, progress
        self.quantizer: Quantizer = QUANTIZERS[PLAIN]
        self.evidence: Evidences = lambda _: None
        self.losses: dict[str, Sums] = {}

    def ordered(self, tasks: Iterator[Callable[[], Any]]) -> Iterator[Any]:
        """Results in order, with no more than `depth` tasks ahead of the reader."""
        waiting: deque[Future[Any]] = deque()
        for task in tasks:
            waiting.append(self.pool.submit(task))
            if len(waiting) >= self.depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def pack(self, pack: Pack, *, transposed: Mapping[str, bool]) -> Iterator[Part]:
        """Weights, scales, zero points and bias of one pack, and how its input is rounded."""
        seen = self.evidence(pack.layers[0])  # projections of one pack read the same input
        shift_O: list[Floats] = []
        if pack.grid is None:
            if pack.table is None:
                yield f"{pack.name}.weight_IO", self.float_IO(pack, transposed)
            else:
                self.progress(pack.out_features * pack.in_features)
        elif pack.grid.in_halves:
            yield from self.halves(pack, pack.grid, transposed, seen)
        elif pack.grid.block is None:
            yield from self.transposed_codes(pack, pack.grid, transposed, seen, shift_O)
        else:
            made = []
            for encoded, shift, lost in self.ordered(self.fitted(pack, pack.grid, transposed, seen)):
                self.losses[pack.name] = self.losses.get(pack.name, Sums()) + lost
                made.append((encoded.scales, encoded.zeros))
                shift_O.append(shift)
                self.progress(len(encoded.codes) * pack.in_features)  # without the padding
                yield f"{pack.name}.codes", to_bytes(encoded.codes, pack.grid.bits)
            yield from _scales(pack.name, made, pack.grid)
        if pack.has_bias:
            bias_O = np.concatenate([self.bias(layer) for layer in pack.layers])
            yield f"{pack.name}.bias", bias_O + np.concatenate(shift_O) if pack.adds_bias else bias_O
        fixed = input_grid(pack.name, pack.format, seen) if pack.format else None
        if fixed and pack.format and pack.format.input_bits:
            yield f"{pack.name}.input_scale", np.array(fixed[0], np.float32)
            yield f"{pack.name}.input_zero", np.array(fixed[1], f"u{pack.format.input_bits // 8}")

    def table(self, entry: TableEntry) -> Iterator[Part]:
        """A table of its own: always rounded plainly, since single rows of it are read."""
        name, rows, columns = entry.table.name, entry.table.num_rows, entry.table.num_columns
        if entry.shares:
            return
        if entry.grid is None:
            yield f"{name}.weight", self.source.read(f"{name}.weight")
            return
        grid, made = entry.grid, []
        step = max(1, CHUNK_VALUES // columns)

        def task(start: int) -> Callable[[], Encoded]:
            return lambda: QUANTIZERS[PLAIN].fit(self.source.read(f"{name}.weight", start, step), grid, None)

        for encoded in self.ordered(task(start) for start in range(0, rows, step)):
            made.append((encoded.scales, encoded.zeros))
            yield f"{name}.codes", to_bytes(encoded.codes, grid.bits)
        yield from _scales(name, made, grid)

    def fitted(
        self, pack: Pack, grid: Grid, transposed: Mapping[str, bool], seen: Evidence | None
    ) -> Iterator[Callable[[], tuple[Encoded, Floats, Sums]]]:
        """One task for each run of rows: their codes, what the bias must make up for, what is lost."""
        quantizer = usable(self.quantizer, seen, grid)
        fitting = fitting_for(quantizer, grid, seen)
        mean_I = seen.mean_I if seen and pack.adds_bias else None

        second_moment_II = seen.second_moment_II if seen else None
        is_plain = quantizer is QUANTIZERS[PLAIN]

        def task(
            rows: Callable[[], Floats], fit: Callable[[Floats], Encoded]
        ) -> Callable[[], tuple[Encoded, Floats, Sums]]:
            def work() -> tuple[Encoded, Floats, Sums]:
                weight_OI = rows()
                encoded = fit(weight_OI)
                lost = sums_of(weight_OI, encoded, grid, second_moment_II, is_plain=is_plain)
                if mean_I is None:
                    return encoded, np.zeros(len(weight_OI), np.float32), lost
                lost_OI = weight_OI - decode_all(encoded, pack.in_features)
                return encoded, np.asarray(lost_OI @ mean_I, np.float32), lost

            return work

        for layer, group in groupby(self.row_runs(pack, transposed), key=itemgetter(0)):
            runs = (rows for _, rows in group)
            join = fitting.joined(seen if layer is pack.layers[0] else self.evidence(layer))
            if join:
                yield task(partial(_joined_rows, [*runs]), join)
            else:
                yield from (task(rows, fitting.of_rows) for rows in runs)

    def row_runs(
        self, pack: Pack, transposed: Mapping[str, bool]
    ) -> Iterator[tuple[Layer, Callable[[], Floats]]]:
        """Readers of consecutive rows of each projection, each of a bounded size."""
        whole: tuple[str, Floats] | None = None
        for layer in pack.layers:
            name = weight_name(layer)
            step = max(1, CHUNK_VALUES // layer.in_features)
            if transposed[layer.stored_as]:  # [in, out] on disk: rows of it are columns of the weight
                if whole is None or whole[0] != name:
                    whole = (name, self.source.read(name).T)
                stored = whole[1]
                for start, count in runs_of(layer, step):
                    yield layer, partial(_rows, stored, start, count)
            else:
                for start, count in runs_of(layer, step):
                    yield layer, partial(_read_rows, self.source, layer, start, count)

    def transposed_codes(
        self,
        pack: Pack,
        grid: Grid,
        transposed: Mapping[str, bool],
        seen: Evidence | None,
        shift_O: list[Floats],
    ) -> Iterator[Part]:
        """Codes as [in, out], which per-channel operators read: the whole pack must be at hand."""
        codes_IO = np.empty((pack.in_features, pack.out_features), np.int8)
        scales, row = [], 0
        for encoded, shift, lost in self.ordered(self.fitted(pack, grid, transposed, seen)):
            self.losses[pack.name] = self.losses.get(pack.name, Sums()) + lost
            codes = encoded.codes
            codes_IO[:, row : row + len(codes)] = codes[:, 0].T
            scales.append(encoded.scales[:, 0])
            shift_O.append(shift)
            row += len(codes)
            self.progress(codes.size)
        yield f"{pack.name}.codes_IO", codes_IO
        yield f"{pack.name}.scales", np.concatenate(scales)

    def halves(
        self, pack: Pack, grid: Grid, transposed: Mapping[str, bool], seen: Evidence | None
    ) -> Iterator[Part]:
        """The high halves of all codes, then the low ones, which wait in memory."""
        scales, waiting = [], []
        for encoded, _, lost in self.ordered(self.fitted(pack, grid, transposed, seen)):
            self.losses[pack.name] = self.losses.get(pack.name, Sums()) + lost
            high, low = halves_of(encoded.codes[:, 0])
            scales.append(encoded.scales[:, 0])
            waiting.append(low)
            self.progress(low.size)
            yield f"{pack.name}.{HALVES[0]}", high
        for low in waiting:
            yield f"{pack.name}.{HALVES[1]}", low
        yield f"{pack.name}.scales", np.concatenate(scales)

    def float_IO(self, pack: Pack, transposed: Mapping[str, bool]) -> Floats:
        """The untouched weights as [in, out]."""
        weight_IO = np.empty((pack.in_features, pack.out_features), np.float32)
        row = 0
        for rows in self.ordered(rows for _, rows in self.row_runs(pack, transposed)):
            weight_IO[:, row : row + len(rows)] = rows.T
            row += len(rows)
            self.progress(rows.size)
        return weight_IO

    def bias(self, layer: Layer) -> Floats:
        """The bias of one projection; zeros where it has none."""
        if not layer.has_bias:
            return np.zeros(layer.out_features, np.float32)
        bias = self.source.read(f"{layer.matrix}.bias")
        return np.concatenate([bias[start : start + count] for start, count in runs_of(layer, len(bias))])


def _scales(name: str, made: list[tuple[Floats, NDArray[np.int8] | None]], grid: Grid) -> Iterator[Part]:
    yield f"{name}.scales", np.concatenate([scales for scales, _ in made])
    zeros = [each for _, each in made if each is not None]
    if zeros:
        yield f"{name}.zeros", to_bytes(np.concatenate(zeros), grid.bits)


def usable(quantizer: Quantizer, seen: Evidence | None, grid: Grid) -> Quantizer:
    """The fit itself, or the plain one: where calibration did not see what it wants, and at 16 bits."""
    if grid.in_halves:
        return QUANTIZERS[PLAIN]
    is_blind = quantizer.wants and (seen is None or not has_all(seen, quantizer.wants))
    return QUANTIZERS[PLAIN] if is_blind else quantizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """A fit of one matrix, with what its rows share prepared."""

    quantizer: Quantizer
    grid: Grid
    prepared: Any

    def of_rows(self, weight_OI: Floats) -> Encoded:
        """Any rows, each by itself."""
        return self.quantizer.fit(weight_OI, self.grid, self.prepared)

    def joined(self, seen: Evidence | None) -> Callable[[Floats], Encoded] | None:
        """All rows of a projection at once; None where that gains nothing over `of_rows`."""
        join, prepare_rows = self.quantizer.join, self.quantizer.prepare_rows
        if join is None or prepare_rows is None or seen is None or self.prepared is None:
            return None
        rows = prepare_rows(seen, self.grid)
        return None if rows is None else lambda weight_OI: join(weight_OI, self.grid, self.prepared, rows)


def fitting_for(quantizer: Quantizer, grid: Grid, seen: Evidence | None) -> Fitting:
    """Prepare what all rows of a matrix share."""
    prepared = quantizer.prepare(seen, grid) if quantizer.prepare and seen else None
    return Fitting(quantizer=quantizer, grid=grid, prepared=prepared)


def _joined_rows(runs: Sequence[Callable[[], Floats]]) -> Floats:
    return np.concatenate([read() for read in runs])


def input_grid(name: str, chosen: Format, seen: Evidence | None) -> tuple[float, int] | None:
    """(scale, zero point) of an input whose range calibration fixed; None where it is found at run time."""
    bits = chosen.input_bits
    if bits is None:
        return None
    low, high = static_range(name, seen, bits)
    low, high = min(low, 0.0), max(high, 0.0)
    steps = (1 << bits) - 1
    scale = (high - low) / steps or 1.0
    return float(np.float32(scale)), round(min(max(-low / scale, 0), steps))


def static_range(name: str, seen: Evidence | None, bits: int) -> tuple[float, float]:
    """The range to round an input in: the one of least squared error, or all that was seen."""
    if seen is None or seen.low is None or seen.high is None:
        raise InputError(
            "its input needs a range from calibration, which never reached it",
            where=name,
            next_step=f"--exclude '{name}', or calibrate on a text that uses it",
        )
    if seen.quantiles and f"mse{bits}" in seen.quantiles:
        return seen.quantiles[f"mse{bits}"]
    return seen.low, seen.high


def has_all(seen: Evidence, wanted: frozenset[str]) -> bool:
    """Whether calibration collected what a fit wants."""
    fields: dict[str, Any] = {
        "second_moment": seen.second_moment_II,
        "peak": seen.peak_I,
        "mean": seen.mean_I,
    }
    fields |= {"mean_magnitude": seen.mean_magnitude_I, "range": seen.low, "histogram": seen.quantiles}
    fields |= {"sample": seen.sample_TI}
    return all(fields[name] is not None for name in wanted)


def _rows(weight_OI: Floats, start: int, count: int) -> Floats:
    return np.ascontiguousarray(weight_OI[start : start + count])


def _read_rows(source: Source, layer: Layer, start: int, count: int) -> Floats:
    """Rows of the weight; of a block-diagonal one, the columns of each row's own block."""
    rows_OI = source.read(weight_name(layer), start, count)
    if layer.num_groups == 1:
        return rows_OI
    blocks = rows_OI.reshape(len(rows_OI), layer.num_groups, -1)
    own = (start + np.arange(len(blocks))) // blocks.shape[-1]
    return np.ascontiguousarray(blocks[np.arange(len(blocks)), own])


def weight_name(layer: Layer) -> str:
    """The checkpoint's tensor that holds the projection."""
    return f"{layer.tied_to or layer.matrix}.weight"


def runs_of(layer: Layer, step: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of every run of the stored matrix that belongs to the projection, cut to `step`."""
    rows = layer.rows
    for part in range(rows.count):
        first = rows.start + part * rows.stride
        for start in range(first, first + rows.length, step):
            yield start, min(step, first + rows.length - start)
