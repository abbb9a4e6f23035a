"""The parts that static graphs are put together from, in standard operators alone.

Each is a form that NPU compilers take for one operation of theirs: a product of two dimensions with its bias,
heads side by side in four, an activation with an operator of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.export.graph import Graph
from quantkit.export.static_weights import Floats, weight_IO
from quantkit.records import Activation
from quantkit.tensor_records import Contents, Pack

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
    weight = weight_IO(graph, pack, contents)
    if pack.has_bias:
        return graph.op("Gemm", x, weight, graph.weight(f"{name}.bias"), name=name)
    return graph.op("MatMul", x, weight, name=name)


def reshape(graph: Graph, name: str, x: str, *sizes: int) -> str:
    """The same values in another shape."""
    return graph.op("Reshape", x, graph.integers(*sizes), name=name)


def floats(graph: Graph, name: str, values: Any) -> str:  # noqa: ANN401 - whatever numpy takes
    """A constant of floats, which gets a grid like any other value."""
    return graph.constant(name, np.asarray(values, np.float32))


def rows(graph: Graph, name: str, table: Floats, ids: str, *sizes: int) -> str:
    """Rows of a table, in the wanted shape."""
    found = graph.op("Gather", floats(graph, f"{name}/table", table), ids, name=name, axis=0)
    return reshape(graph, f"{name}/rows", found, *sizes)


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
