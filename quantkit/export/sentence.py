"""Pooling, projections and normalization behind an encoder, as nodes of its graph.

Every pooling but the largest value is a weighted sum of the tokens: its row of `POOLINGS` gives the weights.
Padding has the weight 0, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from quantkit.export.graph import Graph
from quantkit.model.sentence import VECTOR, Dense, SentenceModel

LOWEST = -6e4  # below every state, and a float16
SHORTEST = 1e-12  # a vector of zeros stays zeros
ACTIVATION_OPS = {"Identity": "", "Tanh": "Tanh", "ReLU": "Relu", "GELU": "Gelu", "Sigmoid": "Sigmoid"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A batch of texts: names of values, [batch, sequence] in float where nothing else is said."""

    graph: Graph
    states: str  # [batch, sequence, width]
    mask: str  # int64
    real: str  # 1 for a token, 0 for padding
    places: str  # the number of a token in its text, from 1; 0 for padding
    count: str  # tokens of a text, at least 1, [batch, 1]

    def number(self, value: float) -> str:
        return self.graph.constant(f"number_{value:g}", np.array(value, np.float32))

    def weighted(self, weights: str) -> str:
        """The sum of the states with these weights, [batch, width]."""
        graph = self.graph
        rows = graph.op("MatMul", graph.op("Unsqueeze", weights, graph.integers(1)), self.states)
        return graph.op("Squeeze", rows, graph.integers(1))

    def at(self, place: str) -> str:
        """The state of one token, [batch, width]."""
        is_there = self.graph.op("Equal", self.places, place)
        return self.weighted(self.graph.op("Cast", is_there, to=TensorProto.FLOAT))


def _mean(tokens: Tokens) -> str:
    return tokens.weighted(tokens.graph.op("Div", tokens.real, tokens.count))


def _sum_over_root(tokens: Tokens) -> str:
    root = tokens.graph.op("Sqrt", tokens.count)
    return tokens.weighted(tokens.graph.op("Div", tokens.real, root))


def _mean_by_place(tokens: Tokens) -> str:
    """Weights 1, 2, 3 ... over their sum, n (n + 1) / 2; divided twice, so that float16 can hold them."""
    graph = tokens.graph
    shares = graph.op("Div", tokens.places, tokens.count)
    half = graph.op("Mul", graph.op("Add", tokens.count, tokens.number(1)), tokens.number(0.5))
    return tokens.weighted(graph.op("Div", shares, half))


def _largest(tokens: Tokens) -> str:
    graph = tokens.graph
    is_real = graph.op("Unsqueeze", graph.op("Cast", tokens.mask, to=TensorProto.BOOL), graph.integers(-1))
    states = graph.op("Where", is_real, tokens.states, tokens.number(LOWEST))
    return graph.op("ReduceMax", states, graph.integers(1), keepdims=0)


POOLINGS: dict[str, Callable[[Tokens], str]] = {
    "cls": lambda tokens: tokens.at(tokens.number(1)),
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _sum_over_root,
    "weightedmean": _mean_by_place,
    "lasttoken": lambda tokens: tokens.at(tokens.count),
}


def emit_sentence(graph: Graph, sentence: SentenceModel, *, states: str, mask: str, width: int) -> None:
    """Add the output `sentence_embedding`, [batch, width]; the mask is int64."""
    places = graph.op("Mul", graph.op("CumSum", mask, graph.constant("axis_1", np.array(1, np.int64))), mask)
    count = graph.op("ReduceSum", mask, graph.integers(1), keepdims=1)
    count = graph.op("Max", count, graph.constant("i64_1_scalar", np.array(1, np.int64)))
    real, places, count = (graph.op("Cast", value, to=TensorProto.FLOAT) for value in (mask, places, count))
    tokens = Tokens(graph=graph, states=states, mask=mask, real=real, places=places, count=count)
    parts = [POOLINGS[pooling](tokens) for pooling in sentence.poolings]
    x = graph.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]
    width *= len(parts)
    for step in sentence.steps:
        if isinstance(step, Dense):
            x, width = _dense(graph, step, x), step.out_features
        else:
            length = graph.op("ReduceL2", x, graph.integers(-1), keepdims=1)
            x = graph.op("Div", x, graph.op("Max", length, tokens.number(SHORTEST)))
    graph.output(x, VECTOR, TensorProto.FLOAT, ["batch", width])


def _dense(graph: Graph, dense: Dense, x: str) -> str:
    name = f"{dense.name}.linear"
    bias = graph.weight(f"{name}.bias") if dense.has_bias else ""
    x = graph.op("Gemm", x, graph.weight(f"{name}.weight"), bias, name=name, transB=1)
    op_type = ACTIVATION_OPS[dense.activation]
    return graph.op(op_type, x, name=f"{dense.name}/{op_type.lower()}") if op_type else x
