"""Stored tensors as a static graph wants them: projections [in, out], tables as floats.

NPUs multiply with one scale for each output channel. Weights that a checkpoint holds on that grid are handed
over as they are, code by code; other grids and float weights become floats here, and `quantize_static`
rounds them to it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quantkit.export.graph import Graph
from quantkit.quantization.layout import HALVES, Checkpoint, Contents, Pack, TableEntry

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
        values = graph.checkpoint.weight_OI(name, grid, pack.in_features)
    return graph.constant(f"{name}.weight_IO", np.ascontiguousarray(values.T))


def halves_OI(graph: Graph, name: str) -> list[str]:
    """What the high and the low halves of a projection's codes add up to, [out, in] each."""
    scales = graph.checkpoint.read(f"{name}.scales")
    return [
        _half(graph, name, half, label=f"{name}.{half}", scales=np.asarray(scales * np.float32(worth)))
        for half, worth in zip(HALVES, (256, 1), strict=True)
    ]


def half_rows(graph: Graph, name: str, label: str) -> list[str]:
    """The same as tables of codes, in units of 256, for an embedding that multiplies what it finds.

    They have names of their own: Qualcomm's compiler computes nonsense where one tensor has two grids.
    """
    return [
        _half(graph, name, half, label=f"{label}/{half}", scales=np.array(worth, np.float32))
        for half, worth in zip(HALVES, (1, 1 / 256), strict=True)
    ]


def _half(graph: Graph, name: str, half: str, *, label: str, scales: Floats) -> str:
    codes = replace(graph, keeps_weights_outside=True).weight(f"{name}.{half}", label=label)
    inputs = [codes, graph.constant(f"{label}/scales", scales)]
    inputs.append(graph.constant(f"{label}/zeros", np.zeros(scales.shape, np.int8)))
    return graph.op("DequantizeLinear", *inputs, name=f"{label}/weight", axis=0)  # where scales have one


def table_values(checkpoint: Checkpoint, entry: TableEntry) -> Floats:
    """All rows of an embedding."""
    holder = entry.shares or entry.table.name
    if entry.grid is None:
        return np.asarray(checkpoint.read(f"{holder}.weight"), np.float32)
    return checkpoint.weight_OI(holder, entry.grid, entry.table.num_columns)
