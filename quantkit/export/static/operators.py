"""The parts that static graphs are put together from, in standard operators alone.

Each is a form that NPU compilers take for one operation of theirs: a product of two dimensions with its bias,
heads side by side in four, an activation with an operator of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.export.graph import Graph
from quantkit.export.static.value_grid import Ranges
from quantkit.export.static.weights import (
    Floats,
    half_rows,
    halves_OI,
    table_values,
    weight_IO,
)
from quantkit.model.model_map import Activation
from quantkit.quantization.layout import HALVES, Checkpoint, Contents, Pack, TableEntry

EMBEDDING = "embedding"
HIDDEN = -50.0  # added to a hidden score: e^-50 is nothing beside any score that is seen
ACTIVATIONS: dict[Activation, tuple[str, dict[str, Any]]] = {
    Activation.RELU: ("Relu", {}),
    Activation.GELU: ("Gelu", {}),
    Activation.GELU_TANH: ("Gelu", {"approximate": "tanh"}),
}


def product(graph: Graph, contents: Contents, pack: Pack, x: str) -> str:
    """x W^T + b for rows x [tokens, in]."""
    name = pack.name
    graph.integer_nodes[name] = [layer.name for layer in pack.layers]  # once it is quantized
    if pack.grid is not None and pack.grid.in_halves:
        return _two_products(graph, pack, x)
    weight = weight_IO(graph, pack, contents)
    if pack.has_bias:
        return graph.op("Gemm", x, weight, graph.weight(f"{name}.bias"), name=name)
    return graph.op("MatMul", x, weight, name=name)


def _two_products(graph: Graph, pack: Pack, x: str) -> str:
    """The same with weights of 16 bits: no operator has them, and two of 8 add up to them."""
    name = pack.name
    labels = (name, f"{name}/low")
    parts = [
        graph.op("Gemm", x, half, name=label, transB=1)
        for label, half in zip(labels, halves_OI(graph, name), strict=True)
    ]
    whole = graph.op("Add", *parts, name=f"{name}/whole")
    if not pack.has_bias:
        return whole
    return graph.op("Add", whole, graph.weight(f"{name}.bias"), name=f"{name}/biased")


def reshape(graph: Graph, name: str, x: str, *sizes: int) -> str:
    """The same values in another shape."""
    return graph.op("Reshape", x, graph.integers(*sizes), name=name)


def floats(graph: Graph, name: str, values: Any) -> str:
    """A constant of floats, which gets a grid like any other value."""
    return graph.constant(name, np.asarray(values, np.float32))


def rows(graph: Graph, name: str, table: Floats, ids: str, *sizes: int) -> str:
    """Rows of a table, in the wanted shape."""
    found = graph.op("Gather", floats(graph, f"{name}/table", table), ids, name=name, axis=0)
    return reshape(graph, f"{name}/rows", found, *sizes)


def token_rows(graph: Graph, entry: TableEntry, ids: str, *sizes: int, factor: float = 1.0) -> str:
    """Rows of an embedding, times a factor, in the wanted shape; those of a head where it shares them."""
    if entry.grid is None or not entry.grid.in_halves:
        table = table_values(graph.checkpoint, entry) * np.float32(factor)
        return rows(graph, EMBEDDING, table, ids, *sizes)
    assert entry.shares is not None
    found = [
        graph.op("Gather", half, ids, name=f"{EMBEDDING}/{which}", axis=0)
        for which, half in zip(HALVES, half_rows(graph, entry.shares, EMBEDDING), strict=True)
    ]
    steps_V1 = graph.checkpoint.read(f"{entry.shares}.scales")[:, None] * np.float32(256 * factor)
    steps = floats(graph, f"{EMBEDDING}/steps", steps_V1)
    steps = graph.op("Gather", steps, ids, name=f"{EMBEDDING}/step", axis=0)
    codes = graph.op("Add", *found, name=f"{EMBEDDING}/codes")
    made = graph.op("Mul", codes, steps, name=EMBEDDING)
    return reshape(graph, f"{EMBEDDING}/rows", made, *sizes)


def known_ranges(checkpoint: Checkpoint, contents: Contents, factor: float = 1.0) -> Ranges:
    """Of values that a table bounds, whatever few tokens of it a calibration has met."""
    found: dict[str, tuple[float, float, float]] = {}
    for entry in contents.tables:
        if entry.grid is not None and entry.grid.in_halves:
            table = table_values(checkpoint, entry)
            low, high = (float(each) * factor for each in (table.min(), table.max()))
            found[f"{EMBEDDING}/out0"] = (low, high, low)
    return found


def heads(graph: Graph, name: str, x: str, count: int, size: int, tokens: int) -> str:
    """Rows [tokens, count x size] as [1, count, tokens, size]."""
    apart = reshape(graph, f"{name}/apart", x, 1, tokens, count, size)
    return graph.op("Transpose", apart, name=f"{name}/heads", perm=[0, 2, 1, 3])


def bend(graph: Graph, name: str, kind: Activation, x: str) -> str:
    """The non-linearity of an FFN."""
    if kind is Activation.SILU:
        open_part = graph.op("Sigmoid", x, name=f"{name}/sigmoid")
        return graph.op("Mul", x, open_part, name=f"{name}/silu")
    op_type, attributes = ACTIVATIONS[kind]
    return graph.op(op_type, x, name=f"{name}/activation", **attributes)
