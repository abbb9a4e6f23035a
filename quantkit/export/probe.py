"""Tiny ONNX models, built in memory, whose run time tells what a machine computes and what a node costs.

The three matmuls share one shape, GPT-2's first FFN projection at a prompt of 128 tokens: large enough to be
bound by arithmetic, small enough to run often within a second. Their weights are initializers, because
onnxruntime packs constant weights beforehand, as it does in a real model. Integer activations stay below
128, so that the AVX2 kernels, whose sums of pairs saturate at 16 bits, compute the exact product too.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

NUM_ROWS = 128
IN_FEATURES = 768
OUT_FEATURES = 3072
BLOCK_SIZE = 128
NUM_CHAIN_NODES = 200
OPSET = 21


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeModels:
    """The models as bytes, and what their run times are to be divided by."""

    float_matmul: bytes  # MatMul: float32 [rows, in] x float32 [in, out]
    integer_matmul: bytes  # MatMulInteger: uint8 [rows, in] x int8 [in, out], the bare integer product
    block_matmul: (
        bytes  # MatMulNBits, 8 bits in blocks of 128, accuracy_level 4: quantizes float32 rows itself
    )
    chain: bytes  # alternating Add and Relu on 16 floats
    num_operations: int  # of one matmul, a multiply and an add counted as 2
    num_chain_nodes: int


def build_probe_models(seed: int = 0) -> ProbeModels:
    """All probe models; the same seed gives the same bytes."""
    generator = np.random.default_rng(seed)
    weight_IO = generator.standard_normal((IN_FEATURES, OUT_FEATURES), dtype=np.float32)
    integers_IO = generator.integers(-127, 128, (IN_FEATURES, OUT_FEATURES), dtype=np.int8)
    return ProbeModels(
        float_matmul=float_matmul_model(weight_IO),
        integer_matmul=integer_matmul_model(integers_IO),
        block_matmul=block_matmul_model(integers_IO),
        chain=chain_model(NUM_CHAIN_NODES),
        num_operations=2 * NUM_ROWS * IN_FEATURES * OUT_FEATURES,
        num_chain_nodes=NUM_CHAIN_NODES,
    )


def float_matmul_model(weight_IO: npt.NDArray[np.float32]) -> bytes:
    """`y = x @ weight` in FP32."""
    node = helper.make_node("MatMul", ["x", "weight"], ["y"])
    return _model([node], {"weight": weight_IO}, TensorProto.FLOAT, TensorProto.FLOAT, weight_IO.shape)


def integer_matmul_model(weight_IO: npt.NDArray[np.int8]) -> bytes:
    """`y = x @ weight` with uint8 rows, int8 weights and int32 sums."""
    node = helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
    return _model([node], {"weight": weight_IO}, TensorProto.UINT8, TensorProto.INT32, weight_IO.shape)


def block_matmul_model(weight_IO: npt.NDArray[np.int8]) -> bytes:
    """`y = x @ (weight / 127)` by onnxruntime's operator for weights quantized in blocks, in INT8."""
    in_features, out_features = weight_IO.shape
    num_blocks = in_features // BLOCK_SIZE
    # stored [out, blocks, block] as uint8 around the default zero point of 128
    stored = (
        (weight_IO.T.astype(np.int16) + 128).astype(np.uint8).reshape(out_features, num_blocks, BLOCK_SIZE)
    )
    scale = np.full((out_features, num_blocks), 1 / 127, dtype=np.float32)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "weight", "scale"],
        ["y"],
        domain="com.microsoft",
        K=in_features,
        N=out_features,
        bits=8,
        block_size=BLOCK_SIZE,
        accuracy_level=4,  # 4: activations are quantized to INT8 block by block
    )
    initializers = {"weight": stored, "scale": scale}
    return _model([node], initializers, TensorProto.FLOAT, TensorProto.FLOAT, weight_IO.shape)


def chain_model(num_nodes: int, num_values: int = 16) -> bytes:
    """`num_nodes` operators too small to cost anything but their start; Add and Relu in turn do not fuse."""
    names = ["x", *(f"value_{index}" for index in range(1, num_nodes)), "y"]
    nodes = [
        helper.make_node("Add", [source, "one"], [target])
        if index % 2 == 0
        else helper.make_node("Relu", [source], [target])
        for index, (source, target) in enumerate(itertools.pairwise(names))
    ]
    one = np.ones(num_values, dtype=np.float32)
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [num_values])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [num_values])],
        [numpy_helper.from_array(one, "one")],
    )
    return _serialized(graph)


def _model(
    nodes: list[onnx.NodeProto],
    initializers: dict[str, npt.NDArray[np.generic]],
    input_type: int,
    output_type: int,
    shape_IO: tuple[int, ...],
) -> bytes:
    in_features, out_features = shape_IO
    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info("x", input_type, [NUM_ROWS, in_features])],
        [helper.make_tensor_value_info("y", output_type, [NUM_ROWS, out_features])],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    return _serialized(graph)


def _serialized(graph: onnx.GraphProto) -> bytes:
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    # IR version 10 is the one that opset 21 came with, so every supported onnxruntime reads it.
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
