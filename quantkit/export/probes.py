"""Tiny ONNX models to time: a machine's throughput, the cost of a node, the cost of one product.

The three matmuls share one shape, GPT-2's first FFN projection at a prompt of 128 tokens: large enough to be
bound by arithmetic, small enough to run often within a second. Their weights are initializers, because
onnxruntime packs constant weights beforehand, as it does in a real model. Integer activations stay below
128, so that the AVX2 kernels, whose sums of pairs saturate at 16 bits, compute the exact product too.

A probe of one product is built by the functions that export it, with random weights in a file beside it. It
holds several copies: a decoded token reads every weight of the model once, so that each product finds its
weights in memory and not in the cache where its last run left them. Running copies in turn does the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from quantkit.export.graph import Graph, save
from quantkit.export.operators import matmul
from quantkit.model.model_map import Layer, Role, Rows
from quantkit.plan.formats import SCHEMES, Format
from quantkit.plan.min_dim import FLOAT, Product
from quantkit.plan.targets import DEFAULT_TARGET, TARGETS
from quantkit.quantization.layout import Checkpoint, Pack, Slot, TensorSpec

NUM_ROWS = 128
IN_FEATURES = 768
OUT_FEATURES = 3072
BLOCK_SIZE = 128
NUM_CHAIN_NODES = 200
OPSET = 21
STRIDE_BYTES = 4 * 10007  # between the beginnings of two random tensors: no multiple of it is a whole pool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeModels:
    """The models as bytes, and their numbers of operations and nodes."""

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


def format_name(form: Format, role: Role) -> str:
    """The name under which times of a format are kept: products of one name use the same operators.

    Mixed inputs are scaled by token where no norm precedes, and have one scale elsewhere.
    """
    ending = ("" if form.grid.is_symmetric else "_zeros") + ("_outliers" if form.outliers else "")
    if form.grid.block is not None:
        return f"int{form.grid.bits}_block{form.grid.block}{ending}"
    activations = form.activations
    if activations == "mixed":
        activations = "token" if form.scales_tokens(role) else "tensor"
    return f"int{form.grid.bits}_{activations}{ending}"


# Every format that a scheme can give a projection, with a role that it then has.
PROBED: dict[str, tuple[Format, Role]] = {
    format_name(form, role): (form, role)
    for row in SCHEMES.values()
    for form in (row.body, row.head)
    for role in (Role.FFN_UP, Role.FFN_DOWN)
}


def products_of(
    packs: Iterable[Pack], formats: Mapping[str, Format], *, prompt_rows: int
) -> tuple[Product, ...]:
    """The products of an exported model, each with its name of format under `formats`.

    The packs may come from a plan that quantizes nothing: packing does not depend on it. An lm_head reads one
    row of a prompt.
    """
    return tuple(
        Product(
            layers=tuple(layer.name for layer in pack.layers),
            in_features=pack.in_features,
            out_features=pack.out_features,
            format_name=format_name(formats[pack.layers[0].name], pack.layers[0].role),
            has_bias=pack.has_bias,
            reads_table=pack.layers[0].tied_to is not None,
            prompt_rows=1 if pack.layers[0].role is Role.LM_HEAD else prompt_rows,
        )
        for pack in packs
    )


def product_bytes(product: Product, name: str) -> int:
    """Bytes that one such product reads of its weights."""
    return sum(spec.num_bytes for spec in _tensors(_probe_pack("copy", product, name)))


def write_product_probe(folder: Path, product: Product, name: str, copies: int = 1) -> Path:
    """`copies` products like this one in one format, with weights of their own, in one model.

    Copy i reads x_i and gives y_i: inputs of their own, since onnxruntime would compute only once what
    equal nodes do to one input.
    """
    packs = [_probe_pack(f"copy_{i}", product, name) for i in range(copies)]
    checkpoint = _random_checkpoint(
        folder / "weights.bin", [spec for pack in packs for spec in _tensors(pack)]
    )
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=True)
    for number, pack in enumerate(packs):
        x = graph.input(f"x_{number}", TensorProto.FLOAT, [1, "rows", product.in_features])
        y = matmul(graph, pack, x)
        graph.output(y, f"y_{number}", TensorProto.FLOAT, [1, "rows", product.out_features])
    path = folder / "product.onnx"
    save(graph.finish(name="product", target=TARGETS[DEFAULT_TARGET], metadata={}), path)
    return path


def _probe_pack(label: str, product: Product, name: str) -> Pack:
    form, role = (None, Role.FFN_UP) if name == FLOAT else PROBED[name]
    layer = Layer(
        name=label,
        role=role,
        in_features=product.in_features,
        out_features=product.out_features,
        has_bias=product.has_bias,
        matrix=label,
        rows=Rows(start=0, length=product.out_features, stride=product.out_features),
        stored_as="Linear",
    )
    return Pack(
        name=label,
        layers=(layer,),
        format=form,
        table=f"{label}.table" if not form and product.reads_table else None,
    )


def _tensors(pack: Pack) -> tuple[TensorSpec, ...]:
    """What is stored of a pack, with the table that it may read."""
    if pack.table is None:
        return pack.tensors()
    table = TensorSpec(name=f"{pack.table}.weight", dtype="F32", shape=(pack.out_features, pack.in_features))
    return (*pack.tensors(), table)


def _random_checkpoint(path: Path, specs: Iterable[TensorSpec], seed: int = 0) -> Checkpoint:
    """A file of random codes and floats about as large as real ones; denormal floats would be slow.

    No two tensors are alike, since onnxruntime keeps equal weights only once, and would read them from the
    cache: each starts at another place of one random sequence.
    """
    generator = np.random.default_rng(seed)
    codes = generator.integers(1, 255, 1 << 20, dtype=np.uint8).tobytes()
    floats = 0.02 + 0.01 * generator.random(1 << 20, dtype=np.float32)
    pools = {"F32": floats.tobytes(), "F16": floats.astype(np.float16).tobytes()}
    pools["I64"] = np.arange(1 << 10).tobytes()  # outlier columns: the first ones
    slots: dict[str, Slot] = {}
    with path.open("wb") as file:
        for number, spec in enumerate(specs):
            file.seek(-(-file.tell() // 64) * 64)
            slots[spec.name] = Slot(spec=spec, offset=file.tell(), length=spec.num_bytes)
            pool = pools.get(spec.dtype, codes)
            place = 0 if spec.dtype == "I64" else number * STRIDE_BYTES % len(pool)
            left = spec.num_bytes
            while left:
                piece = memoryview(pool)[place : place + left]
                file.write(piece)
                place, left = 0, left - len(piece)
    described: dict[str, Any] = {}
    return Checkpoint(path=path, slots=slots, description=described)
