"""Sums of 8-bit products: exact in quantkit's sessions, whatever the processor."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.runtime.cpu_session import EXACT_SUMS, open_on_cpu
from quantkit.runtime.machine.facts import read_cpu

IN, OUT = 64, 32
GENERATOR = np.random.default_rng(0)
CODES_IO = GENERATOR.integers(100, 128, (IN, OUT)).astype(
    np.int8
)  # large codes of one sign: pairs are cut off
X = GENERATOR.uniform(0.5, 1, (1, 4, IN)).astype(np.float32)
WANTED = X.astype(np.float64) @ CODES_IO
needs_no_vnni = pytest.mark.skipif(not read_cpu().saturates, reason="this processor has exact sums")


def products(number: int, scheme: str = "int8_channel") -> onnx.ModelProto:
    """Products of one input and one weight."""
    nodes = [
        helper.make_node("DynamicQuantizeMatMul", ["x", "w", "s"], [f"y{index}"], domain="com.microsoft")
        for index in range(number)
    ]
    outputs = [
        helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, [1, 4, OUT]) for index in range(number)
    ]
    weights = [numpy_helper.from_array(CODES_IO, "w"), numpy_helper.from_array(np.ones(OUT, np.float32), "s")]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, IN])], outputs, weights
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    helper.set_model_props(model, {"quantkit": json.dumps({"scheme": scheme})})
    return model


def error_of(session):
    (y,) = session.run(["y0"], {"x": X})
    return np.abs(y - WANTED).max() / WANTED.max()


def test_sums_are_exact():
    assert error_of(open_on_cpu(products(1).SerializeToString(), onnxruntime.SessionOptions())) < 0.005


@needs_no_vnni
def test_a_bare_session_cuts_them_off_here():
    assert error_of(onnxruntime.InferenceSession(products(1).SerializeToString())) > 0.05


@needs_no_vnni
def test_a_weight_of_two_products_is_refused_where_it_would_be_wrong():
    with pytest.raises(InputError, match=r"without VNNI.*--target cpu-avx2"):
        open_on_cpu(products(2).SerializeToString(), onnxruntime.SessionOptions())


def test_files_for_such_processors_are_opened_as_they_are(tmp_path):
    onnx.save(products(2), tmp_path / "model.onnx")
    (tmp_path / "manifest.json").write_text(json.dumps({"target": "cpu-avx2"}))
    options = onnxruntime.SessionOptions()
    open_on_cpu(str(tmp_path / "model.onnx"), options)
    with pytest.raises(RuntimeError):  # never set
        options.get_session_config_entry(EXACT_SUMS)
