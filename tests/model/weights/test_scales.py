"""Checkpoints stored in FP8 or INT8 mean the products of values and scales, as torch computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scaled import FORMS, change, checkpoints
from transformers import LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.model.inspect import inspect, inspect_source
from quantkit.model.load import open_source
from quantkit.model.reference import reference_logits
from quantkit.model.weights.open import open_weights, with_weights


def weights_of(folder: Path):
    source = with_weights(open_source(folder), random_weights=False)
    return open_weights(source, inspect_source(source), random_weights=False)


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_applied(form, tmp_path):
    scaled, plain = checkpoints(tmp_path, form)
    read, meant = weights_of(scaled), load_file(plain / "model.safetensors")
    for name, tensor in meant.items():
        assert (read.read(name) == tensor.numpy()).all(), name
        if tensor.dim() == 2:
            assert (read.read(name, 13, 7) == tensor[13:20].numpy()).all(), name
    notes = inspect(scaled).notes
    assert any("the original is quantized" in note and "dequantized" in note for note in notes)
    assert not any("missing" in note or "not used" in note for note in notes)


@pytest.mark.parametrize("form", ["deepseek and qwen", "compressed channel"])
def test_the_reference_is_the_dequantized_model(form, tmp_path):
    scaled, plain = checkpoints(tmp_path, form)
    ids = torch.randint(0, 61, (2, 20))
    with torch.inference_mode():
        model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
        logits = model.eval()(ids).logits
    assert (reference_logits(open_source(scaled))(ids.numpy()) == logits.numpy()).all()


REFUSED = {
    "bitsandbytes 4 bits of the type af4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "af4",
    },
    "gptq 3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 128},
    "format marlin": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "(dynamic)": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down.*": {}}},
    "layout gemv": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "pack-quantized": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 3, "group_size": 32}}},
    },
    "nvfp4-pack-quantized": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "transform_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
    },
    **{name: {"quant_method": name} for name in ("aqlm", "hqq", "quanto", "torchao", "quark", "of-2031")},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_are_refused_by_name(name, tmp_path):
    _, plain = checkpoints(tmp_path, "mistral")
    change(plain, quantization_config=REFUSED[name])
    (plain / "README.md").write_text("---\nlicense: mit\nbase_model:\n- maker/the-original\n---\n")
    with pytest.raises(InputError) as caught:
        with_weights(open_source(plain), random_weights=False)
    assert name in str(caught.value)
    assert "maker/the-original" in str(caught.value)
    assert any(name in note for note in inspect(plain).notes)  # its structure is known all the same


def test_scales_that_do_not_fit_are_refused(tmp_path):
    scaled, _ = checkpoints(tmp_path, "deepseek and qwen")
    change(scaled, quantization_config={"quant_method": "fp8", "weight_block_size": [24, 16]})
    with pytest.raises(InputError, match="does not fit"):
        weights_of(scaled)
    change(scaled, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    tensors = load_file(scaled / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, scaled / "model.safetensors")
    with pytest.raises(InputError, match=r"up_proj\.weight' is stored as F8_E4M3 with no scale"):
        weights_of(scaled)


def test_a_zero_point_is_refused(tmp_path):
    scaled, _ = checkpoints(tmp_path, "compressed int8 groups")
    tensors = load_file(scaled / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_zero_point"] = torch.zeros(72, 5, dtype=torch.int8)
    save_file(tensors, scaled / "model.safetensors")
    with pytest.raises(InputError, match="zero point"):
        weights_of(scaled)
