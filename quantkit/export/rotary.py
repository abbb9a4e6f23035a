"""Rotary tables of graphs: cosines and sines of every position.

A dynamic graph holds the frequencies alone. onnxruntime folds the nodes that make the tables into constants
when it opens the graph, so no run computes them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quantkit.export.graph import Graph
from quantkit.model.model_map import Attention
from quantkit.model.rope import plain_frequencies

TABLES = "rope_"  # prefix of the names of tables and of the float32 constants that they are made from
Rotation = tuple[float | None, int | None, tuple[float, ...], float]


def rotation_of(attention: Attention) -> Rotation:
    """What a table depends on; attentions with equal rotations share one."""
    return (
        attention.rope_theta,
        attention.rotary_dim,
        attention.rope_frequencies,
        attention.rope_factor,
    )


def frequencies_of(attention: Attention) -> NDArray[np.float32]:
    """Of the pairs of features, [rotary_dim / 2]."""
    assert attention.rope_theta and attention.rotary_dim
    if attention.rope_frequencies:
        return np.array(attention.rope_frequencies, np.float32)
    return plain_frequencies(attention.rope_theta, attention.rotary_dim)


def cosines_and_sines(
    attention: Attention, num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Each [positions, rotary_dim / 2]."""
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * frequencies_of(attention)[None, :]
    factor = attention.rope_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def partners(rotary_dim: int, *, is_interleaved: bool) -> NDArray[np.int64]:
    """The feature that each rotated feature turns together with."""
    features = np.arange(rotary_dim)
    return features ^ 1 if is_interleaved else np.roll(features, rotary_dim // 2)


def add_tables(graph: Graph, label: str, attention: Attention, num_positions: int) -> tuple[str, str]:
    """Names of the tables of cosines and sines, [positions, rotary_dim / 2] in the type of the graph."""

    def scalar(name: str, value: float) -> str:
        return graph.constant(f"{label}/{name}", np.array(value, np.float32))

    ends = [scalar(f"position_{value}", value) for value in (0, num_positions, 1)]
    positions = graph.op("Range", *ends, name=f"{label}/positions")
    column = graph.op("Unsqueeze", positions, graph.integers(1), name=f"{label}/column")
    frequencies = graph.constant(f"{label}/frequencies", frequencies_of(attention))
    angles = graph.op("Mul", column, frequencies, name=f"{label}/angles")
    tables = []
    for op_type, name in (("Cos", f"{label}/cos"), ("Sin", f"{label}/sin")):
        table = graph.op(op_type, angles, name=name)
        if attention.rope_factor != 1:
            factor = scalar("factor", attention.rope_factor)
            table = graph.op("Mul", table, factor, name=f"{name}/scaled")
        tables.append(graph.op("Cast", table, name=f"{name}/table", to=TensorProto.FLOAT))
    return tables[0], tables[1]
