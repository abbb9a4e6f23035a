"""What a written file says of itself: its kind, what it reads and gives, and the files it needs beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export.graph import METADATA_KEY


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """An input or an output."""

    name: str
    element_type: str  # as ONNX names it
    shape: tuple[int | str, ...]  # a name stands for a free size


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A file as it can be read without its weights."""

    model: str
    kind: str  # "decoder", "encoder", "traced", or empty where quantkit did not write it
    scheme: str
    max_positions: int | None
    opset: int
    ir_version: int
    inputs: tuple[Value, ...]  # those with a default left out
    outputs: tuple[Value, ...]
    data_files: tuple[str, ...]  # of weights, and of a compiled context

    @property
    def has_cache(self) -> bool:
        """Whether it goes on from keys and values of earlier tokens."""
        return any(value.name.startswith("past_key_values") for value in self.inputs)


def read_written(path: Path) -> Written:
    """Read the graph, without the weights beside it."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's own has no typed name
        raise InputError(
            f"no ONNX file ({type(error).__name__})", where=str(path), next_step="quantize the model again"
        ) from error
    facts = json.loads({each.key: each.value for each in model.metadata_props}.get(METADATA_KEY, "{}"))
    defaults = {tensor.name for tensor in model.graph.initializer}
    standard = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    return Written(
        model=facts.get("model", ""),
        kind=facts.get("kind", ""),
        scheme=facts.get("scheme", ""),
        max_positions=facts.get("max_positions"),
        opset=max(standard, default=0),
        ir_version=model.ir_version,
        inputs=tuple(_value(each) for each in model.graph.input if each.name not in defaults),
        outputs=tuple(_value(each) for each in model.graph.output),
        data_files=_data_files(model),
    )


def _value(info: onnx.ValueInfoProto) -> Value:
    tensor = info.type.tensor_type
    return Value(
        name=info.name,
        element_type=str(TensorProto.DataType.Name(tensor.elem_type)),
        shape=tuple(
            size.dim_value if size.HasField("dim_value") else size.dim_param for size in tensor.shape.dim
        ),
    )


def _data_files(model: onnx.ModelProto) -> tuple[str, ...]:
    found = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for node in model.graph.node:
        facts = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "EPContext" and "embed_mode" in facts and facts["embed_mode"].i == 0:
            found.add(facts["ep_cache_context"].s.decode())
    return tuple(sorted(found))


def held_bytes(folder: Path, graphs: Sequence[Path]) -> int:
    """Bytes of graphs and of what they read; a checkpoint that was kept for its own sake is neither."""
    beside = {folder / name for path in graphs for name in read_written(path).data_files}
    return sum(path.stat().st_size for path in (*graphs, *beside))
