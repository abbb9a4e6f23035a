"""Quantizing a whole model a few rows at a time: parts of tensors come out as soon as they are known.

Rows are read, fitted and rounded by two threads, because reading waits for the disk and numpy lets go
of the interpreter; the parts still come out in order, so that two runs write the same bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.grid import Floats, encode, to_bytes
from quantkit.quantizers import QUANTIZERS, Fit
from quantkit.records import Layer
from quantkit.schemes import Grid
from quantkit.tensor_records import Contents, Pack, TableEntry

Part = tuple[str, NDArray[Any]]
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
    fit: str = "rtn",
    threads: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterator[Part]:
    """Every tensor of `contents`, in parts and in order.

    `progress` is told how many weights of projections were done; together they are all of them.
    """
    workers = threads or min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        run = _Stream(pool=pool, depth=workers + 1, source=source, fit=QUANTIZERS[fit], progress=progress)
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
        fit: Fit,
        progress: Callable[[int], None],
    ) -> None:
        self.pool, self.depth, self.source, self.fit, self.progress = pool, depth, source, fit, progress

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
        """Weights, scales and bias of one pack."""
        if pack.grid is None:
            if pack.table is None:
                yield f"{pack.name}.weight_IO", self.float_IO(pack, transposed)
            else:
                self.progress(pack.out_features * pack.in_features)
        elif pack.grid.block is None:
            yield from self.transposed_codes(pack, pack.grid, transposed)
        else:
            scales = []
            for codes, scale in self.ordered(self.encoded(pack, pack.grid, transposed)):
                scales.append(scale)
                self.progress(len(codes) * pack.in_features)  # without the padding
                yield f"{pack.name}.codes", to_bytes(codes)
            yield f"{pack.name}.scales", np.concatenate(scales)
        if pack.has_bias:
            yield f"{pack.name}.bias", np.concatenate([self.bias(layer) for layer in pack.layers])

    def table(self, entry: TableEntry) -> Iterator[Part]:
        """A table of its own."""
        name, rows, columns = entry.table.name, entry.table.num_rows, entry.table.num_columns
        if entry.shares:
            return
        if entry.grid is None:
            yield f"{name}.weight", self.source.read(f"{name}.weight")
            return
        grid, scales = entry.grid, []
        step = max(1, CHUNK_VALUES // columns)

        def task(start: int) -> Callable[[], tuple[NDArray[np.int8], Floats]]:
            return lambda: self.encode(self.source.read(f"{name}.weight", start, step), grid)

        for codes, scale in self.ordered(task(start) for start in range(0, rows, step)):
            scales.append(scale)
            yield f"{name}.codes", to_bytes(codes)
        yield f"{name}.scales", np.concatenate(scales)

    def encode(self, weight_OI: Floats, grid: Grid) -> tuple[NDArray[np.int8], Floats]:
        """Codes and scales of some rows."""
        scales = self.fit(weight_OI, grid)
        return encode(weight_OI, scales, grid), scales

    def encoded(
        self, pack: Pack, grid: Grid, transposed: Mapping[str, bool]
    ) -> Iterator[Callable[[], tuple[NDArray[np.int8], Floats]]]:
        """One task for each run of rows."""

        def task(rows: Callable[[], Floats]) -> Callable[[], tuple[NDArray[np.int8], Floats]]:
            return lambda: self.encode(rows(), grid)

        for rows in self.row_runs(pack, transposed):
            yield task(rows)

    def row_runs(self, pack: Pack, transposed: Mapping[str, bool]) -> Iterator[Callable[[], Floats]]:
        """Readers of consecutive rows of the pack, each of a bounded size."""
        whole: tuple[str, Floats] | None = None
        for layer in pack.layers:
            name = weight_name(layer)
            step = max(1, CHUNK_VALUES // layer.in_features)
            if transposed[layer.stored_as]:  # [in, out] on disk: rows of it are columns of the weight
                if whole is None or whole[0] != name:
                    whole = (name, self.source.read(name).T)
                stored = whole[1]
                for start, count in runs_of(layer, step):
                    yield partial(_rows, stored, start, count)
            else:
                for start, count in runs_of(layer, step):
                    yield partial(self.source.read, name, start, count)

    def transposed_codes(self, pack: Pack, grid: Grid, transposed: Mapping[str, bool]) -> Iterator[Part]:
        """Codes as [in, out], which per-channel operators read: the whole pack must be at hand."""
        codes_IO = np.empty((pack.in_features, pack.out_features), np.int8)
        scales, row = [], 0
        for codes, scale in self.ordered(self.encoded(pack, grid, transposed)):
            codes_IO[:, row : row + len(codes)] = codes[:, 0].T
            scales.append(scale[:, 0])
            row += len(codes)
            self.progress(codes.size)
        yield f"{pack.name}.codes_IO", codes_IO
        yield f"{pack.name}.scales", np.concatenate(scales)

    def float_IO(self, pack: Pack, transposed: Mapping[str, bool]) -> Floats:
        """The untouched weights as [in, out]."""
        weight_IO = np.empty((pack.in_features, pack.out_features), np.float32)
        row = 0
        for rows in self.ordered(iter(self.row_runs(pack, transposed))):
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


def _rows(weight_OI: Floats, start: int, count: int) -> Floats:
    return np.ascontiguousarray(weight_OI[start : start + count])


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
