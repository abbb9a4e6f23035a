"""Placement by the runtime's own record, and MACs by its shapes: against graphs counted by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from quantkit.runtime.providers.placement import (
    Assigned,
    assigned,
    feeds_of,
    layer_of,
    place,
    placement_of,
    read_macs,
    reasons_in,
    record_options,
)
from quantkit.runtime.providers.table import PROVIDERS, open_on

pytestmark = pytest.mark.once
CPU, QNN = PROVIDERS["cpu"], PROVIDERS["qnn"]
QNN_LOG = """\x1b[0;93m2026-01-01 [V:onnxruntime:, x.cc:1713 LogNodeSupport] Validation FAILED for 1 nodes
\tOperator type: MatMulNBits Node name: h.0.attn Node index: 30
\tREASON : Cannot get shape

2026-01-01 [V:onnxruntime:, x.cc:1] Validation FAILED for 2 nodes in OrtNodeUnit (Gelu) :
\tOperator type: DequantizeLinear Node name: h.0.act/in Node index: 31
\tOperator type: Gelu Node name: h.0.act Node index: 32
\tREASON : Operators of type `Gelu` are not supported by QNN EP.Gelu node `h.0.act` will not be assigned.
\tOperator type: MatMulNBits Node name: h.0.attn Node index: 30
\tREASON : said again
2026-01-01 [V:onnxruntime:, x.cc:1] Validation PASSED for 1 nodes in OrtNodeUnit (Add) :
\tOperator type: Add Node name: h.0.add Node index: 33
2026-01-01 [V:onnxruntime:, x.cc:1] something else
"""


def save(path: Path, nodes: list, inputs: dict, weights: dict[str, np.ndarray], output: str) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save_model(model, str(path))
    return path


def two_products(
    path: Path, *, rows: int | str = "rows", width: int = 6, inner: int = 10, out: int = 4
) -> Path:
    """x [1, rows, width] through two named layers with an activation between."""
    weights = {"a": np.ones((width, inner), np.float32), "b": np.ones((inner, out), np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="block.0.up"),
        helper.make_node("Sigmoid", ["h"], ["s"], name="block.0/activation"),
        helper.make_node("MatMul", ["s", "b"], ["y"], name="block.0.down"),
    ]
    return save(path, nodes, {"x": [1, rows, width]}, weights, "y")


@settings(max_examples=10)
@given(st.tuples(*[st.integers(1, 9)] * 4))
def test_macs_of_products_are_rows_by_width_by_columns(tmp_path_factory, sizes) -> None:
    rows, width, inner, out = sizes
    path = tmp_path_factory.mktemp("macs") / "m.onnx"
    two_products(path, rows=rows, width=width, inner=inner, out=out)
    assert read_macs(path) == {"block.0.up": rows * width * inner, "block.0.down": rows * inner * out}


def test_macs_follow_the_tokens_where_sizes_are_free(tmp_path: Path) -> None:
    path = two_products(tmp_path / "m.onnx")
    assert read_macs(path, num_tokens=3)["block.0.up"] == 3 * 6 * 10
    assert read_macs(path, num_tokens=30)["block.0.up"] == 30 * 6 * 10


def test_transposed_batched_and_convolved_products(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "bias"], ["g"], name="gemm", transA=1, transB=1),
        helper.make_node("Reshape", ["g", "shape"], ["r"], name="r"),
        helper.make_node("MatMul", ["r", "r2"], ["m"], name="batched"),
        helper.make_node("Conv", ["m", "kernel"], ["c"], name="conv"),
    ]
    weights = {
        "w": np.ones((6, 5), np.float32),  # [out, in]
        "bias": np.ones(6, np.float32),
        "shape": np.array([2, 4, 3], np.int64),
        "r2": np.ones((2, 3, 7), np.float32),
        "kernel": np.ones((8, 4, 3), np.float32),  # out, in, window
    }
    path = save(tmp_path / "m.onnx", nodes, {"x": [5, 4]}, weights, "c")
    assert read_macs(path) == {
        "gemm": 4 * 5 * 6,
        "batched": 2 * 4 * 3 * 7,
        "conv": 2 * 8 * 5 * (4 * 3),  # batch, channels, places, window
    }


def test_a_file_that_the_cpu_cannot_run_has_no_macs(tmp_path: Path) -> None:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", name="compiled")
    path = save(tmp_path / "m.onnx", [node], {"x": [1, 2]}, {}, "y")
    assert read_macs(path) == {}


def test_the_cpu_runs_all_of_it(tmp_path: Path) -> None:
    placement = place(CPU, [two_products(tmp_path / "m.onnx")])
    assert (placement.node_fraction, placement.mac_fraction, placement.num_nodes) == (1.0, 1.0, 3)
    assert placement.unplaced == ()
    assert [(each.operator, each.num_nodes) for each in placement.operators] == [
        ("MatMul", 2),
        ("Sigmoid", 1),
    ]


def test_what_another_provider_left_is_named_with_its_layer(tmp_path: Path) -> None:
    """A record of the real runtime, in which all of the graph went to the CPU."""
    path = two_products(tmp_path / "m.onnx")
    session = open_on(CPU, str(path), record_options(threads=1))
    placement = placement_of(QNN, [assigned(session, read_macs(path))])
    assert (placement.node_fraction, placement.mac_fraction) == (0.0, 0.0)
    found = [(each.operator, each.layer, each.reason) for each in placement.unplaced]
    assert found == [
        ("MatMul", "block.0.up", None),
        ("Sigmoid", "block.0", None),
        ("MatMul", "block.0.down", None),
    ]


def shared_out(nodes: list[tuple[str, str, bool]], macs: dict[str, int]) -> float | None:
    owners = {True: QNN.onnxruntime_name, False: CPU.onnxruntime_name}
    named = tuple((name, operator, owners[placed]) for name, operator, placed in nodes)
    return placement_of(QNN, [Assigned(nodes=named, macs=macs)]).mac_fraction


def test_shares_count_work_and_not_nodes() -> None:
    nodes = [("big", "MatMul", True), ("small", "MatMul", False), ("r", "Reshape", False)]
    assert shared_out(nodes, {"big": 90, "small": 10}) == 0.9


def test_a_renamed_product_is_counted_by_difference_only_where_that_tells() -> None:
    nodes = [("fused", "Gemm", True), ("small", "MatMul", False)]
    assert shared_out(nodes, {"big": 90, "small": 10}) == 0.9
    assert shared_out([*nodes, ("other", "Gemm", False)], {"big": 90, "small": 10}) is None
    assert shared_out(nodes, {}) is None


def test_several_files_add_up() -> None:
    one = Assigned(nodes=(("a", "MatMul", QNN.onnxruntime_name),), macs={"a": 30})
    other = Assigned(nodes=(("b", "MatMul", CPU.onnxruntime_name),), macs={"b": 10})
    placement = placement_of(QNN, [one, other])
    assert (placement.node_fraction, placement.mac_fraction, placement.num_nodes) == (0.5, 0.75, 2)


@pytest.mark.parametrize(
    ("name", "operator", "layer"),
    [
        ("transformer.h.0.attn.c_attn", "MatMulNBits", "transformer.h.0.attn.c_attn"),
        ("transformer.h.0/attention/scores", "MatMul", "transformer.h.0"),
        ("/model/layers.1/mlp/up_proj/MatMul", "MatMul", "model.layers.1.mlp.up_proj"),
        ("/Gather", "Gather", None),
        ("Neg_78", "Neg", None),
        ("", "Add", None),
    ],
)
def test_layers_are_read_from_names(name: str, operator: str, layer: str | None) -> None:
    assert layer_of(name, operator) == layer


def test_reasons_are_read_from_the_log_of_qnn() -> None:
    gelu = "Operators of type `Gelu` are not supported by QNN EP"
    assert reasons_in(QNN_LOG) == {
        "h.0.attn": "Cannot get shape",
        "h.0.act": gelu,
        "h.0.act/in": gelu,
    }
    assert reasons_in("") == {}


def test_a_short_text_stands_at_the_beginning_of_a_fixed_graph(tmp_path: Path) -> None:
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [1, 6])
        for name in ("input_ids", "attention_mask", "position_ids")
    ]
    nodes = [helper.make_node("Sum", ["a", "b", "c"], ["y"])]
    casts = [
        helper.make_node("Cast", [value.name], [out], to=TensorProto.FLOAT)
        for value, out in zip(inputs, "abc", strict=True)
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 6])
    graph = helper.make_graph([*casts, *nodes], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    path = tmp_path / "m.onnx"
    onnx.save_model(model, str(path))
    session = open_on(CPU, str(path), record_options(threads=1))
    feeds = feeds_of(session, ids=np.array([[7, 8, 9]]))
    assert feeds["input_ids"].tolist() == [[7, 8, 9, 1, 1, 1]]
    assert feeds["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0]]
    assert feeds["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.skipif(sys.platform == "win32", reason="the emulation is in the Linux wheel")
def test_qnn_takes_a_graph_of_fixed_sizes_and_says_why_it_leaves_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn", reason="pip install 'quantkit-onnx[qnn]'")
    path = two_products(tmp_path / "fixed.onnx", rows=4, width=16, inner=32, out=16)
    assert place(QNN, [path]).mac_fraction == 1.0
    placement = place(QNN, [two_products(tmp_path / "free.onnx")])
    assert placement.mac_fraction == 0.0
    assert placement.unplaced is not None
    assert all(node.reason == "Cannot get shape" for node in placement.unplaced)
