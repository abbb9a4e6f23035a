"""Packed checkpoints mean the values that their codes were rounded to, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed import FORMS, checkpoints
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.model.inspect import inspect, inspect_source
from quantkit.model.load import open_source
from quantkit.model.reference import reference_logits
from quantkit.model.weights.open import open_weights, with_weights


def weights_of(folder):
    source = with_weights(open_source(folder), random_weights=False)
    return open_weights(source, inspect_source(source), random_weights=False)


@pytest.mark.parametrize("form", FORMS)
def test_codes_mean_their_values(form, tmp_path):
    packed, plain = checkpoints(tmp_path, form)
    read, meant = weights_of(packed), load_file(plain / "model.safetensors")
    for name, tensor in meant.items():
        assert (read.read(name) == tensor.numpy()).all(), name
        if tensor.dim() == 2:
            assert (read.read(name, 13, 7) == tensor[13:20].numpy()).all(), name
    notes = inspect(packed).notes
    assert any("the original is quantized" in note and "dequantized" in note for note in notes)
    assert not any("missing" in note or "not used" in note for note in notes)
    assert read.source_bytes() < 0.6 * sum(4 * tensor.numel() for tensor in meant.values())


@pytest.mark.parametrize("form", ["gptq zeros", "awq", "nf4 nested"])
def test_the_reference_is_the_dequantized_model(form, tmp_path):
    packed, plain = checkpoints(tmp_path, form)
    ids = torch.randint(0, 320, (2, 20))
    with torch.inference_mode():
        model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
        logits = model.eval()(ids).logits
    assert (reference_logits(open_source(packed))(ids.numpy()) == logits.numpy()).all()


UP = "model.layers.1.mlp.up_proj"
DAMAGE = {
    "gptq": {
        f"{UP}.scales": torch.ones(3, 96, dtype=torch.float16),
        f"{UP}.qzeros": torch.zeros(2, 11, dtype=torch.int32),
        f"{UP}.g_idx": torch.zeros(63, dtype=torch.int32),
        f"{UP}.qweight": torch.zeros(8, dtype=torch.int32),
    },
    "awq": {f"{UP}.qzeros": torch.zeros(2, 96, dtype=torch.int32), f"{UP}.scales": torch.ones(2, 96).int()},
    "compressed": {
        f"{UP}.weight_shape": torch.tensor([-96, 64]),
        f"{UP}.weight_scale": torch.ones(96, 3, dtype=torch.float16),
        f"{UP}.weight_packed": torch.zeros(96, 8),
    },
    "nf4": {
        f"{UP}.weight.absmax": torch.ones(3),
        f"{UP}.weight.quant_state.bitsandbytes__nf4": torch.tensor([123, 125], dtype=torch.uint8),
        f"{UP}.weight": torch.zeros(7, 1, dtype=torch.uint8),
    },
    "bitsandbytes 8 bits": {f"{UP}.SCB": torch.ones(5)},
}


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, parts in DAMAGE.items() for name in parts])
def test_parts_that_do_not_fit_are_refused(form, name, tmp_path):
    packed, _ = checkpoints(tmp_path, form)
    tensors = load_file(packed / "model.safetensors")
    assert name in tensors
    for changed in (DAMAGE[form][name], None):
        tensors.pop(name, None)
        save_file({**tensors, **({} if changed is None else {name: changed})}, packed / "model.safetensors")
        if changed is None and name.endswith(("g_idx", "qweight", "weight_packed", "weight")):
            continue  # groups in order, or a tensor that is missing
        with pytest.raises(InputError, match=r"do not fit|without a state|is stored as"):
            weights_of(packed)


def test_groups_out_of_range_are_refused(tmp_path):
    packed, _ = checkpoints(tmp_path, "gptq act-order")
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{UP}.g_idx"] = torch.full((64,), 2, dtype=torch.int32)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(InputError, match="names groups that are none of 2"):
        weights_of(packed).read(f"{UP}.weight")


def test_large_values_stay_exact(tmp_path):
    """Kernels multiply in half precision, where 11 x 0.3333 is rounded."""
    packed, plain = checkpoints(tmp_path, "gptq")
    meant = load_file(plain / "model.safetensors")[f"{UP}.weight"]
    assert (meant != meant.half().float()).any()
    assert np.array_equal(weights_of(packed).read(f"{UP}.weight"), meant.numpy())
