"""Faults that config, tokenizer files and disks show are refused before any weight is read."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from exporting import build_tiny
from safetensors.torch import load_file, save_file

from quantkit import quantize
from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.weights.tensors import CheckpointTensors
from quantkit.pipeline.stages import resolve

DEMO = Path(str(resources.files("quantkit") / "assets" / "demo"))
Disk = namedtuple("Disk", "total used free")
TINY = {**FAMILIES["llama"].tiny, "vocab_size": 4096}


@pytest.fixture
def folder(tmp_path) -> Path:
    build_tiny("LlamaForCausalLM", TINY).save_pretrained(tmp_path / "model")
    shutil.copyfile(DEMO / "tokenizer.json", tmp_path / "model" / "tokenizer.json")
    return tmp_path / "model"


def refused(folder, monkeypatch, **options) -> str:
    def no_read(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(CheckpointTensors, "read", no_read)
    with pytest.raises(InputError) as caught:
        quantize(folder, output=folder.parent / "out", min_dim=1, **options)
    assert not (folder.parent / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_sound_model_passes(folder):
    quantize(folder, output=folder.parent / "out", min_dim=1, accuracy=False, latency=False, memory=False)


@pytest.mark.parametrize("content", ["{garbage", "", '{"version": "1.0", "model": {"type": "No"}}'])
def test_a_broken_tokenizer(content, folder, monkeypatch):
    (folder / "tokenizer.json").write_text(content)
    assert "not a tokenizer" in refused(folder, monkeypatch)


def test_a_tokenizer_of_a_larger_model(folder, monkeypatch):
    path = folder / "model.safetensors"
    tensors = {
        name: tensor[:4000].clone() if tensor.shape[0] == 4096 else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    change(folder, vocab_size=4000)
    assert "4096 tokens, and the model 4000 embeddings" in refused(folder, monkeypatch)


def test_an_added_token_without_an_embedding_is_no_fault(folder):
    """As published Gemma 3 has one."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    image = {**tokenizer["added_tokens"][0], "id": 4096, "content": "<image>"}
    path.write_text(json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], image]}))
    test_a_sound_model_passes(folder)


def test_an_architecture_that_nothing_exports(folder, monkeypatch):
    shape = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 16}
    config = {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "vocab_size": 4096, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    build_tiny("RwkvForCausalLM", {"vocab_size": 4096, **shape}).save_pretrained(folder)
    message = refused(folder, monkeypatch)
    assert "RwkvForCausalLM" in message
    assert "llama" in message or "optimum-onnx, beside" in message


@pytest.mark.parametrize("place", ["out", "cache"])
def test_a_disk_without_space(place, folder, monkeypatch):
    cache = folder.parent / "cache"
    cache.mkdir()
    monkeypatch.setenv("QUANTKIT_CACHE", str(cache))
    full = folder.parent if place == "out" else cache

    def usage(path):
        return Disk(10**12, 0, 1000 if Path(path) == full else 10**12)

    monkeypatch.setattr("quantkit.runtime.machine.disk.shutil.disk_usage", usage)
    message = refused(folder, monkeypatch, fit="gptq")
    assert str(full) in message
    assert "MB are free" in message
    assert ("-o" if place == "out" else "--statistics") in message


def test_weights_of_another_quantizer(folder, monkeypatch):
    change(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "packed by gptq, and no tensor is" in refused(folder, monkeypatch)


def test_a_missing_tensor(folder, monkeypatch):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert "lacks 1 tensors: model.layers.0.mlp.up_proj.weight" in refused(folder, monkeypatch)


def test_an_adapter_and_a_gguf_file(folder, monkeypatch):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    assert "merge_and_unload" in refused(folder, monkeypatch)
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").rename(folder / "model.Q4_1.gguf")
    assert "GGUF" in refused(folder, monkeypatch)
    (folder / "model.Q4_1.gguf").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "pickle" in refused(folder, monkeypatch)


def test_shared_weights_on_a_processor_without_vnni(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    build_tiny("AlbertModel", {**FAMILIES["albert"].tiny, "vocab_size": 4096}).save_pretrained(folder)
    shutil.copyfile(DEMO / "tokenizer.json", folder / "tokenizer.json")
    features = {"AVX2": True, "AVX512_VNNI": False, "AVX_VNNI": False}
    old = replace(resolve.read_cpu(), features=features)
    monkeypatch.setattr(resolve, "read_cpu", lambda: old)
    assert "--target cpu-avx2" in refused(folder, monkeypatch, scheme="int8_token")
    new = replace(old, features={**features, "AVX_VNNI": True})
    monkeypatch.setattr(resolve, "read_cpu", lambda: new)
    with pytest.raises(AssertionError, match="a weight was read"):
        refused(folder, monkeypatch, scheme="int8_token")
