"""Graphs with the ranges of their values as outputs, for the calibration of static graphs."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Statistics of a value, or of its rows' peaks. A sum with a NaN is NaN; the other reductions overlook it.
REDUCTIONS = {
    "low": ("ReduceMin", ""),
    "high": ("ReduceMax", "/peaks"),
    "peak": ("ReduceMin", "/peaks"),
    "sum": ("ReduceSum", ""),
}


def showing_ranges(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """(the graph with `REDUCTIONS` of every computed value as outputs, names of the values).

    The outputs are four numbers a value and not the value: all values together are many times the weights.
    """
    opened, names = showing_values(model)
    axis = numpy_helper.from_array(np.array([-1]), "ranges/last_axis")
    opened.graph.initializer.append(axis)
    for name in names:
        peaks = f"{name}/peaks"
        opened.graph.node.append(helper.make_node("ReduceMax", [name, axis.name], [peaks], peaks, keepdims=0))
        for kind, (operator, source) in REDUCTIONS.items():
            output = f"{name}/{kind}"
            opened.graph.node.append(
                helper.make_node(operator, [name + source], [output], output, keepdims=0)
            )
    del opened.graph.output[:]
    opened.graph.output.extend(
        helper.make_empty_tensor_value_info(f"{name}/{kind}") for name in names for kind in REDUCTIONS
    )
    return opened, names


def showing_values(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """(the graph with every computed value as an output, their names)."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    constants = {tensor.name for tensor in opened.graph.initializer}
    names = tuple(
        name for node in opened.graph.node if node.input[0] not in constants or node.op_type == "Gather"
        for name in node.output if name
    )  # fmt: skip
    del opened.graph.output[:]
    opened.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return opened, names
