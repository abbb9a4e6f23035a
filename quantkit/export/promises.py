"""A written file held against what its target promises: operators, opset, element types, fixed sizes.

A runtime refuses a file it cannot run with words of its own, or worse, runs part of it elsewhere without any.
Read back here, before anything runs, each node that is outside of the promise is named with the layer it
belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, defs

from quantkit.errors import InputError
from quantkit.plan.targets import Target

STANDARD = ("", "ai.onnx")
MOST_NAMED = 3  # of the faults; the rest are counted


def require_promises(path: Path, model: onnx.ModelProto, target: Target) -> None:
    """Refuse a file that breaks a promise, naming the node and its layer."""
    faults = list(broken_promises(model, target))
    if faults:
        more = f", and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        raise InputError(
            f"the file breaks what its target promises: {'; '.join(faults[:MOST_NAMED])}{more}",
            where=str(path),
            allowed=target.description,
            next_step="choose another --target or --scheme, or --exclude the layer",
        )


def broken_promises(model: onnx.ModelProto, target: Target) -> Iterator[str]:
    """One line for each fault."""
    opset = max((each.version for each in model.opset_import if each.domain in STANDARD), default=0)
    if opset > target.opset:
        yield f"opset {opset} is newer than {target.opset}"
    if model.ir_version > target.ir_version:
        yield f"IR version {model.ir_version} is newer than {target.ir_version}"
    yield from _values(model.graph, target)
    own = {(function.domain, function.name) for function in model.functions}
    for function in model.functions:
        yield from _nodes(list(function.node), target, own)
    yield from _nodes(list(model.graph.node), target, own)


def _values(graph: onnx.GraphProto, target: Target) -> Iterator[str]:
    """Inputs, outputs and weights: their types, and their sizes where these must be fixed."""
    given = {tensor.name for tensor in graph.initializer}
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            tensor = value.type.tensor_type
            if tensor.elem_type and _type_name(tensor.elem_type) not in target.element_types:
                yield f"{kind} '{value.name}' is {_type_name(tensor.elem_type)}"
            free = [size.dim_param or "?" for size in tensor.shape.dim if not size.HasField("dim_value")]
            if target.is_static and value.name not in given and (free or not tensor.HasField("shape")):
                yield f"{kind} '{value.name}' has the free size {', '.join(free) or '?'}"
    for tensor in graph.initializer:
        if _type_name(tensor.data_type) not in target.element_types:
            yield f"weight '{tensor.name}' is {_type_name(tensor.data_type)}"


def _nodes(nodes: list[onnx.NodeProto], target: Target, own: set[tuple[str, str]]) -> Iterator[str]:
    makers = {name: node for node in nodes for name in node.output if name}
    for node in nodes:
        place = f"(node '{node.name or node.output[0]}', layer '{layer_of(node, makers)}')"
        if (node.domain, node.op_type) not in own and not is_promised(node, target):
            yield f"{f'{node.domain}::' if node.domain else ''}{node.op_type} {place}"
        for attribute in node.attribute:
            made = attribute.t.data_type if attribute.HasField("t") else 0
            if node.op_type == "Cast" and attribute.name == "to":
                made = attribute.i
            if made and _type_name(made) not in target.element_types:
                yield f"{node.op_type} makes {_type_name(made)} {place}"
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _nodes(list(graph.node), target, own)


def is_promised(node: onnx.NodeProto, target: Target) -> bool:
    """Whether the target has the node's operator."""
    domain = "" if node.domain in STANDARD else node.domain
    if f"{domain}::{node.op_type}" in target.fused_operators:
        return domain in ("", *target.domains)
    if domain:
        return False
    if target.standard_operators is not None:
        return node.op_type in target.standard_operators
    try:
        return not defs.get_schema(node.op_type, target.opset, domain).deprecated
    except defs.SchemaError:
        return False


def layer_of(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> str:
    """The layer that a node belongs to: by its own name, or by the nearest of what it reads that has one."""
    waiting, seen = [node], {id(node)}
    while waiting:
        current = waiting.pop(0)
        if current.name and not current.name.startswith(f"{current.op_type}_"):  # a name of its own
            return _module_in(current.name)
        for label in current.input:
            if "." in (layer := _module_in(label)):
                return layer
        for name in current.input:
            maker = makers.get(name)
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                waiting.append(maker)
    return "none"


def _module_in(label: str) -> str:
    """The module that a name spells: "h.0.mlp/activation" is in h.0.mlp, and "/h.0/mlp/MatMul" too."""
    if label.startswith("/"):  # a tracer's scope, the operator last
        return ".".join(label.strip("/").split("/")[:-1])
    return label.partition("/")[0].partition("#")[0]


def _type_name(element_type: int) -> str:
    return str(TensorProto.DataType.Name(element_type))
