"""Building an ONNX graph: nodes in order, initializers once, weights inside the file or beside it.

The weights of a large model stay in the quantized checkpoint; the graph points to them by offset. Those of
a small one are copied in, so that the model is a single file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Slot

CONTRIB = "com.microsoft"
ELEMENT_TYPES = {
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "I8": TensorProto.INT8,
    "U8": TensorProto.UINT8,
    "U16": TensorProto.UINT16,
    "I64": TensorProto.INT64,
}
METADATA_KEY = "quantkit"
LEAST_OUTSIDE = 1024  # bytes of a weight that stays beside its graph; smaller ones are copied into it
# (opset, IR version) that a graph states unless an operator in it came later: no newer than it must be.
USUAL_OPSET = (21, 10)  # the first in which 16-bit codes are given back as floats
LATER_OPSETS: dict[str, tuple[int, int]] = {"Attention": (23, 11), "RMSNormalization": (23, 11)}
ModelProto = onnx.ModelProto


@dataclass(kw_only=True, slots=True)
class Graph:
    """A graph under construction."""

    checkpoint: Checkpoint
    keeps_weights_outside: bool
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    integer_nodes: dict[str, list[str]] = field(default_factory=dict)  # node -> projections it computes
    num_blocks: dict[str, int] = field(default_factory=dict)  # nodes that share a block-diagonal weight
    counter: int = 0
    labels: Counter[str] = field(default_factory=Counter)

    def op(self, op_type: str, *inputs: str, name: str = "", domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, or of which only the first matters; attributes are of many types."""
        return self.ops(op_type, *inputs, name=name, domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: str,
        name: str = "",
        domain: str = "",
        wanted: Sequence[bool] = (True,),
        **attributes: Any,
    ) -> list[str]:
        """Add a node; an output that is not wanted is left out, as ONNX spells it: an empty name.

        Nodes are named after the weights they read. A block that many depths share names several alike: the
        second one is called `name#2`, and so on.
        """
        self.counter += 1
        label = name or f"{op_type}_{self.counter}"
        self.labels[label] += 1
        if self.labels[label] > 1:
            label = f"{label}#{self.labels[label]}"
        outputs = [f"{label}/out{i}" if want else "" for i, want in enumerate(wanted)]
        kept = list(inputs)
        while kept and not kept[-1]:
            kept.pop()
        self.nodes.append(helper.make_node(op_type, kept, outputs, name=label, domain=domain, **attributes))
        return outputs

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """A small constant, once for each name."""
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.asarray(values), name)
        return name

    def integers(self, *values: int) -> str:
        """A 1-D int64 constant."""
        return self.constant("i64_" + "_".join(str(v) for v in values), np.array(values, np.int64))

    def weight(self, name: str, rows: tuple[int, int] | None = None, *, label: str = "") -> str:
        """A tensor of the checkpoint, or of `rows` (first, number) those alone, under its name or a label."""
        slot, stored = self.checkpoint.slots[name], name
        name = label or name
        if rows is not None:
            slot, name = _row_slot(slot, *rows), f"{name}[{rows[0]}:{sum(rows)}]"
        if name in self.initializers:
            return name
        tensor = onnx.TensorProto(
            name=name, data_type=ELEMENT_TYPES[slot.spec.dtype], dims=list(slot.spec.shape)
        )
        # A few values are kept inside: onnxruntime folds constants and shapes only from there.
        if self.keeps_weights_outside and slot.length >= LEAST_OUTSIDE:
            tensor.data_location = TensorProto.EXTERNAL
            place = {
                "location": self.checkpoint.path.name,
                "offset": str(slot.offset),
                "length": str(slot.length),
            }
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
        else:
            values = self.checkpoint.read(stored)
            tensor.raw_data = (values if rows is None else values[rows[0] : sum(rows)]).tobytes()
        self.initializers[name] = tensor
        return name

    def scales(self, name: str, rows: tuple[int, int] | None = None) -> str:
        """Scales in float32, as products read them. Those of blocks are widened when a session is made."""
        return self.widened(f"{name}.scales", rows)

    def widened(self, name: str, rows: tuple[int, int] | None = None) -> str:
        """A tensor in float32."""
        stored = self.weight(name, rows)
        if self.initializers[stored].data_type != TensorProto.FLOAT16:
            return stored
        widened = f"{stored}/widened"
        if not self.labels[widened]:
            self.op("Cast", stored, name=widened, to=TensorProto.FLOAT)
        return f"{widened}/out0"

    def input(self, name: str, element_type: int, shape: Sequence[int | str]) -> str:
        """An input of the model."""
        self.inputs.append(helper.make_tensor_value_info(name, element_type, shape))
        return name

    def maker(self, value: str) -> onnx.NodeProto | None:
        """The node that a value comes out of; None for an input or a weight."""
        return next((node for node in reversed(self.nodes) if value in node.output), None)

    def output(self, value: str, name: str, element_type: int, shape: Sequence[int | str]) -> None:
        """An output of the model: the value under a public name, without a copy."""
        maker = self.maker(value)
        if maker is not None:
            maker.output[list(maker.output).index(value)] = name
        for node in self.nodes:
            for position, read in enumerate(node.input):
                if read == value:
                    node.input[position] = name
        self.outputs.append(helper.make_tensor_value_info(name, element_type, shape))

    def projections(self) -> dict[str, list[str]]:
        """The projections that each integer node computes, repeated nodes included."""
        return {
            label: list(dict.fromkeys(layers))
            for name, layers in self.integer_nodes.items()
            for label in (name, *(f"{name}#{number}" for number in range(2, self.labels[name] + 1)))
        }

    def finish(self, *, name: str, target: Target, metadata: Mapping[str, Any]) -> onnx.ModelProto:
        """The model."""
        standard = (node.op_type for node in self.nodes if not node.domain)
        opset, ir_version = max(
            (LATER_OPSETS.get(each, USUAL_OPSET) for each in standard), default=USUAL_OPSET
        )
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, list(self.initializers.values())
        )
        model = helper.make_model(
            graph,
            producer_name="quantkit",
            ir_version=ir_version,
            opset_imports=[
                helper.make_opsetid("", opset),
                *(helper.make_opsetid(domain, 1) for domain in target.domains),
            ],
        )
        described = {**metadata, "integer_nodes": self.projections()}
        if self.num_blocks:
            described["num_blocks"] = self.num_blocks
        helper.set_model_props(model, {METADATA_KEY: json.dumps(described, sort_keys=True)})
        return model


def _row_slot(slot: Slot, first: int, number: int) -> Slot:
    """Where some rows of a tensor lie."""
    row = slot.length // slot.spec.shape[0]
    spec = replace(slot.spec, shape=(number, *slot.spec.shape[1:]))
    return Slot(spec=spec, offset=slot.offset + first * row, length=number * row)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write the graph; weights beside it are there already."""
    path.write_bytes(model.SerializeToString(deterministic=True))


def described_bytes(model: onnx.ModelProto) -> int:
    """Bytes of a graph without its weights: nodes, names, shapes and metadata."""
    return int(model.ByteSize()) - sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def counted_bytes(models: Collection[onnx.ModelProto]) -> int:
    """Bytes of graphs that share their weights in one file."""
    weights: dict[str, int] = {}
    for tensor in (tensor for model in models for tensor in model.graph.initializer):
        place = {entry.key: entry.value for entry in tensor.external_data}
        key = f"at {place['offset']}" if place else tensor.name
        weights[key] = int(place["length"]) if place else len(tensor.raw_data)
    return sum(map(described_bytes, models)) + sum(weights.values())


def load(path: Path) -> onnx.ModelProto:
    """Read a graph with all of its weights."""
    return onnx.load(str(path))
