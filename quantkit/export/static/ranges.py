"""A graph that shows what its values reach: what calibration of static graphs runs."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

# What calibration sees of a value, or of the largest of each of its rows. A sum is no number where anything
# in it is none; the others overlook that.
REDUCTIONS = {
    "low": ("ReduceMin", ""),
    "high": ("ReduceMax", "/peaks"),
    "peak": ("ReduceMin", "/peaks"),
    "sum": ("ReduceSum", ""),
}


def showing_ranges(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """(the graph with what every computed value reaches as outputs, their names): what calibration runs.

    It gives four numbers a value, and not the value: all of those together are many times the weights.
    """
    opened, names = showing_values(model)
    axis = numpy_helper.from_array(np.array([-1]), "ranges/last_axis")
    opened.graph.initializer.append(axis)
    for name in names:
        peaks = f"{name}/peaks"
        opened.graph.node.append(helper.make_node("ReduceMax", [name, axis.name], [peaks], peaks, keepdims=0))
        for kind, (operator, source) in REDUCTIONS.items():
            made = f"{name}/{kind}"
            opened.graph.node.append(helper.make_node(operator, [name + source], [made], made, keepdims=0))
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
