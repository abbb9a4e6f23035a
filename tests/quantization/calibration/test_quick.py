"""Peaks of one pass through a model that holds a block at a time, against the whole model's own hooks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exporting import build_tiny

from quantkit.errors import InputError
from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.model.weights.torch_model import torch_model
from quantkit.quantization.calibration.quick import quick_magnitudes

IDS = np.random.default_rng(0).integers(0, 61, (2, 20))
SIZES = {
    "GPT2LMHeadModel": {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40},
    "LlamaForCausalLM": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 40,
    },
}


def opened(tmp_path, tiny_class):
    model = build_tiny(tiny_class, SIZES[tiny_class])
    model.save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    model_map = inspect_source(source)
    return model, source, model_map, open_weights(source, model_map, random_weights=False)


@pytest.mark.parametrize("takes_means", [True, False], ids=["means", "peaks"])
@pytest.mark.parametrize("tiny_class", SIZES)
def test_magnitudes_are_those_of_the_whole_model(tiny_class, takes_means, tmp_path):
    model, source, model_map, weights = opened(tmp_path, tiny_class)
    seen = {}

    def watch(name):
        def hook(_, args):
            x_TI = np.abs(args[0].numpy().reshape(-1, args[0].shape[-1]))
            seen[name] = x_TI.mean(axis=0) if takes_means else x_TI.max(axis=0)

        return hook

    matrices = {layer.matrix for layer in model_map.layers}
    for name, child in model.named_modules():
        if name in matrices:
            child.register_forward_pre_hook(watch(name))
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(IDS))
    streamed = torch_model(source, model_map, weights, streams=True)
    magnitudes = quick_magnitudes(streamed, model_map, IDS, matrices, takes_means=takes_means)
    assert set(magnitudes) == matrices, "the head's input is seen too"
    for name, value_I in magnitudes.items():
        np.testing.assert_allclose(value_I, seen[name], rtol=1e-5, atol=1e-6)


def test_a_streamed_model_holds_one_block_at_a_time(tmp_path):
    _, source, model_map, weights = opened(tmp_path, "LlamaForCausalLM")
    module = torch_model(source, model_map, weights, streams=True)
    at_once = []

    def count(*_):
        at_once.append(sum(any(not p.is_meta for p in layer.parameters()) for layer in module.model.layers))

    for layer in module.model.layers:
        layer.mlp.register_forward_hook(count)
    quick_magnitudes(module, model_map, IDS, {"model.layers.0.mlp.up_proj"}, takes_means=True)
    assert at_once == [1, 1, 1]
    assert all(p.is_meta for layer in module.model.layers for p in layer.parameters())
    assert module.lm_head.weight.is_meta, "a head that shares no table is never read"


def test_what_is_not_finite_is_named(tmp_path):
    _, source, model_map, weights = opened(tmp_path, "GPT2LMHeadModel")
    module = torch_model(source, model_map, weights)
    module.transformer.h[1].ln_2.weight.data[3] = float("inf")
    with pytest.raises(InputError, match=r"transformer\.h\.1\.mlp\.c_fc"):
        matrices = {"transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"}
        quick_magnitudes(module, model_map, IDS, matrices, takes_means=True)
