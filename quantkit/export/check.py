"""Written ONNX files read back: their facts, and the checks against plan and target.

A file must compute what was planned: a projection counts as quantized when a node with an integer operator
computes it, reading integer weights of its size. Tools that report what they *meant* to quantize leave the
largest matrix of a model in float unnoticed.

A file must also keep what its target promises: operators, opset, element types, fixed sizes. A runtime
refuses a file that it cannot run with an error of its own, or silently runs part of it elsewhere. Checked
here, before anything runs, each node outside of the promise is named with its layer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, defs

from quantkit.errors import InputError
from quantkit.export.graph import METADATA_KEY
from quantkit.files import reading, require_regular
from quantkit.plan.plan import LayerPlan, Plan
from quantkit.plan.targets import Target
from quantkit.runtime.graph import checked_metadata

# Integer operator -> which input holds its integer weights.
INTEGER_OPERATORS: dict[str, int] = {"MatMulNBits": 1, "DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1}
INTEGER_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
STANDARD = ("", "ai.onnx")
MOST_NAMED = 3  # of the faults; the rest are counted
WIDENED = (".scales", ".outlier_weight_IO")  # float16 weights that become float32 before any use


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """An input or an output."""

    name: str
    element_type: str  # as ONNX names it
    shape: tuple[int | str, ...]  # a name stands for a free size


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Facts of a file, read without its weights."""

    model: str
    kind: str  # "decoder", "encoder", "encoder_decoder", "traced", or empty where quantkit did not write it
    scheme: str
    max_positions: int | None
    opset: int
    ir_version: int
    inputs: tuple[Value, ...]  # without the inputs that have a default
    outputs: tuple[Value, ...]
    data_files: tuple[str, ...]  # weights and compiled contexts beside the file

    @property
    def has_cache(self) -> bool:
        """Whether it goes on from keys and values of earlier tokens."""
        return any(value.name.startswith("past_key_values") for value in self.inputs)


def read_written(path: Path) -> Written:
    """Facts of a graph, without the weights beside it."""
    with reading(path, "no ONNX file", next_step="quantize the model again"):
        require_regular(path)
        model = onnx.load(str(path), load_external_data=False)
    facts = _described(model)
    defaults = {tensor.name for tensor in model.graph.initializer}
    return Written(
        model=facts.get("model", ""),
        kind=facts.get("kind", ""),
        scheme=facts.get("scheme", ""),
        max_positions=facts.get("max_positions"),
        opset=_opset(model),
        ir_version=model.ir_version,
        inputs=tuple(_value(info) for info in model.graph.input if info.name not in defaults),
        outputs=tuple(_value(info) for info in model.graph.output),
        data_files=_data_files(model),
    )


def _described(model: onnx.ModelProto) -> dict[str, Any]:
    """The metadata that quantkit wrote into a file."""
    properties = {entry.key: entry.value for entry in model.metadata_props}
    return checked_metadata(properties.get(METADATA_KEY, "{}"))


def _opset(model: onnx.ModelProto) -> int:
    """Version of the standard operators."""
    return max((entry.version for entry in model.opset_import if entry.domain in STANDARD), default=0)


def _value(info: onnx.ValueInfoProto) -> Value:
    tensor = info.type.tensor_type
    return Value(
        name=info.name,
        element_type=_type_name(tensor.elem_type),
        shape=tuple(
            size.dim_value if size.HasField("dim_value") else size.dim_param for size in tensor.shape.dim
        ),
    )


def _data_files(model: onnx.ModelProto) -> tuple[str, ...]:
    files = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for node in model.graph.node:
        facts = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "EPContext" and "embed_mode" in facts and facts["embed_mode"].i == 0:
            files.add(facts["ep_cache_context"].s.decode())
    return tuple(sorted(files))


