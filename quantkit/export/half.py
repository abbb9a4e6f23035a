"""A fused graph in half precision: what GPUs compute fastest, with half of the cache's memory.

Every float value becomes float16, weights, scales and the cache included; integer codes stay, and products
take their inputs as they are instead of rounding them to integers. Norms keep their sums in float32, as their
operators do by themselves. Rotary tables are made in float32, as float16 counts up to 2048 only.
All outputs but the cache stay float32, so that callers need no change.
Float weights of a file beside the graph are read, and lie in the graph as halves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from quantkit.errors import InputError
from quantkit.export.rotary import TABLES

AS_THEY_ARE = 0  # the accuracy level at which products round no input
CACHE = "present."  # outputs that are read again as they are
LARGEST_HALF = np.float32(np.finfo(np.float16).max)


def to_half(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The graph with float16 for float32; `folder` holds the weights that it keeps outside."""
    halved = onnx.ModelProto()
    halved.CopyFrom(model)
    graph = halved.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and not tensor.name.startswith(TABLES):
            _halve(tensor, folder)
    for node in graph.node:
        for attribute in node.attribute:
            is_target = node.op_type == "Cast" and attribute.name == "to"
            if is_target and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
            if attribute.name == "accuracy_level":
                attribute.i = AS_THEY_ARE
            if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
                _halve(attribute.t, folder)
    outputs = {value.name for value in graph.output}
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type != TensorProto.FLOAT:
            continue
        if value.name in outputs and not value.name.startswith(CACHE):
            _widen(graph, value.name)
        else:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del graph.value_info[:]  # types that a tracer wrote down
    return halved


def _halve(tensor: onnx.TensorProto, folder: Path) -> None:
    if tensor.data_location == TensorProto.EXTERNAL:
        load_external_data_for_tensor(tensor, str(folder))
    values: NDArray[np.float32] = numpy_helper.to_array(tensor)
    if np.abs(values).max(initial=0) > LARGEST_HALF:
        raise InputError(
            f"it holds {np.abs(values).max():.3g}, which float16 cannot",
            where=tensor.name,
            allowed=f"up to {LARGEST_HALF:.0f}",
            next_step="choose a target that computes in float32",
        )
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), tensor.name))


def _widen(graph: onnx.GraphProto, name: str) -> None:
    """A cast to float32 under the output's name; the float16 value gets another name."""
    halves = f"{name}/half"
    for node in graph.node:
        for places in (node.input, node.output):
            for position, value in enumerate(places):
                if value == name:
                    places[position] = halves
    graph.node.append(
        helper.make_node("Cast", [halves], [name], name=f"{name}/widened", to=TensorProto.FLOAT)
    )
