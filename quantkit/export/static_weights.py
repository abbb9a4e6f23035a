"""Stored tensors as a static graph wants them: projections [in, out], tables as floats.

NPUs multiply with one scale for each output channel. Weights that a checkpoint holds on that grid are handed
over as they are, code by code; other grids and float weights become floats here, and `quantize_static`
rounds them to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.export.graph import Graph
from quantkit.grid import decode, from_bytes
from quantkit.schemes import Grid
from quantkit.tensor_records import Checkpoint, Contents, Pack, TableEntry

Floats = NDArray[np.float32]


def weight_IO(graph: Graph, pack: Pack, contents: Contents) -> str:
    """The weight of one pack: its codes behind a DequantizeLinear, or floats."""
    name, grid = pack.name, pack.grid
    if grid is not None and grid.block is None:
        scales = graph.weight(f"{name}.scales")
        zeros = graph.constant(f"{name}.zeros", np.zeros(pack.out_features, np.int8))
        # The codes are most of a model, and nothing here has to look at them: they stay where they are.
        codes = replace(graph, keeps_weights_outside=True).weight(f"{name}.codes_IO")
        return graph.op("DequantizeLinear", codes, scales, zeros, name=f"{name}/weight", axis=1)
    if grid is None and pack.table is None:
        return graph.weight(f"{name}.weight_IO")
    if grid is None:
        entry = next(each for each in contents.tables if each.table.name == pack.table)
        values = table_values(graph.checkpoint, entry)
    else:
        values = _in_blocks(graph.checkpoint, name, grid, pack.in_features)
    return graph.constant(f"{name}.weight_IO", np.ascontiguousarray(values.T))


def table_values(checkpoint: Checkpoint, entry: TableEntry) -> Floats:
    """All rows of an embedding."""
    holder = entry.shares or entry.table.name
    if entry.grid is None:
        return np.asarray(checkpoint.read(f"{holder}.weight"), np.float32)
    if entry.grid.block is None and f"{holder}.codes_IO" in checkpoint.slots:
        scales: NDArray[Any] = checkpoint.read(f"{holder}.scales")
        return np.ascontiguousarray((checkpoint.read(f"{holder}.codes_IO") * scales).T, np.float32)
    return _in_blocks(checkpoint, holder, entry.grid, entry.table.num_columns)


def _in_blocks(checkpoint: Checkpoint, name: str, grid: Grid, columns: int) -> Floats:
    stored, scales = checkpoint.read(f"{name}.codes"), checkpoint.read(f"{name}.scales")
    codes = from_bytes(stored, grid.bits, grid.block or columns)
    zeros = None
    if not grid.is_symmetric:
        zeros = from_bytes(checkpoint.read(f"{name}.zeros"), grid.bits, grid.num_blocks(columns))
    return decode(codes, scales, columns, zeros)
