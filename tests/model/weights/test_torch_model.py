"""Models rebuilt from tensors: the real modules with other weights."""

from __future__ import annotations

import pytest
import torch
from doubles import logits_of, make_subject, subject
from exporting import error

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.weights.torch_model import torch_model
from quantkit.quantization.transforms import TRANSFORMS
from quantkit.quantization.transforms.settings import TransformSettings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_is_what_was_asked_for(dtype, tmp_path):
    given = subject("gemma3", 0, tmp_path)
    module = torch_model(given.source, given.map, given.tensors, dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert not [name for name, each in module.named_parameters() if each.device.type == "meta"]
    assert not [name for name, each in module.named_buffers() if each.device.type == "meta"]
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not module.training


def test_half_precision_checkpoints_are_rebuilt_in_full(tmp_path):
    row = FAMILIES["gemma2"]
    given = make_subject(row.tiny_class, dict(row.tiny), tmp_path, torch.bfloat16)
    assert "bfloat16" in str(given.source.config.get("dtype", given.source.config.get("torch_dtype")))
    module = torch_model(given.source, given.map, given.tensors, torch.float64)
    assert error(logits_of(module), given.logits).relative < 1e-12


def test_a_cap_on_attention_is_kept(tmp_path):
    row = FAMILIES["gemma2"]
    given = make_subject(row.tiny_class, {**row.tiny, "attn_logit_softcapping": 0.2}, tmp_path / "capped")
    made = logits_of(torch_model(given.source, given.map, given.tensors, torch.float64))
    assert error(made, given.logits).relative < 1e-12
    without = make_subject(row.tiny_class, {**row.tiny, "attn_logit_softcapping": None}, tmp_path / "free")
    assert error(without.logits, given.logits).relative > 1e-3


def test_shared_parameters_are_shared(tmp_path):
    for family, first, second in (
        ("gpt2", "transformer.wte", "lm_head"),
        ("t5", "shared", "lm_head"),
        ("bert", "bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    ):
        given = subject(family, 0, tmp_path / family)
        module = torch_model(given.source, given.map, given.tensors)
        assert module.get_submodule(first).weight is module.get_submodule(second).weight
        model_map, tensors = TRANSFORMS["hadamard" if family != "bert" else "fold"].apply(
            given.map, given.tensors, TransformSettings(unties_head=True)
        )
        module = torch_model(given.source, model_map, tensors)
        assert module.get_submodule(first).weight is not module.get_submodule(second).weight


def test_a_missing_tensor_is_named(tmp_path):
    given = subject("gpt2", 0, tmp_path / "model")

    class Lacking:
        def __getattr__(self, name):
            return getattr(given.tensors, name)

        def has(self, name):
            return "c_fc" not in name and given.tensors.has(name)

    with pytest.raises(InputError, match=r"h\.0\.mlp\.c_fc"):
        torch_model(given.source, given.map, Lacking())


def test_building_leaves_torch_as_it_was(tmp_path):
    given = subject("gpt2", 0, tmp_path / "model")
    before = torch.nn.Module.register_parameter
    torch_model(given.source, given.map, given.tensors)
    assert torch.nn.Module.register_parameter is before
    assert torch.get_default_dtype() is torch.float32
