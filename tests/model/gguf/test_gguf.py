"""GGUF files mean the models that they were made from; what cannot be given exactly is refused by name."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from commands import quantkit, refused

from quantkit import quantize
from quantkit.errors import InputError
from quantkit.model.load import build_on_meta, open_source
from quantkit.model.reference import reference_logits
from quantkit.model.weights.open import open_tensors

gguf = pytest.importorskip("gguf")
import gguf_files  # noqa: E402 - needs gguf
from gguf_files import MODELS, TEXT, build, byte_tokenizer, file_of, metadata_of, tensors_of, write  # noqa: E402

IDS = np.random.default_rng(0).integers(3, 320, (2, 24))


def tensors(path):
    source = open_source(path)
    return open_tensors(source, build_on_meta(source))


def logits_of(model):
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.from_numpy(IDS)).logits.numpy()


def changed(tmp_path, metadata=None, added=None, tokenizer=None, **changes):
    """A Llama file with other metadata, further tensors or another tokenizer."""
    model = build("llama", **changes)
    entries = {**metadata_of("llama", model.config), **(metadata or {})}
    stored = {**tensors_of("llama", model), **(added or {})}
    entries = {key: value for key, value in entries.items() if value is not None}
    return write(tmp_path / "model.gguf", "llama", entries, stored, tokenizer=tokenizer), model


@pytest.mark.parametrize("architecture", MODELS)
def test_the_file_is_the_model_that_it_was_made_from(architecture, tmp_path):
    path, model = file_of(tmp_path / "model.gguf", architecture)
    read = tensors(path)
    for name, parameter in model.state_dict().items():
        meant = parameter.numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            meant = (meant + np.float32(1)) - np.float32(1)
        assert (read.read(name) == meant).all(), name
        assert (read.read(name, 5, 9) == meant[5:14]).all(), name
    made, meant = reference_logits(open_source(path))(IDS), logits_of(model)
    bound = 1e-5 if architecture.startswith("gemma") else 0.0  # the 1 in stored gains
    assert np.abs(made - meant).max() <= bound * np.abs(meant).max()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_types_are_dequantized(kind, tmp_path):
    path, model = file_of(tmp_path / "model.gguf", kind=kind)
    weight = model.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    stored = gguf.GGMLQuantizationType[kind]
    meant = gguf.dequantize(gguf.quantize(weight, stored), stored)
    assert (tensors(path).read("model.layers.1.mlp.down_proj.weight", 7, 20) == meant[7:27]).all()
    assert np.abs(meant - weight).max() > 0


def test_the_tokenizer_cuts_texts_as_the_original(tmp_path):
    path, _ = file_of(tmp_path / "model.gguf")
    from quantkit.runtime.tokenizer import open_text

    made, meant = open_text(open_source(path).folder), byte_tokenizer()
    text = f"{TEXT}</s> and  so on"
    assert made.encode(text) == meant.encode(text).ids
    assert made.decode(made.encode(TEXT)) == TEXT


def test_divisors_of_llama_3_become_its_rule(tmp_path):
    rule = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    changes = {"rope_theta": 500_000.0, "rope_scaling": rule}
    divisors = []
    for pair in range(8):  # as llama.cpp's converter computes them
        length = 2 * np.pi * 500_000.0 ** (pair / 8)
        smooth = (8192 / length - 1) / 3
        inside = 1 / ((1 - smooth) / 32 + smooth)
        divisors.append(1 if length < 2048 else 32 if length > 8192 else inside)
    added = {"rope_freqs.weight": np.array(divisors, np.float32)}
    path, model = changed(tmp_path, {"llama.rope.freq_base": 500_000.0}, added, **changes)
    assert (reference_logits(open_source(path))(IDS) == logits_of(model)).all()
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "rope_scaling": {**rule, "factor": 8.0}})
    )
    with pytest.raises(InputError, match=r"rope_freqs\.weight.*not the one of config\.json"):
        open_source(tmp_path / "model.gguf")


REFUSED = {
    "rope_freqs.weight": {"added": {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}},
    "llama.attention.causal": {"metadata": {"llama.attention.causal": False}},
    "blk.0.attn_q.bias": {"added": {"blk.0.attn_q.bias": np.ones(64, np.float32)}},
    "yarn": {"metadata": {"llama.rope.scaling.type": "yarn"}},
    "mixture of experts": {"metadata": {"llama.expert_count": 8}},
    "rope.dimension_count": {"metadata": {"llama.rope.dimension_count": 8}},
    "not one whole number": {"metadata": {"llama.attention.head_count": [4, 2]}},
    "it lacks block_count": {"metadata": {"llama.block_count": None}},
    "no tokenizer": {"tokenizer": {}},
    "rule 'tekken'": {"tokenizer": gguf_files.tokenizer_entries(byte_tokenizer(), "tekken")},
    "kind 'rwkv'": {"tokenizer": {"model": "rwkv"}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_exact_is_refused_by_name(reason, tmp_path):
    path, _ = changed(tmp_path, **REFUSED[reason])
    with pytest.raises(InputError) as caught:
        open_source(path)
    assert reason in str(caught.value)


def test_other_architectures_and_types_are_refused_by_name(tmp_path):
    path, _ = file_of(tmp_path / "model.gguf", kind="Q8_0")
    content = path.read_bytes()
    stated = b"general.architecture" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    path.write_bytes(content.replace(stated + b"llama", stated + b"mamba"))
    assert "architecture 'mamba'" in refused("inspect", str(path))
    name = b"blk.1.ffn_up.weight"
    place = content.rindex(name) + len(name) + 4 + 16  # after the dimensions
    path.write_bytes(content[:place] + (250).to_bytes(4, "little") + content[place + 4 :])
    assert "'blk.1.ffn_up.weight' is stored in type 250" in refused("quantize", str(path))


def test_a_config_beside_the_file_must_agree(tmp_path):
    path, model = file_of(tmp_path / "model.gguf")
    beside = tmp_path / "config.json"
    model.config.architectures = ["LlamaForCausalLM"]
    beside.write_text(model.config.to_json_string())
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert (reference_logits(open_source(tmp_path))(IDS) == logits_of(model)).all()
    config = json.loads(beside.read_text())
    beside.write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(InputError, match=r"rms_norm_eps = 0\.001, and the file says 1e-05"):
        open_source(path)
    beside.write_text(json.dumps({**config, "model_type": "phi3"}))
    with pytest.raises(InputError, match="model type 'phi3'"):
        open_source(path)


def test_a_folder_of_two_files_and_of_parts(tmp_path):
    path, model = file_of(tmp_path / "a.gguf")
    shutil.copyfile(path, tmp_path / "b.gguf")
    assert "holds 2 GGUF files" in refused("inspect", str(tmp_path))
    for old in (path, tmp_path / "b.gguf"):
        old.unlink()
    stored, entries = tensors_of("llama", model), metadata_of("llama", model.config)
    names = sorted(stored)
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = tmp_path / f"m-{number:05d}-of-00002.gguf"
        own = {**(entries if number == 1 else {}), "split.count": 2, "split.no": number - 1}
        write(file, "llama", own, {name: stored[name] for name in part})
    assert (reference_logits(open_source(tmp_path))(IDS) == logits_of(model)).all()
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    assert "00002-of-00002" in refused("inspect", str(tmp_path))


def test_cut_and_lying_files_are_refused(tmp_path):
    path, _ = file_of(tmp_path / "model.gguf", kind="Q8_0")
    content = path.read_bytes()
    end = content.rindex(b"output.weight")
    for size in (*range(0, 200, 7), *range(200, end, end // 40), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(InputError, match="GGUF"):
            open_source(path)
    lies = {
        "keys are announced": (8, (1 << 62).to_bytes(8, "little")),
        "version 3221225472": (4, (3 << 30).to_bytes(4, "little")),
        "bytes are announced": (24, (1 << 40).to_bytes(8, "little")),
    }
    for reason, (place, value) in lies.items():
        path.write_bytes(content[:place] + value + content[place + len(value) :])
        with pytest.raises(InputError, match=reason):
            open_source(path)
    names = {"is there twice": (b"blk.0.attn_k.weight", b"blk.0.attn_v.weight")}
    for reason, (old, new) in names.items():
        path.write_bytes(content.replace(old, new))
        with pytest.raises(InputError, match=reason):
            open_source(path)
    first = b"blk.0.ffn_up.weight"
    place = content.index(first) + len(first) + 4 + 16 + 4
    for offset, reason in ((0, "share bytes"), (1 << 40, "ends after byte")):
        path.write_bytes(content[:place] + offset.to_bytes(8, "little") + content[place + 8 :])
        with pytest.raises(InputError, match=reason):
            open_source(path)


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_0", "int4_block32"), ("Q8_0", "int8_block32")])
def test_codes_that_lie_on_a_grid_are_kept(kind, scheme, tmp_path):
    path, _ = file_of(tmp_path / "tiny.gguf", kind=kind)
    options = {"latency": False, "memory": False, "accuracy": False, "min_dim": 1, "transforms": []}
    options |= {"scheme": scheme} if kind == "Q8_0" else {}
    artifact = quantize(path, output=tmp_path / "out", **options)
    assert artifact.report.scheme == scheme
    body = [loss for loss in artifact.report.layer_losses if ".layers." in loss.name]
    assert {loss.weight_error for loss in body} == {0.0}
    assert "quantized products keep the codes" in " ".join(artifact.report.notes)


def test_a_file_goes_through_the_command_line(tmp_path):
    path, _ = file_of(tmp_path / "tiny.Q8_0.gguf", kind="Q8_0")
    out = tmp_path / "out"
    recipe = tmp_path / "quick.yaml"
    recipe.write_text("{transforms: [], measure: {latency: false, memory: false, max_tokens: 200}}")
    ran = quantkit("quantize", str(path), "-o", str(out), "--min-dim", "1", "--recipe", str(recipe))
    assert ran.returncode == 0, ran
    report = json.loads((out / "report.json").read_text())
    assert any("GGUF file (llama; Q8_0 99" in note and "dequantized" in note for note in report["notes"])
    assert report["float_error"]["largest_error"] < 1e-4
    ran = quantkit("eval", str(out), "--max-tokens", "200", "--reference", str(path), "--json")
    assert ran.returncode == 0, ran
    assert json.loads(ran.stdout)["accuracy"]["kl_divergence"] == report["accuracy"]["kl_divergence"]
