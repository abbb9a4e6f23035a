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
from quantkit.quantization.calibration.quick import quick_peaks

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


@pytest.mark.parametrize("tiny_class", SIZES)
def test_peaks_are_those_of_the_whole_model(tiny_class, tmp_path):
    model, source, model_map, weights = opened(tmp_path, tiny_class)
    seen = {}

    def watch(name):
        def hook(_, args):
            seen[name] = args[0].abs().reshape(-1, args[0].shape[-1]).amax(0).numpy()

        return hook

    matrices = {layer.matrix for layer in model_map.layers}
    for name, child in model.named_modules():
        if name in matrices:
            child.register_forward_pre_hook(watch(name))
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(IDS))
    streamed = torch_model(source, model_map, weights, streams=True)
    peaks = quick_peaks(streamed, model_map, IDS, matrices)
    assert set(peaks) == matrices, "the head's input is seen too"
    for name, peak_I in peaks.items():
        np.testing.assert_allclose(peak_I, seen[name], rtol=1e-5, atol=1e-6)


def test_a_streamed_model_holds_one_block_at_a_time(tmp_path):
    _, source, model_map, weights = opened(tmp_path, "LlamaForCausalLM")
    module = torch_model(source, model_map, weights, streams=True)
    at_once = []

    def count(*_):
        at_once.append(sum(any(not p.is_meta for p in layer.parameters()) for layer in module.model.layers))

    for layer in module.model.layers:
        layer.mlp.register_forward_hook(count)
    quick_peaks(module, model_map, IDS, {"model.layers.0.mlp.up_proj"})
    assert at_once == [1, 1, 1]
    assert all(p.is_meta for layer in module.model.layers for p in layer.parameters())
    assert module.lm_head.weight.is_meta, "a head that shares no table is never read"


def test_what_is_not_finite_is_named(tmp_path):
    _, source, model_map, weights = opened(tmp_path, "GPT2LMHeadModel")
    module = torch_model(source, model_map, weights)
    module.transformer.h[1].ln_2.weight.data[3] = float("inf")
    with pytest.raises(InputError, match=r"transformer\.h\.1\.mlp\.c_fc"):
        quick_peaks(module, model_map, IDS, {"transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"})
