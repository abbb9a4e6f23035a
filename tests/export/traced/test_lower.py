"""Lowering float graphs written by hand, one for each way in which an exporter may spell a product.

Each graph runs before and after in the real runtime. What the integers should give is computed from the
checkpoint in float64, with inputs rounded as the operators round them.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import onnxruntime
import pytest
import torch
from checkpoints import TRANSPOSED, quantize
from exporting import error
from fake_quantize import fake_quantize
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from transformers.pytorch_utils import Conv1D

from quantkit.errors import InputError
from quantkit.export.graph import CONTRIB, METADATA_KEY, save
from quantkit.export.traced.lower import integer_projections, lower
from quantkit.plan.targets import TARGETS
from quantkit.quantization.grid import decode, from_bytes
from quantkit.runtime.cpu_session import open_on_cpu

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((2, 5, 32)).astype(np.float32)
ROWS = X.reshape(10, 32)
PRODUCTS = {"MatMulNBits", "DynamicQuantizeMatMul"}


class One(nn.Module):
    """One projection."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.projection = linear

    def forward(self, x):
        return self.projection(x)


def module(*, square=False, bias=True):
    torch.manual_seed(0)
    return One(nn.Linear(32, 32 if square else 48, bias=bias))


def graph(nodes, constants, *, x=X, outputs=("y",), types=None):
    return helper.make_model(
        helper.make_graph(
            [helper.make_node(*args, name=f"node{i}", **kwargs) for i, (*args, kwargs) in enumerate(nodes)],
            "by hand",
            [helper.make_tensor_value_info("x", types or TensorProto.FLOAT, list(x.shape))],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )


def lowered(quantized, model, *, outside=False):
    return lower(
        {"model.onnx": model},
        quantized.contents,
        quantized.checkpoint,
        quantized.source,
        transposed=TRANSPOSED,
        **quantized.options(outside=outside),
    )["model.onnx"]


def run(model, folder, x=X):
    save(model, folder / "model.onnx")
    session = open_on_cpu(str(folder / "model.onnx"), onnxruntime.SessionOptions())
    return session.run(None, {"x": x})


def operators(model):
    return [node.op_type for node in model.graph.node if not node.name.endswith(".scales/widened")]


SPELLINGS = {
    "MatMul with a transposed copy": (
        [("MatMul", ["x", "anonymous"], ["p"], {}), ("Add", ["bias", "p"], ["y"], {})],
        lambda w, b: {"anonymous": w.T, "bias": b},
        X,
    ),
    "the bias on the right": (
        [("MatMul", ["x", "anonymous"], ["p"], {}), ("Add", ["p", "bias"], ["y"], {})],
        lambda w, b: {"anonymous": w.T, "bias": b},
        X,
    ),
    "a Transpose of the weight": (
        [
            ("Transpose", ["weight"], ["turned"], {"perm": [1, 0]}),
            ("MatMul", ["x", "turned"], ["p"], {}),
            ("Identity", ["bias"], ["same"], {}),
            ("Add", ["same", "p"], ["y"], {}),
        ],
        lambda w, b: {"weight": w, "bias": b},
        X,
    ),
    "Gemm with transB": (
        [("Gemm", ["x", "weight", "bias"], ["y"], {"transB": 1})],
        lambda w, b: {"weight": w, "bias": b},
        ROWS,
    ),
    "Gemm": (
        [("Gemm", ["x", "weight", "bias"], ["y"], {})],
        lambda w, b: {"weight": w.T, "bias": b},
        ROWS,
    ),
}


@pytest.mark.parametrize("scheme", ["int8_block32", "int8_channel"])
@pytest.mark.parametrize("square", [False, True], ids=["oblong", "square"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_product(spelling, square, scheme, tmp_path):
    nodes, constants, x = SPELLINGS[spelling]
    model = module(square=square)
    weight_OI, bias = (value.detach().numpy() for value in (model.projection.weight, model.projection.bias))
    floats = graph(nodes, constants(weight_OI, bias), x=x)
    wanted = x @ weight_OI.T + bias
    assert error(run(floats, tmp_path, x)[0], wanted).relative < 1e-5
    quantized = quantize(model, tmp_path, scheme=scheme)
    done = lowered(quantized, floats)
    assert operators(done) == ["MatMulNBits" if "block" in scheme else "DynamicQuantizeMatMul"]
    assert {tensor.name.split(".")[-1].removesuffix("_IO") for tensor in done.graph.initializer} == {
        "codes",
        "scales",
        "bias",
    }
    made = run(done, tmp_path, x)[0]
    with torch.inference_mode():
        fake = fake_quantize(model, quantized.checkpoint)(torch.from_numpy(x)).numpy()
    assert error(made, fake).relative < 1e-5
    assert 1e-4 < error(made, wanted).relative < 0.03


def test_a_weight_that_multiplies_from_the_wrong_side_is_not_the_projection(tmp_path):
    """x W and x W^T read the same bytes of a square matrix, and only one of them is the projection."""
    model = module(square=True, bias=False)
    weight_OI = model.projection.weight.detach().numpy()
    floats = graph([("MatMul", ["x", "weight"], ["y"], {})], {"weight": weight_OI})
    with pytest.raises(InputError, match="1 planned projections are not found in the traced graph: proj"):
        lowered(quantize(model, tmp_path), floats)


@pytest.mark.parametrize("tamper", ["other values", "computed", "scaled"])
def test_a_planned_projection_that_is_not_found_is_named(tamper, tmp_path):
    model = module()
    weight_IO = model.projection.weight.detach().numpy().T.copy()
    bias = model.projection.bias.detach().numpy()
    nodes = [("Gemm", ["x", "weight", "bias"], ["y"], {"alpha": 0.5 if tamper == "scaled" else 1.0})]
    if tamper == "computed":
        nodes = [("Mul", ["raw", "two"], ["weight"], {}), *nodes]
    if tamper == "other values":
        weight_IO[3, 4] += 1e-6
    constants = {"raw" if tamper == "computed" else "weight": weight_IO, "bias": bias, "two": np.float32([2])}
    with pytest.raises(InputError, match="projection") as caught:
        lowered(quantize(model, tmp_path), graph(nodes, constants, x=ROWS))
    assert "--exclude" in str(caught.value)
    excluded = quantize(model, tmp_path, exclude=("projection",))
    assert operators(lowered(excluded, graph(nodes, constants, x=ROWS))) == [node[0] for node in nodes]


def test_a_sum_that_is_no_bias_stays(tmp_path):
    """A product that is read twice, and a vector of other values, must not be taken in."""
    model = module()
    weight_OI, bias = (value.detach().numpy() for value in (model.projection.weight, model.projection.bias))
    nodes = [("MatMul", ["x", "w"], ["p"], {}), ("Add", ["p", "b"], ["y"], {}), ("Relu", ["p"], ["z"], {})]
    twice = lowered(
        quantize(model, tmp_path), graph(nodes, {"w": weight_OI.T, "b": bias}, outputs=("y", "z"))
    )
    assert operators(twice) == ["MatMulNBits", "Add", "Relu"]
    y, z = run(twice, tmp_path)
    wanted = X @ weight_OI.T
    assert error(y, wanted + bias).relative < 0.03
    assert error(z, np.maximum(wanted, 0)).relative < 0.03
    other = lowered(quantize(model, tmp_path), graph(nodes[:2], {"w": weight_OI.T, "b": bias + 1}))
    assert operators(other) == ["MatMulNBits", "Add"]
    assert error(run(other, tmp_path)[0], wanted + bias + 1).relative < 0.03
    gemm = graph([("Gemm", ["x", "w", "b"], ["y"], {})], {"w": weight_OI.T, "b": bias + 1}, x=ROWS)
    assert operators(lowered(quantize(model, tmp_path), gemm)) == ["MatMulNBits", "Add"]


def test_a_module_that_runs_often_keeps_one_weight(tmp_path):
    model = module(square=True)
    weight_OI, bias = (value.detach().numpy() for value in (model.projection.weight, model.projection.bias))
    names = ["x", *(f"h{i}" for i in range(11)), "y"]
    nodes = [("Gemm", [a, f"w{i}", "b"], [b], {}) for i, (a, b) in enumerate(itertools.pairwise(names))]
    copies = {f"w{i}": weight_OI.T for i in range(12)}  # exporters may write a copy for each call
    done = lowered(quantize(model, tmp_path), graph(nodes, {**copies, "b": bias}, x=ROWS))
    assert operators(done) == ["MatMulNBits"] * 12
    assert len(done.graph.initializer) == 3
    products = [node.name for node in done.graph.node if node.op_type == "MatMulNBits"]
    assert len({*products}) == 12
    owners = json.loads({entry.key: entry.value for entry in done.metadata_props}[METADATA_KEY])[
        "integer_nodes"
    ]
    assert owners == {name: ["projection"] for name in products}
    wanted = ROWS.astype(np.float64)
    for _ in range(12):
        wanted = wanted @ weight_OI.T.astype(np.float64) + bias
    assert error(run(done, tmp_path, ROWS)[0], wanted).relative < 0.1


class Two(nn.Module):
    """Two projections that happen to hold equal values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.second.weight.data = self.first.weight.data.clone()


def test_equal_weights_are_told_apart_by_their_turn(tmp_path):
    weight_IO = Two().first.weight.detach().numpy().T
    nodes = [("MatMul", ["x", "w"], ["h"], {}), ("MatMul", ["h", "w"], ["y"], {})]
    done = lowered(quantize(Two(), tmp_path), graph(nodes, {"w": weight_IO}))
    assert integer_projections(done) == {"first", "second"}
    assert [node.name for node in done.graph.node if node.op_type == "MatMulNBits"] == ["first", "second"]


@pytest.mark.parametrize("shape", [(7,), (2, 5), (2, 3, 4)])
@pytest.mark.parametrize("scheme", ["int8_block32", "int8_channel"])
def test_tables_are_read_as_integers_whatever_shape_is_asked_for(shape, scheme, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 8))
    table = model[0].weight.detach().numpy()
    ids = GENERATOR.integers(0, 50, shape)
    nodes = [("Gather", ["table", "x"], ["h"], {"axis": 0}), ("MatMul", ["h", "w"], ["y"], {})]
    constants = {"table": table, "w": model[1].weight.detach().numpy().T}
    floats = graph(nodes, constants, x=ids, types=TensorProto.INT64, outputs=("y", "h"))
    quantized = quantize(model, tmp_path, scheme=scheme)
    done = lowered(quantized, floats)
    read = quantized.checkpoint.read
    wanted = decode(from_bytes(read("0.codes")), read("0.scales").astype(np.float32), 40)[ids]
    assert error(run(done, tmp_path, ids)[1], wanted).absolute < 1e-6
    assert not [
        t.name for t in done.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.raw_data) > 4000
    ]


def test_weights_beside_the_graph_are_pointed_to_once_for_all_files(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 128), nn.Linear(128, 600, bias=False))
    constants = {f"w{i}": layer.weight.detach().numpy().T for i, layer in enumerate(model)}
    constants |= {f"b{i}": model[i].bias.detach().numpy() for i in range(2)}
    nodes = [
        ("Gemm", ["x", "w0", "b0"], ["h"], {}),
        ("Gemm", ["h", "w1", "b1"], ["g"], {}),
        ("MatMul", ["g", "w2"], ["y"], {}),
    ]
    quantized = quantize(model, tmp_path, exclude=("2",))
    floats = graph(nodes, constants, x=ROWS)
    before = floats.SerializeToString()
    files = lower(
        {"one.onnx": floats, "two.onnx": floats},
        quantized.contents,
        quantized.checkpoint,
        quantized.source,
        transposed=TRANSPOSED,
        **quantized.options(outside=True),
    )
    assert floats.SerializeToString() == before, "what is lowered is not changed"
    for done in files.values():
        outside = {t.name for t in done.graph.initializer if t.data_location == TensorProto.EXTERNAL}
        assert outside == {"0.codes", "1.codes", "2.weight_IO"}
        assert done.ByteSize() < 8000
        beside = run(done, tmp_path, ROWS)[0]
        inside = run(lowered(quantized, floats), tmp_path, ROWS)[0]
        assert np.array_equal(beside, inside)
        assert error(beside, run(floats, tmp_path, ROWS)[0]).relative < 0.05


def test_a_matrix_stored_as_in_out_is_found_too(tmp_path):
    torch.manual_seed(0)
    model = One(Conv1D(48, 32))
    weight_IO, bias = (value.detach().numpy() for value in (model.projection.weight, model.projection.bias))
    floats = graph([("Gemm", ["x", "w", "b"], ["y"], {})], {"w": weight_IO, "b": bias}, x=ROWS)
    done = lowered(quantize(model, tmp_path), floats)
    assert operators(done) == ["MatMulNBits"]
    assert error(run(done, tmp_path, ROWS)[0], ROWS @ weight_IO + bias).relative < 0.03


def test_names_in_branches_are_kept(tmp_path):
    """What a branch captures from outside must still be there under its name."""
    model = module()
    weight_OI, bias = (value.detach().numpy() for value in (model.projection.weight, model.projection.bias))
    branch = [
        helper.make_graph(
            [helper.make_node(op, ["p", "b"], [f"o{op}"])],
            op,
            [],
            [helper.make_tensor_value_info(f"o{op}", TensorProto.FLOAT, None)],
        )
        for op in ("Add", "Sub")
    ]
    nodes = [
        ("MatMul", ["x", "w"], ["p"], {}),
        ("If", ["yes"], ["y"], {"then_branch": branch[0], "else_branch": branch[1]}),
    ]
    floats = graph(nodes, {"w": weight_OI.T, "b": bias, "yes": np.array(True)})
    done = lowered(quantize(model, tmp_path), floats)
    assert operators(done) == ["MatMulNBits", "If"]
    assert error(run(done, tmp_path)[0], X @ weight_OI.T + bias).relative < 0.03


def test_an_old_opset_is_refused(tmp_path):
    model = module()
    floats = graph([("Identity", ["x"], ["y"], {})], {})
    floats.opset_import[0].version = 11
    with pytest.raises(InputError, match="opset 11"):
        lowered(quantize(model, tmp_path), floats)


def test_the_file_says_what_it_holds(tmp_path):
    model = module()
    weight_OI, bias = (value.detach().numpy() for value in (model.projection.weight, model.projection.bias))
    floats = graph([("Gemm", ["x", "w", "b"], ["y"], {"transB": 1})], {"w": weight_OI, "b": bias}, x=ROWS)
    done = lowered(quantize(model, tmp_path), floats)
    assert {(entry.domain, entry.version) for entry in done.opset_import} == {("", 18), (CONTRIB, 1)}
    assert done.ir_version == TARGETS["cpu"].ir_version
    assert operators(done) == ["MatMulNBits"]
    assert {node.domain for node in done.graph.node if node.op_type == "MatMulNBits"} == {CONTRIB}
