"""A written artifact is run once before its folder appears, measured or not."""

from __future__ import annotations

import numpy as np
import pytest
from exporting import build_tiny

from quantkit.errors import InputError
from quantkit.export.graph import load, save
from quantkit.model.families import FAMILIES
from quantkit.pipeline.quantize import quantize
from quantkit.pipeline.stages import write as stage

OPTIONS = {"min_dim": 1, "accuracy": False, "latency": False, "memory": False, "calibration_windows": 2}


def not_loading(path):
    graph = load(path)
    graph.graph.node[-1].op_type = "Unheard"
    save(graph, path)


def not_finite(path):
    """Every float constant is NaN."""
    graph = load(path)
    for tensor in graph.graph.initializer:
        if tensor.data_type == 1:
            tensor.raw_data = np.full(len(tensor.raw_data) // 4, np.nan, np.float32).tobytes()
    save(graph, path)


@pytest.mark.parametrize(
    ("family", "target", "broken"),
    [
        ("gpt2", "cpu", "model.onnx"),
        ("bert", "cpu", "model.onnx"),
        ("gpt2", "npu", "prompt.onnx"),
        ("gpt2", "npu", "decode.onnx"),
        ("bert", "npu", "model.onnx"),
    ],
)
def test_a_graph_that_does_not_load_is_no_artifact(family, target, broken, tmp_path, monkeypatch):
    refuse(family, target, broken, not_loading, "ONNXRuntimeError", tmp_path, monkeypatch)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_outputs_that_are_not_finite_are_no_artifact(family, tmp_path, monkeypatch):
    refuse(family, "cpu", "model.onnx", not_finite, "not finite", tmp_path, monkeypatch)


def refuse(family, target, broken, damage, reason, tmp_path, monkeypatch):
    build_tiny(FAMILIES[family].tiny_class, FAMILIES[family].tiny).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 60, 200))
    export = stage.export

    def damaged(job, folder, **options):
        exported = export(job, folder, **options)
        damage(folder / broken)
        return exported

    monkeypatch.setattr(stage, "export", damaged)
    with pytest.raises(InputError, match=f"does not run: .*{reason}"):
        quantize(
            tmp_path / "model",
            output=tmp_path / "out",
            target=target,
            calibration=tmp_path / "ids.npy",
            **OPTIONS,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "model"]
