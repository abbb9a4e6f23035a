"""Kept compiled forms: used where all that they depend on is as it was, compiled again and said where not.

Any ONNX file can stand for a compiled form here, for it opens like a model; tests/npu has a real one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.runtime.providers import compiled
from quantkit.runtime.providers.table import PROVIDERS, RELU_MODEL

pytestmark = pytest.mark.once
CPU = PROVIDERS["cpu"]
VALUES = np.array([-1.5, 0.0, 0.25, 3.0], np.float32)


def options() -> onnxruntime.SessionOptions:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    return settings


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "artifact" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(RELU_MODEL)
    return path


def keep(model: Path, place: Path, **changes: str) -> Path:
    """A compiled form as a run leaves it, of which the record may say something else."""
    place.mkdir(parents=True, exist_ok=True)
    partial = place / "partial.onnx"
    partial.write_bytes(RELU_MODEL)
    context = place / compiled.name_of(CPU, model)
    origin = dataclasses.replace(compiled.origin_of(CPU, model), **changes)
    compiled._publish(partial, context, origin, 5.0)
    assert sorted(path.name for path in place.iterdir()) == [
        context.with_suffix(".json").name, context.name,
    ]  # fmt: skip
    return context


def relu(session: onnxruntime.InferenceSession) -> np.ndarray:
    return session.run(None, {"x": VALUES})[0]


@pytest.mark.parametrize("place", [0, 1], ids=["beside", "in the cache folder"])
def test_what_fits_is_used_from_either_place(model, place):
    context = keep(model, compiled.places_of(model)[place])
    assert compiled.find(CPU, model) == compiled.Kept(context=context)
    started = compiled.start(CPU, model, options)
    assert started.is_reused and started.message == ""
    np.testing.assert_array_equal(relu(started.session), np.maximum(VALUES, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"provider_version": "2.6.0"}, "it was compiled by version 2.6.0"),
        ({"onnxruntime": "1.24.0"}, "under onnxruntime 1.24.0"),
        ({"device": "a Snapdragon"}, "for another device"),
        ({"options": '{"backend_type": "gpu"}'}, "with other options"),
        ({"provider": "qnn"}, "it was compiled for qnn"),
        ({"model_sha256": "0", "provider_version": "2.6.0"}, "the model has changed"),
    ],
)
def test_what_does_not_fit_is_compiled_again_and_said(model, change, words):
    keep(model, compiled.places_of(model)[0], **change)
    started = compiled.start(CPU, model, options)
    assert not started.is_reused
    assert words in started.message and started.message.startswith("model.onnx was compiled again for cpu: ")
    assert "\n" not in started.message
    np.testing.assert_array_equal(relu(started.session), np.maximum(VALUES, 0))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged"),
        (lambda path: path.unlink(), "its file is gone"),
        (lambda path: path.with_suffix(".json").unlink(), "no record"),
        (lambda path: path.with_suffix(".json").write_text('{"provider": "cpu"'), "no record"),
        (lambda path: path.with_suffix(".json").write_text("[1, 2]"), "no record"),
        (lambda path: path.with_suffix(".json").write_bytes(b"\xff\xfe\x00"), "no record"),
    ],
    ids=["cut", "gone", "unrecorded", "cut record", "another record", "no text"],
)
def test_damage_is_compiled_again_and_said(model, damage, words):
    damage(keep(model, compiled.places_of(model)[0]))
    started = compiled.start(CPU, model, options)
    assert not started.is_reused and words in started.message
    np.testing.assert_array_equal(relu(started.session), np.maximum(VALUES, 0))


def test_a_form_that_fits_but_does_not_open_is_compiled_again(model):
    place = compiled.places_of(model)[0]
    context = keep(model, place)
    context.write_bytes(b"no model")
    record = json.loads(context.with_suffix(".json").read_text())
    record["file_sha256"] = compiled.sha256_of(context)
    context.with_suffix(".json").write_text(json.dumps(record))
    started = compiled.start(CPU, model, options)
    assert not started.is_reused and "does not open" in started.message


def test_changed_weights_beside_the_graph_are_a_changed_model(model):
    graph = onnx.load_from_string(RELU_MODEL)
    weight = onnx.numpy_helper.from_array(np.ones(4096, np.float32), "w")
    graph.graph.initializer.append(weight)
    graph.graph.node.append(onnx.helper.make_node("Relu", ["w"], ["v"]))
    graph.graph.output.append(onnx.helper.make_tensor_value_info("v", 1, [4096]))
    onnx.save(graph, model, save_as_external_data=True, location="weights.data", size_threshold=0)
    (model.parent / "other.data").write_bytes(b"not of this graph")
    before = compiled.model_hash(model)
    (model.parent / "other.data").write_bytes(b"and changed")
    assert compiled.model_hash(model) == before
    data = bytearray((model.parent / "weights.data").read_bytes())
    data[7] ^= 1
    (model.parent / "weights.data").write_bytes(data)
    assert compiled.model_hash(model) != before


@settings(max_examples=40)
@given(place=st.integers(0, len(RELU_MODEL) - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_of_a_kept_file_is_noticed(place, bit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    model = folder / "model.onnx"
    model.write_bytes(RELU_MODEL)
    context = keep(model, folder / compiled.FOLDER)
    data = bytearray(RELU_MODEL)
    data[place] ^= 1 << bit
    context.write_bytes(data)
    assert compiled.find(CPU, model).reason == "its file is damaged"


def test_a_provider_that_gives_nothing_away_runs_all_the_same(model):
    started = compiled.start(CPU, model, options)
    assert not started.is_reused and "cpu" in started.message
    np.testing.assert_array_equal(relu(started.session), np.maximum(VALUES, 0))
    assert list((model.parent / compiled.FOLDER).iterdir()) == []  # nothing half-written


def test_where_neither_place_can_be_written_it_still_starts(model, tmp_path):
    (model.parent / compiled.FOLDER).write_text("a file is in the way")
    (tmp_path / "cache").write_text("and here")
    started = compiled.start(CPU, model, options)
    assert "cannot be kept" in started.message and str(tmp_path / "cache") in started.message
    np.testing.assert_array_equal(relu(started.session), np.maximum(VALUES, 0))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_artifact_is_left_alone(model, tmp_path):
    model.parent.chmod(0o555)
    place, why_not = compiled._writable(compiled.places_of(model))
    model.parent.chmod(0o755)
    assert place is not None and place.is_relative_to(tmp_path / "cache") and not why_not