def held_bytes(folder: Path, graphs: Sequence[Path]) -> int:
    """Bytes of graphs and of the files they read; a kept checkpoint counts only where a graph reads it."""
    beside = {folder / name for path in graphs for name in read_written(path).data_files}
    return sum(path.stat().st_size for path in (*graphs, *beside))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Nodes of a file, and the projections that integer operators compute."""

    num_nodes: int
    num_integer_nodes: int
    integer_operators: dict[str, int]
    projections: tuple[str, ...]
    opset: int
    ir_version: int


def check_models(
    paths: Sequence[Path], plan: Plan, target: Target | None = None, *, in_each: bool = False
) -> Placement:
    """Check that the files compute every planned projection in integers and keep the target's promises.

    With `in_each` every file must compute all of the plan. Otherwise each projection is one that some file
    computes in integers and none in float.
    """
    sizes = {layer.name: layer.in_features * layer.out_features for layer in plan.layers}
    done_by: list[set[str]] = []
    in_float: set[str] = set()
    operators: Counter[str] = Counter()
    num_nodes = 0
    opset = ir_version = 0
    for path in paths:
        model = onnx.load(str(path), load_external_data=False)
        if target is not None:
            require_promises(path, model, target)
        num_nodes += len(model.graph.node)
        opset = max(opset, _opset(model))
        ir_version = max(ir_version, model.ir_version)
        done_by.append(set())
        rounds_values = target is None or target.rounds_values
        for node, names in _integer_nodes(model, sizes, rounds_values=rounds_values):
            done_by[-1].update(names)
            operators[node.op_type] += 1
        in_float |= _float_projections(model, plan) - done_by[-1]
    done = set.intersection(*done_by) if in_each else set[str]().union(*done_by) - in_float
    missing = [layer.name for layer in plan.layers if layer.quantized and layer.name not in done]
    if missing:
        raise InputError(
            f"{len(missing)} planned projections are not integer in the file: {', '.join(missing[:4])}",
            where=", ".join(str(path) for path in paths),
            next_step="exclude them with --exclude, and report this architecture",
        )
    return Placement(
        num_nodes=num_nodes,
        num_integer_nodes=operators.total(),
        integer_operators=dict(operators),
        projections=tuple(sorted(done)),
        opset=opset,
        ir_version=ir_version,
    )


def _integer_nodes(
    model: onnx.ModelProto, sizes: Mapping[str, int], *, rounds_values: bool = True
) -> Iterator[tuple[onnx.NodeProto, Sequence[str]]]:
    """Nodes with integer weights of the right size, and the projections that each computes."""
    shapes = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer}
    described = _described(model)
    owners: dict[str, list[str]] = described["integer_nodes"]
    # A block-diagonal weight has a node for each of its square blocks, and counts with the last of them.
    num_blocks: dict[str, int] = described.get("num_blocks", {})
    blocks_done: Counter[str] = Counter()
    # Standard operators write an integer product as a product behind two DequantizeLinear.
    codes = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for node in model.graph.node:
        if node.name not in owners:
            continue
        weight = ""
        if node.op_type in INTEGER_OPERATORS:
            weight = node.input[INTEGER_OPERATORS[node.op_type]]
        elif node.op_type in ("MatMul", "Gemm"):
            read = node.input if rounds_values else node.input[1:2]
            weight = codes[node.input[1]] if set(read) <= set(codes) else ""
        element_type, shape = shapes.get(weight, (0, ()))
        pack = node.name.split("#")[0]
        num_parts = num_blocks.get(pack, 1)
        bits = next((attribute.i for attribute in node.attribute if attribute.name == "bits"), 8)
        num_bytes = sum(sizes[name] for name in owners[node.name]) * bits // 8 // num_parts**2
        if element_type in INTEGER_TYPES and math.prod(shape) >= num_bytes:
            blocks_done[pack] += 1
            yield node, owners[node.name] if blocks_done[pack] >= num_parts else []


def _float_projections(model: onnx.ModelProto, plan: Plan) -> set[str]:
    """Quantized projections of the plan that a traced file computes in float.

    A tracer names a product by its module's path below the traced part: `/layers.0/fc1/MatMul`. The end of a
    path may be in encoder and decoder: the product counts as each of them, unless the plan leaves one float.
    """
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer if tensor.dims}
    for node in model.graph.node:
        if node.op_type in ("Identity", "Transpose") and node.input[0] in sizes:
            sizes[node.output[0]] = sizes[node.input[0]]
    matrices: defaultdict[str, list[LayerPlan]] = defaultdict(list)
    for layer in plan.layers:
        matrices[layer.matrix].append(layer)
    found: set[str] = set()
    for node in model.graph.node:
        path = node.name.rpartition("/")[0].replace("/", ".")
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in sizes or not path:
            continue
        layers = [
            layer
            for matrix, parts in matrices.items()
            if f".{matrix}".endswith(path)
            and sum(part.in_features * part.out_features for part in parts) == sizes[node.input[1]]
            for layer in parts
        ]
        if all(layer.quantized for layer in layers):
            found |= {layer.name for layer in layers}
    return found


def require_promises(path: Path, model: onnx.ModelProto, target: Target) -> None:
    """Raise for a file that breaks a promise of its target, naming node and layer."""
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
    opset = _opset(model)
    if opset > target.opset:
        yield f"opset {opset} is newer than {target.opset}"
    if model.ir_version > target.ir_version:
        yield f"IR version {model.ir_version} is newer than {target.ir_version}"
    yield from _values(model.graph, target)
    own = {(function.domain, function.name) for function in model.functions}
    for function in model.functions:
        yield from _nodes(function.node, target, own)
    yield from _nodes(model.graph.node, target, own)


def _values(graph: onnx.GraphProto, target: Target) -> Iterator[str]:
    """Faults in the types of inputs, outputs and weights, and in sizes that must be fixed."""
    defaults = {tensor.name for tensor in graph.initializer}
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            tensor = value.type.tensor_type
            if tensor.elem_type and _type_name(tensor.elem_type) not in target.element_types:
                yield f"{kind} '{value.name}' is {_type_name(tensor.elem_type)}"
            free = [size.dim_param or "?" for size in tensor.shape.dim if not size.HasField("dim_value")]
            if target.is_static and value.name not in defaults and (free or not tensor.HasField("shape")):
                yield f"{kind} '{value.name}' has the free size {', '.join(free) or '?'}"
    for tensor in graph.initializer:
        is_widened = tensor.data_type == TensorProto.FLOAT16 and any(part in tensor.name for part in WIDENED)
        if _type_name(tensor.data_type) not in target.element_types and not is_widened:
            yield f"weight '{tensor.name}' is {_type_name(tensor.data_type)}"


def _nodes(nodes: Sequence[onnx.NodeProto], target: Target, own: set[tuple[str, str]]) -> Iterator[str]:
    makers = {name: node for node in nodes for name in node.output if name}
    for node in nodes:
        place = f"(node '{node.name or node.output[0]}', layer '{layer_of(node, makers)}')"
        if (node.domain, node.op_type) not in own and not is_promised(node, target):
            yield f"{f'{node.domain}::' if node.domain else ''}{node.op_type} {place}"
        for attribute in node.attribute:
            element_type = attribute.t.data_type if attribute.HasField("t") else 0
            if node.op_type == "Cast" and attribute.name == "to":
                element_type = attribute.i
            if element_type and _type_name(element_type) not in target.element_types:
                yield f"{node.op_type} makes {_type_name(element_type)} {place}"
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node, target, own)


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
    """The layer that a node belongs to, by its own name or by the nearest named node that it reads."""
    queue, queued = [node], {id(node)}
    while queue:
        current = queue.pop(0)
        if current.name and not current.name.startswith(f"{current.op_type}_"):  # not merely counted
            return _module_in(current.name)
        for label in current.input:
            if "." in (layer := _module_in(label)):
                return layer
        for name in current.input:
            maker = makers.get(name)
            if maker is not None and id(maker) not in queued:
                queued.add(id(maker))
                queue.append(maker)
    return "none"


def _module_in(label: str) -> str:
    """The module in a node's name: h.0.mlp for "h.0.mlp/activation" and for "/h.0/mlp/MatMul"."""
    if label.startswith("/"):  # a tracer's scope, the operator last
        return ".".join(label.strip("/").split("/")[:-1])
    return label.partition("/")[0].partition("#")[0]


def _type_name(element_type: int) -> str:
    return str(TensorProto.DataType.Name(element_type))
