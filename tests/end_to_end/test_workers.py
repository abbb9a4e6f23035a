"""One model quantized by several workers: the artifact of one process, byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import build_tiny

import quantkit
from quantkit.errors import InputError
from quantkit.model.families import FAMILIES

pytestmark = pytest.mark.once
HASHED = (".onnx", ".data", ".safetensors", ".yaml")


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model(tmp_path):
    row = FAMILIES["llama"]
    build_tiny(row.tiny_class, row.tiny).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(1, 60, 4000))
    return tmp_path / "model"


def quantized(model, name, **options):
    """SHA-256 of graphs, weights and recipe."""
    artifact = quantkit.quantize(
        str(model),
        output=model.parent / name,
        min_dim=1,
        calibration=model.parent / "ids.npy",
        calibration_windows=10,
        calibration_length=32,
        accuracy=False,
        latency=False,
        memory=False,
        **options,
    )
    return hashes(artifact.folder)


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.suffix in HASHED
    }


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        pytest.param({"scheme": "int4_block32", "fit": "gptq"}, (1, 2, 4), id="gptq"),
        pytest.param({"scheme": "int4_block32", "fit": "output"}, (2,), id="output", marks=pytest.mark.slow),
        pytest.param({"scheme": "int4_block32_zeros", "fit": "mse"}, (2,), id="mse", marks=pytest.mark.slow),
        pytest.param({"transforms": ["awq"], "fit": "gptq"}, (2,), id="awq", marks=pytest.mark.slow),
        pytest.param({"transforms": ["smoothquant"]}, (2,), id="smoothquant", marks=pytest.mark.slow),
        pytest.param(
            {"transforms": ["hadamard"], "unties_head": True, "fit": "gptq"},
            (2,),
            id="hadamard",
            marks=pytest.mark.slow,
        ),
        pytest.param({"scheme": "int8_static16", "target": "npu"}, (2,), id="npu", marks=pytest.mark.slow),
    ],
)
def test_the_artifact_does_not_depend_on_the_number_of_workers(model, options, numbers):
    alone = quantized(model, "alone", **options)
    assert any(name.endswith(".onnx") for name in alone)
    for number in numbers:
        assert quantized(model, f"by-{number}", workers=number, **options) == alone


@pytest.mark.slow
def test_the_artifact_of_a_mixture_of_experts_does_not_either(tmp_path, model):
    row = FAMILIES["mixtral"]
    build_tiny(row.tiny_class, row.tiny).save_pretrained(tmp_path / "mixture")
    alone = quantized(tmp_path / "mixture", "alone", scheme="int4_block32", fit="gptq")
    assert quantized(tmp_path / "mixture", "by-2", scheme="int4_block32", fit="gptq", workers=2) == alone


@pytest.mark.slow
def test_ray_writes_the_bytes_of_one_process(model):
    pytest.importorskip("ray", reason="pip install 'quantkit-onnx[ray]'")
    options = {"scheme": "int4_block32", "fit": "gptq"}
    assert quantized(model, "by-ray", engine="ray", workers=2, **options) == quantized(
        model, "alone", **options
    )


def test_flags_that_no_engine_takes_are_refused_before_any_work(model):
    for options, message in (
        ({"workers": 0}, "0 workers"),
        ({"engine": "slurm"}, "'slurm'"),
        ({"address": "auto"}, "runs on this machine"),
    ):
        with pytest.raises(InputError, match=message):
            quantized(model, "out", **options)
    assert not (model.parent / "out").exists()
