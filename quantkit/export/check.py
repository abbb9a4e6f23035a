"""What was planned must be what was done: the written file is read again and held against plan and target.

A projection counts as done when a node with an integer operator computes it, reading integer weights of its
size. Tools that report what they *meant* to quantize leave the largest matrix of a model in float unnoticed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from quantkit.errors import InputError
from quantkit.export.graph import METADATA_KEY
from quantkit.export.promises import require_promises
from quantkit.plan.plan import Plan
from quantkit.plan.targets import Target

# Integer operator -> which input holds its integer weights.
INTEGER_OPERATORS: dict[str, int] = {"MatMulNBits": 1, "DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1}
INTEGER_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What a file computes with integers."""

    num_nodes: int
    num_integer_nodes: int
    integer_operators: dict[str, int]
    projections: tuple[str, ...]
    opset: int
    ir_version: int


def check_models(
    paths: Sequence[Path], plan: Plan, target: Target | None = None, *, in_each: bool = False
) -> Placement:
    """Read the files back, without external weights: a planned projection in none of them is an error.

    So is whatever the target does not promise. With `in_each` every file must compute all of the plan.
    """
    sizes = {layer.name: layer.in_features * layer.out_features for layer in plan.layers}
    done_by: list[set[str]] = []
    operators: dict[str, int] = {}
    num_nodes = 0
    opset = ir_version = 0
    for path in paths:
        model = onnx.load(str(path), load_external_data=False)
        if target is not None:
            require_promises(path, model, target)
        num_nodes += len(model.graph.node)
        opset = max(opset, *(entry.version for entry in model.opset_import if not entry.domain))
        ir_version = max(ir_version, model.ir_version)
        done_by.append(set())
        rounds_values = target is None or target.rounds_values
        for node, names in _integer_nodes(model, sizes, rounds_values=rounds_values):
            done_by[-1].update(names)
            operators[node.op_type] = operators.get(node.op_type, 0) + 1
    done = set.intersection(*done_by) if in_each else set[str]().union(*done_by)
    missing = [layer.name for layer in plan.layers if layer.quantized and layer.name not in done]
    if missing:
        raise InputError(
            f"{len(missing)} planned projections are not integer in the file: {', '.join(missing[:4])}",
            where=", ".join(str(path) for path in paths),
            next_step="exclude them with --exclude, and report this architecture",
        )
    return Placement(
        num_nodes=num_nodes,
        num_integer_nodes=sum(operators.values()),
        integer_operators=operators,
        projections=tuple(sorted(done)),
        opset=opset,
        ir_version=ir_version,
    )


def _integer_nodes(
    model: onnx.ModelProto, sizes: Mapping[str, int], *, rounds_values: bool = True
) -> Iterator[tuple[onnx.NodeProto, Sequence[str]]]:
    """Nodes with integer weights of the right size, and the projections that each computes."""
    shapes = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer}
    properties = {entry.key: entry.value for entry in model.metadata_props}
    described = json.loads(properties[METADATA_KEY])
    owners: dict[str, list[str]] = described["integer_nodes"]
    # A block-diagonal weight is computed by a node for each of its square blocks, and only done by all.
    num_blocks: dict[str, int] = described.get("num_blocks", {})
    num_found: Counter[str] = Counter()
    bits = {node.name: _bits(node) for node in model.graph.node}
    # A product between two DequantizeLinear is how standard operators spell an integer one.
    given = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for node in model.graph.node:
        if node.name not in owners:
            continue
        weight = ""
        if node.op_type in INTEGER_OPERATORS:
            weight = node.input[INTEGER_OPERATORS[node.op_type]]
        elif node.op_type in ("MatMul", "Gemm"):
            read = node.input if rounds_values else node.input[1:2]
            weight = given[node.input[1]] if set(read) <= set(given) else ""
        element_type, shape = shapes.get(weight, (0, ()))
        whole = node.name.split("#")[0]
        parts = num_blocks.get(whole, 1)
        expected = sum(sizes[name] for name in owners[node.name]) * bits[node.name] // 8 // parts**2
        if element_type in INTEGER_TYPES and math.prod(shape) >= expected:
            num_found[whole] += 1
            yield node, owners[node.name] if num_found[whole] >= parts else []


def _bits(node: onnx.NodeProto) -> int:
    """Width of the codes that the node reads."""
    return next((attribute.i for attribute in node.attribute if attribute.name == "bits"), 8)
