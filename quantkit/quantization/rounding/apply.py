"""Quantizing a whole model a few rows at a time: parts of tensors come out as soon as they are known.

Rows are read and encoded by several threads, because reading waits for the disk and numpy releases the
interpreter lock; the parts still come out in order, so that two runs write the same bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from quantkit.errors import InputError
from quantkit.model.model_map import Layer
from quantkit.model.weights.headers import Groups
from quantkit.model.weights.tensors import TensorSource
from quantkit.plan.formats import Format, Grid
from quantkit.quantization.calibration.statistics import InputStatistics, StatisticsOf
from quantkit.quantization.grid import LARGEST_SCALE, Encoded, Floats, decode_all, halves_of, to_bytes
from quantkit.quantization.layout import (
    HALVES,
    Contents,
    Pack,
    Part,
    TableEntry,
)
from quantkit.quantization.projections import bias_of, gain_of, is_transposed, runs_of, weight_name
from quantkit.quantization.rounding import FITS, PLAIN, Fit
from quantkit.quantization.rounding.errors import Sums, loses_more, sums_of
from quantkit.quantization.rounding.kept import groups_of, kept
from quantkit.quantization.rounding.outliers import Outliers, outliers_of
from quantkit.quantization.rounding.rtn import round_to_nearest

CHUNK_VALUES = 1 << 20  # 4 MB of float32: large enough for numpy, small enough for the cache
MAX_THREADS = 4
Rows = Callable[[], Floats]  # reads some rows of a weight


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedFit:
    """The fit of one matrix, with the part that its rows share."""

    fit: Fit
    grid: Grid
    prepared: Any
    held_out_TI: Floats | None = None

    def encode(self, weight_OI: Floats) -> Encoded:
        """Encode any rows, each by itself; to nearest where the fit loses more on held-out tokens."""
        encoded = self.fit.encode(weight_OI, self.grid, self.prepared)
        return encoded if encoded.is_plain else self.checked(weight_OI, encoded)

    def checked(self, weight_OI: Floats, encoded: Encoded) -> Encoded:
        """The encoded rows, or plainly rounded ones."""
        if self.held_out_TI is None:
            return encoded
        plain = round_to_nearest(weight_OI, self.grid)
        return plain if loses_more(weight_OI, encoded, plain, self.held_out_TI) else encoded

    def jointly(self, statistics: InputStatistics | None) -> Callable[[Floats], Encoded] | None:
        """Encoding of all rows of a projection at once; None where that gains nothing over `encode`."""
        encode, prepare = self.fit.encode_jointly, self.fit.prepare_outputs
        if encode is None or prepare is None or statistics is None or self.prepared is None:
            return None
        outputs = prepare(statistics, self.grid)
        if outputs is None:
            return None

        def encode_rows(weight_OI: Floats) -> Encoded:
            encoded = self.checked(weight_OI, encode(weight_OI, self.grid, self.prepared, outputs))
            return self.encode(weight_OI) if encoded.is_plain else encoded

        return encode_rows


def prepared_fit(fit: str, grid: Grid, statistics: InputStatistics | None) -> PreparedFit:
    """The fit of a matrix; plain rounding where its statistics are missing, and at 16 bits."""
    row = FITS[fit]
    is_blind = row.statistics and (statistics is None or not statistics.has(row.statistics))
    if is_blind or grid.in_halves:
        row = FITS[PLAIN]
    prepared = row.prepare(statistics, grid) if row.prepare and statistics else None
    held_out_TI = statistics.held_out_TI if statistics else None
    return PreparedFit(fit=row, grid=grid, prepared=prepared, held_out_TI=held_out_TI)


def quantized_parts(
    contents: Contents,
    source: TensorSource,
    *,
    gain_offset: float = 0.0,
    fit: str = PLAIN,
    statistics: StatisticsOf = lambda _: None,
    threads: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
    losses: dict[str, Sums] | None = None,
) -> Iterator[Part]:
    """Every tensor of `contents`, in parts and in order.

    A matrix without the statistics that its fit needs is rounded plainly. `progress` is called with numbers
    of finished weights, which add up to those of all projections. `losses` is filled with the rounding
    errors of each pack.
    """
    workers = threads or min(MAX_THREADS, os.cpu_count() or 1)
    # Each worker computes alone: BLAS threads beside them would make all wait for all.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        rounding = _Rounding(
            pool=pool,
            depth=workers + 1,
            source=source,
            fit=fit,
            statistics=statistics,
            progress=progress,
            losses={} if losses is None else losses,
        )
        for pack in contents.packs:
            yield from rounding.pack(pack)
        for entry in contents.tables:
            yield from rounding.table(entry)
        for norm in contents.norms:
            # The offset goes into the gain, so that nothing later needs to know of it.
            yield f"{norm.name}.weight", gain_of(source, norm, gain_offset)
            if norm.name in contents.norm_biases:
                yield f"{norm.name}.bias", source.read(f"{norm.name}.bias")
        for name, _ in contents.loose:
            yield name, source.read(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Some rows on their grid."""

    encoded: Encoded
    shift_O: Floats  # mean output error
    lost: Sums
    outliers_IO: Floats | None  # their outlier columns


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rounding:
    """The threads, and the arguments that every tensor needs."""

    pool: ThreadPoolExecutor
    depth: int
    source: TensorSource
    fit: str
    statistics: StatisticsOf
    progress: Callable[[int], None]
    losses: dict[str, Sums]

    def ordered(self, tasks: Iterable[Callable[[], Any]]) -> Iterator[Any]:
        """Results in order, with at most `depth` tasks ahead of the reader."""
        waiting: deque[Future[Any]] = deque()
        for task in tasks:
            waiting.append(self.pool.submit(task))
            if len(waiting) >= self.depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def pack(self, pack: Pack) -> Iterator[Part]:
        """Weights, scales, zero points and bias of one pack, and the factors and the grid of its input."""
        statistics = self.statistics(pack.layers[0])  # projections of one pack read the same input
        shifts: list[Floats] = []
        outliers = outliers_of(pack, statistics)
        if pack.grid:
            encoded = self.encoded(pack, pack.grid, statistics, outliers, shifts)
            if pack.grid.in_halves:
                yield from _in_halves(pack.name, encoded)
            elif pack.grid.block is None:
                yield from _transposed(pack, encoded)
            else:
                yield from _in_blocks(pack.name, encoded, pack.grid)
            if outliers:
                yield from outliers.parts(pack.name)
        elif pack.table is None:
            yield f"{pack.name}.weight_IO", self.float_IO(pack)
        else:
            self.progress(pack.out_features * pack.in_features)
        if pack.has_bias:
            bias_O = np.concatenate([bias_of(self.source, layer) for layer in pack.layers])
            yield f"{pack.name}.bias", bias_O + np.concatenate(shifts) if pack.adds_bias else bias_O
        if pack.input_factors:
            yield f"{pack.name}.input_factors", self.source.read(pack.input_factors)
        fixed = input_grid(pack.name, pack.format, statistics) if pack.format else None
        if fixed and pack.format and pack.format.input_bits:
            yield f"{pack.name}.input_scale", np.array(fixed[0], np.float32)
            yield f"{pack.name}.input_zero", np.array(fixed[1], f"u{pack.format.input_bits // 8}")

    def table(self, entry: TableEntry) -> Iterator[Part]:
        """An embedding's own table: always rounded plainly, since single rows of it are read."""
        name, rows, columns, grid = (
            entry.table.name,
            entry.table.num_rows,
            entry.table.num_columns,
            entry.grid,
        )
        if entry.shares:
            return
        if grid is None:
            yield f"{name}.weight", self.source.read(f"{name}.weight")
            return
        plain, step = prepared_fit(PLAIN, grid, None), max(1, CHUNK_VALUES // columns)

        def task(start: int) -> Encoded:
            rows_OI = self.source.read(f"{name}.weight", start, step)
            groups = groups_of(self.source, f"{name}.weight", start, len(rows_OI))
            return kept(rows_OI, grid, groups) or plain.encode(rows_OI)

        tasks = (partial(task, start) for start in range(0, rows, step))
        yield from _in_blocks(name, self.ordered(tasks), grid)

    def encoded(
        self,
        pack: Pack,
        grid: Grid,
        statistics: InputStatistics | None,
        outliers: Outliers | None,
        shifts: list[Floats],
    ) -> Iterator[Encoded]:
        """Runs of rows on their grid; `shifts` gets the mean output errors that the bias corrects.

        `outliers` gets its columns of the weights.
        """
        if statistics and outliers:
            statistics = outliers.seen_by_fit(statistics)
        prepared = prepared_fit(self.fit, grid, statistics)
        moment_II = statistics.second_moment_II if statistics else None
        mean_I = statistics.mean_I if statistics and pack.adds_bias else None

        def task(
            rows: Rows,
            encode: Callable[[Floats], Encoded],
            groups: Callable[[], Groups | None] = lambda: None,
        ) -> _Run:
            whole_OI = rows()
            weight_OI = outliers.on_grid(whole_OI) if outliers else whole_OI
            as_stored = kept(weight_OI, grid, groups())
            run = as_stored or encode(weight_OI)
            decoded = partial(decode_all, run, pack.in_features)
            float_IO = outliers.in_float(whole_OI, decoded) if outliers else None
            lost = sums_of(weight_OI, run, grid, moment_II)
            lost = replace(lost, num_kept=len(run.codes) if as_stored else 0)
            shift_O = np.zeros(len(weight_OI), np.float32)
            if mean_I is not None:
                lost_OI = weight_OI - decoded()
                shift_O = np.asarray(lost_OI @ mean_I, np.float32)
            return _Run(encoded=run, shift_O=shift_O, lost=lost, outliers_IO=float_IO)

        def tasks() -> Iterator[Callable[[], _Run]]:
            for layer, group in groupby(self.row_runs(pack), key=itemgetter(0)):
                runs = [(rows, groups) for _, rows, groups in group]
                own = statistics
                if layer is not pack.layers[0]:
                    own = self.statistics(layer)
                    own = outliers.seen_by_fit(own) if own and outliers else own
                jointly = prepared.jointly(own)
                if jointly:
                    yield partial(task, partial(_joined_rows, [rows for rows, _ in runs]), jointly)
                else:
                    yield from (partial(task, rows, prepared.encode, groups) for rows, groups in runs)

        for run in self.ordered(tasks()):
            self.losses[pack.name] = self.losses.get(pack.name, Sums()) + run.lost
            shifts.append(run.shift_O)
            if outliers and run.outliers_IO is not None:
                outliers.weights.append(run.outliers_IO)
            self.progress(len(run.encoded.codes) * pack.in_features)  # without the padding
            yield run.encoded

    def row_runs(self, pack: Pack) -> Iterator[tuple[Layer, Rows, Callable[[], Groups | None]]]:
        """Readers of consecutive rows of each projection, each of a bounded size, and of their groups."""
        whole: tuple[str, Floats] | None = None
        for layer in pack.layers:
            name = weight_name(layer)
            runs = runs_of(layer, max(1, CHUNK_VALUES // layer.in_features))
            if is_transposed(layer):  # [in, out]: stored rows are columns of the weight
                if whole is None or whole[0] != name:
                    whole = (name, self.source.read(name).T)
                for start, count in runs:
                    yield layer, partial(np.ascontiguousarray, whole[1][start : start + count]), lambda: None
            else:
                for start, count in runs:
                    groups = partial(groups_of, self.source, name, start, count)
                    is_dense = layer.num_groups == 1
                    rows = partial(_read_rows, self.source, layer, start, count)
                    yield layer, rows, groups if is_dense else lambda: None

    def float_IO(self, pack: Pack) -> Floats:
        """The untouched weights as [in, out]."""
        weight_IO = np.empty((pack.in_features, pack.out_features), np.float32)
        row = 0
        for rows_OI in self.ordered(rows for _, rows, _ in self.row_runs(pack)):
            weight_IO[:, row : row + len(rows_OI)] = rows_OI.T
            row += len(rows_OI)
            self.progress(rows_OI.size)
        return weight_IO


def _in_blocks(name: str, encoded: Iterator[Encoded], grid: Grid) -> Iterator[Part]:
    scales, zeros = [], []
    for run in encoded:
        scales.append(run.scales)
        if run.zeros is not None:
            zeros.append(run.zeros)
        yield f"{name}.codes", to_bytes(run.codes, grid.bits)
    all_scales = np.concatenate(scales)
    yield f"{name}.scales", _halves(name, all_scales) if grid.block else all_scales
    if zeros:
        yield f"{name}.zeros", to_bytes(np.concatenate(zeros), grid.bits)


def _halves(name: str, scales: Floats) -> NDArray[np.float16]:
    """Scales of blocks as they are stored; each is a float16 already."""
    if np.abs(scales).max(initial=0) >= LARGEST_SCALE:
        raise InputError(
            "its weights are too large for the scales of blocks, which are float16",
            where=name,
            allowed=f"scales below {LARGEST_SCALE:.0f}",
            next_step="a scheme with one scale a row holds them: --scheme int8_channel",
        )
    halves = scales.astype(np.float16)
    assert (halves == scales).all(), f"{name}: codes were rounded on other scales than are stored"
    return halves


def _transposed(pack: Pack, encoded: Iterator[Encoded]) -> Iterator[Part]:
    """Codes as [in, out], which per-channel operators read: the whole pack must be in memory."""
    codes_IO = np.empty((pack.in_features, pack.out_features), np.int8)
    scales, row = [], 0
    for run in encoded:
        codes_IO[:, row : row + len(run.codes)] = run.codes[:, 0].T
        scales.append(run.scales[:, 0])
        row += len(run.codes)
    yield f"{pack.name}.codes_IO", codes_IO
    yield f"{pack.name}.scales", np.concatenate(scales)


def _in_halves(name: str, encoded: Iterator[Encoded]) -> Iterator[Part]:
    """The high halves of all codes, then the low halves, which wait in memory."""
    scales, waiting = [], []
    for run in encoded:
        high, low = halves_of(run.codes[:, 0])
        scales.append(run.scales[:, 0])
        waiting.append(low)
        yield f"{name}.{HALVES[0]}", high
    for low in waiting:
        yield f"{name}.{HALVES[1]}", low
    yield f"{name}.scales", np.concatenate(scales)


def _joined_rows(runs: Sequence[Rows]) -> Floats:
    return np.concatenate([read() for read in runs])


def _read_rows(source: TensorSource, layer: Layer, start: int, count: int) -> Floats:
    """Rows of the weight; of a block-diagonal one, the columns of each row's own block."""
    rows_OI = source.read(weight_name(layer), start, count)
    if layer.num_groups == 1:
        return rows_OI
    blocks = rows_OI.reshape(len(rows_OI), layer.num_groups, -1)
    own = (start + np.arange(len(blocks))) // blocks.shape[-1]
    return np.ascontiguousarray(blocks[np.arange(len(blocks)), own])


def input_grid(name: str, chosen: Format, statistics: InputStatistics | None) -> tuple[float, int] | None:
    """(scale, zero point) of a calibrated input range; None where the runtime finds the range.

    The range is the one of least squared error, or else from the smallest to the largest value.
    """
    bits = chosen.input_bits
    if bits is None:
        return None
    if statistics is None or statistics.low is None or statistics.high is None:
        raise InputError(
            "its input needs a range from calibration, which never reached it",
            where=name,
            next_step=f"--exclude '{name}', or calibrate on a text that uses it",
        )
    low, high = (statistics.quantiles or {}).get(f"mse{bits}", (statistics.low, statistics.high))
    low, high = min(low, 0.0), max(high, 0.0)
    steps = (1 << bits) - 1
    scale = (high - low) / steps or 1.0
    return float(np.float32(scale)), round(min(max(-low / scale, 0), steps))
