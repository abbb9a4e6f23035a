"""4-bit codes of a quantized original reach the graph as they are."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from packed import checkpoints
from safetensors.torch import load_file

from quantkit import quantize

DEMO = Path(str(resources.files("quantkit") / "assets" / "demo"))
UP = "model.layers.1.mlp.up_proj"
QUIET = {"min_dim": 1, "latency": False, "memory": False, "max_tokens": 200}


def artifact_of(folder: Path, out: Path, **options):
    shutil.copyfile(DEMO / "tokenizer.json", folder / "tokenizer.json")
    quantize(folder, output=out, **{**QUIET, **options})
    graph = onnx.load(out / "model.onnx").graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return tensors, json.loads((out / "report.json").read_text())


def codes_of(tensors, name: str) -> np.ndarray:
    """Unsigned codes [O, I] of a MatMulNBits weight [O, blocks, bytes]."""
    stored = tensors[f"{name}.codes"]
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)


def original_codes(folder: Path, form: str) -> np.ndarray:
    stored = load_file(folder / "model.safetensors")
    words = stored[f"{UP}.weight_packed" if form.startswith("compressed") else f"{UP}.qweight"].numpy()
    words = words if form.startswith("compressed") else words.T
    codes = np.stack([(words.view(np.uint32) >> np.uint32(4 * place)) & 15 for place in range(8)], axis=-1)
    if form == "awq":  # words of columns
        order = np.argsort((0, 2, 4, 6, 1, 3, 5, 7))
        return np.moveaxis(codes[..., order], 1, 2).reshape(-1, codes.shape[1])
    return codes.reshape(len(codes), -1)


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("gptq", "int4_block32"),
        ("gptq zeros", "int4_block32_zeros"),
        ("awq", "int4_block32_zeros"),
        ("compressed zeros", "int4_block32_zeros"),
        ("compressed bfloat16", "int4_block32"),
    ],
)
def test_codes_are_kept(form, scheme, tmp_path):
    packed, _ = checkpoints(tmp_path, form, vocab_size=4096)
    tensors, report = artifact_of(packed, tmp_path / "out")
    assert report["scheme"] == scheme
    assert report["transforms"] == []
    assert (codes_of(tensors, UP) == original_codes(packed, form)).all()
    losses = [loss for loss in report["layer_losses"] if ".layers." in loss["name"]]
    assert {loss["weight_error"] for loss in losses} == {0.0}
    assert min(loss["plain_weight_error"] for loss in losses) > 0
    counted = f"{len(losses)} of {len(report['layer_losses'])} quantized products keep the codes"
    assert any(counted in note for note in report["notes"])


def test_groups_out_of_order_are_rounded_from_their_exact_values(tmp_path):
    made = []
    for folder in checkpoints(tmp_path, "gptq act-order", vocab_size=4096):
        options = {"scheme": "int4_block32", "fit": "rtn", "transforms": [], "accuracy": False}
        made.append(artifact_of(folder, tmp_path / folder.parent.name / "out", **options))
    (tensors, report), (plain, _) = made
    assert (tensors[f"{UP}.codes"] == plain[f"{UP}.codes"]).all()
    assert {loss["name"]: loss["weight_error"] for loss in report["layer_losses"]}[UP] > 0
    assert any("groups out of order" in note for note in report["notes"])
