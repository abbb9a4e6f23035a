"""What calibration sees of a static graph, against the values themselves."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.export.static.ranges import showing_ranges, showing_values
from quantkit.runtime.ranges import observe_ranges

RNG = np.random.default_rng(0)
WINDOWS = [{"x": (RNG.normal(size=(2, 3, 8)) * scale).astype(np.float32)} for scale in (1, 5, 0.1)]


@pytest.fixture
def model():
    weight = numpy_helper.from_array(RNG.normal(size=(8, 5)).astype(np.float32), "weight")
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"], "a"),
        helper.make_node("Softmax", ["product"], ["seen"], "b", axis=-1),
        helper.make_node("Log", ["product"], ["logarithm"], "c"),
        helper.make_node("Exp", ["product"], ["y"], "d"),
    ]
    graph = helper.make_graph(
        nodes,
        "values",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 5])],
        [weight],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(made)
    return made


def without(model, name):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for node in list(changed.graph.node):
        if name in node.output:
            changed.graph.node.remove(node)
    return changed


def test_they_are_those_of_the_values(model):
    model = without(model, "logarithm")
    shown, names = showing_ranges(model)
    found = observe_ranges(shown.SerializeToString(), names, WINDOWS, threads=1)
    values, same_names = showing_values(model)
    assert set(names) == set(same_names) == set(found) == {"product", "seen", "y"}
    session = onnxruntime.InferenceSession(values.SerializeToString(), providers=["CPUExecutionProvider"])
    runs = [dict(zip(names, session.run(list(names), window), strict=True)) for window in WINDOWS]
    for name in names:
        rows = np.concatenate([run[name].reshape(-1, 5) for run in runs])
        assert found[name] == pytest.approx((rows.min(), rows.max(), rows.max(axis=1).min()), rel=1e-6)


def test_a_value_that_is_no_number_is_not_overlooked(model):
    shown, names = showing_ranges(model)
    with pytest.raises(InputError, match="logarithm"):  # of what is negative
        observe_ranges(shown.SerializeToString(), names, WINDOWS, threads=1)
