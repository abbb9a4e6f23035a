"""Graphs with one file of weights: read back they hold what they held, and nothing lies there twice."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from quantkit.export.graph import save
from quantkit.export.static.shared_weights import ALIGNMENT, LEAST_BYTES, share_weights

pytestmark = pytest.mark.once
TYPES = ("float32", "int8", "uint16", "int64")


def graph_of(tensors: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A graph that gives its tensors out as they are."""
    outputs = [
        helper.make_tensor_value_info(
            f"{name}/out", helper.np_dtype_to_tensor_dtype(values.dtype), values.shape
        )
        for name, values in tensors.items()
    ]
    nodes = [helper.make_node("Identity", [name], [f"{name}/out"]) for name in tensors]
    held = [numpy_helper.from_array(values, name) for name, values in tensors.items()]
    opset = [helper.make_opsetid("", 21)]
    return helper.make_model(
        helper.make_graph(nodes, "g", [], outputs, held), opset_imports=opset, ir_version=10
    )


@given(
    tensors=st.lists(
        st.tuples(st.integers(1, 900), st.sampled_from(TYPES), st.integers(0, 3)), min_size=1, max_size=6
    )
)
@settings(max_examples=25)
def test_what_is_read_back_is_what_was_there(tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    values = {
        f"t{number}": np.random.default_rng(seed).integers(0, 100, size).astype(kind)
        for number, (size, kind, seed) in enumerate(tensors)
    }
    models = {"a.onnx": graph_of(values), "b.onnx": graph_of({f"other {k}": v for k, v in values.items()})}
    (folder / "kept").touch()
    share_weights(models, folder / "weights.data", kept_in=folder / "kept")
    distinct = {each.tobytes() for each in values.values() if each.nbytes >= LEAST_BYTES}
    total = sum(map(len, distinct))
    assert total <= (folder / "weights.data").stat().st_size <= total + ALIGNMENT * len(distinct)
    for name, model in models.items():
        save(model, folder / name)
        session = onnxruntime.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])
        for made, wanted in zip(session.run(None, {}), values.values(), strict=True):
            np.testing.assert_array_equal(made, wanted)


def test_tensors_of_the_checkpoint_are_copied_and_shared(tmp_path):
    codes = np.random.default_rng(0).integers(-127, 128, (70, 50)).astype(np.int8)
    (tmp_path / "kept").write_bytes(bytes(100) + codes.tobytes() + bytes(9))
    models = {}
    for name in ("a.onnx", "b.onnx"):
        models[name] = graph_of({"codes": np.zeros_like(codes)})
        (tensor,) = models[name].graph.initializer
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "kept"), ("offset", "100"), ("length", str(codes.nbytes))):
            tensor.external_data.add(key=key, value=value)
    share_weights(models, tmp_path / "weights.data", kept_in=tmp_path / "kept")
    assert (tmp_path / "weights.data").read_bytes() == codes.tobytes()
    (tmp_path / "kept").unlink()
    for name, model in models.items():
        save(model, tmp_path / name)
        session = onnxruntime.InferenceSession(str(tmp_path / name), providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(None, {})[0], codes)
