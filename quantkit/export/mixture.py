"""A mixture of experts of which only the chosen run: rows sorted by expert, one FFN for the rows of each.

The products are those of every other layer, so that experts have every scheme, and an idle expert costs a few
microseconds. onnxruntime's QMoE is one node for all experts, but in blocks alone (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from quantkit.export.graph import Graph
from quantkit.model.model_map import Mixture

# Letters: T tokens, K experts of each, E experts, H features; R = T * K rows, ordered by expert.


def add_mixture(
    graph: Graph,
    mixture: Mixture,
    x: str,
    *,
    name: str,
    router: Callable[[str], str],
    expert: Callable[[int, str], str],
) -> str:
    """The weighted sum of the chosen experts' outputs for the rows x [T, H]."""
    weights_TK, chosen_TK = _route(graph, mixture, router(x), name)
    chosen_R = graph.op("Reshape", chosen_TK, graph.integers(-1))
    num_rows = graph.op("Shape", chosen_R)
    order_R = _ascending(graph, chosen_R, num_rows)
    active = graph.constant(f"i64_scalar_{mixture.num_active}", np.array(mixture.num_active, np.int64))
    x_RH = graph.op("Gather", x, graph.op("Div", order_R, active), name=f"{name}/rows")
    numbers_E1 = graph.constant(f"experts_{mixture.num_experts}", np.arange(mixture.num_experts)[:, None])
    is_chosen_ER = graph.op("Cast", graph.op("Equal", chosen_R, numbers_E1), to=TensorProto.INT64)
    count_E = graph.op("ReduceSum", is_chosen_ER, graph.integers(1), keepdims=0)
    parts = graph.ops("Split", x_RH, count_E, name=f"{name}/split", wanted=(True,) * mixture.num_experts)
    outputs = [expert(number, part) for number, part in enumerate(parts)]
    y_RH = graph.op("Concat", *outputs, name=f"{name}/concat", axis=0)
    # Back in the order of the tokens.
    y_RH = graph.op("Gather", y_RH, _ascending(graph, order_R, num_rows), name=f"{name}/tokens")
    weights_R1 = graph.op("Reshape", weights_TK, graph.integers(-1, 1))
    shape = graph.op("Concat", graph.op("Shape", weights_TK), graph.integers(-1), axis=0)
    y_TKH = graph.op("Reshape", graph.op("Mul", y_RH, weights_R1), shape)
    return graph.op("ReduceSum", y_TKH, graph.integers(1), name=f"{name}/sum", keepdims=0)


def _route(graph: Graph, mixture: Mixture, scores_TE: str, name: str) -> tuple[str, str]:
    """(weights, numbers) of each token's experts, both [T, K]."""
    probabilities_TE = graph.op("Softmax", scores_TE, name=f"{name}/softmax", axis=-1)
    weights_TK, chosen_TK = graph.ops(
        "TopK", probabilities_TE, graph.integers(mixture.num_active), name=f"{name}/top", wanted=(True, True)
    )
    if mixture.normalises:
        total_T1 = graph.op("ReduceSum", weights_TK, graph.integers(-1), keepdims=1)
        weights_TK = graph.op("Div", weights_TK, total_T1)
    return weights_TK, chosen_TK


def _ascending(graph: Graph, values_R: str, count: str) -> str:
    """The places of the values in ascending order."""
    return graph.ops("TopK", values_R, count, wanted=(True, True), axis=0, largest=0)[1]
