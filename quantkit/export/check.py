"""What was planned must be what was done: the written file is read again and held against the plan.

A projection counts as done when a node with an integer operator computes it, reading integer weights of its
size. Tools that report what they *meant* to quantize leave the largest matrix of a model in float unnoticed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import onnx

from quantkit.errors import InputError
from quantkit.export.graph import METADATA_KEY
from quantkit.records import Plan

# Integer operator -> which input holds its integer weights.
INTEGER_OPERATORS: dict[str, int] = {"MatMulNBits": 1, "DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1}
INTEGER_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
FLOAT_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What a file computes with integers."""

    num_nodes: int
    num_integer_nodes: int
    integer_operators: dict[str, int]
    projections: tuple[str, ...]
    opset: int
    ir_version: int


def check_model(path: Path, plan: Plan) -> Placement:
    """Read the graph back, without external weights; a planned projection that is not there is an error."""
    model = onnx.load(str(path), load_external_data=False)
    shapes = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer}
    properties = {entry.key: entry.value for entry in model.metadata_props}
    owners: dict[str, list[str]] = json.loads(properties[METADATA_KEY])["integer_nodes"]
    sizes = {layer.name: layer.in_features * layer.out_features for layer in plan.layers}
    done: set[str] = set()
    operators: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type not in INTEGER_OPERATORS or node.name not in owners:
            continue
        element_type, shape = shapes.get(node.input[INTEGER_OPERATORS[node.op_type]], (0, ()))
        expected = sum(sizes[name] for name in owners[node.name])
        if element_type in INTEGER_TYPES and math.prod(shape) >= expected:
            done.update(owners[node.name])
            operators[node.op_type] = operators.get(node.op_type, 0) + 1
    missing = [layer.name for layer in plan.layers if layer.quantized and layer.name not in done]
    if missing:
        raise InputError(
            f"{len(missing)} planned projections are not integer in the file: {', '.join(missing[:4])}",
            where=str(path),
            next_step="exclude them with --exclude, and report this architecture",
        )
    return Placement(
        num_nodes=len(model.graph.node),
        num_integer_nodes=sum(operators.values()),
        integer_operators=operators,
        projections=tuple(sorted(done)),
        opset=next(entry.version for entry in model.opset_import if not entry.domain),
        ir_version=model.ir_version,
    )
