"""A changed model is exported like any other: the float graph of a rotated one is the original model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exporting import NOTHING, build_tiny, error, write_model

from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.pipeline.stages.export import write_companions
from quantkit.plan.select import choose
from quantkit.quantization.transforms import TRANSFORMS
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.runtime.decoder import open_decoder

IDS = np.random.default_rng(0).integers(1, 60, (2, 20))
CHAINS = {
    "rotated": ("hadamard", "head_hadamard"),
    "permuted": ("permutation",),
    "folded": ("fold",),
}
ROTATABLE = ("gpt2", "opt", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3")


@pytest.mark.parametrize(
    ("family", "chain"),
    [(family, "rotated") for family in ROTATABLE]
    + [(family, "permuted") for family in ("gpt2", "gpt_neox", "gemma2", "phi3")]
    + [(family, "folded") for family in ("gpt2", "gemma3", "opt")],
)
def test_the_float_graph_of_a_changed_model_is_the_model(family, chain, tmp_path):
    row = FAMILIES[family]
    model = build_tiny(row.tiny_class, dict(row.tiny))
    model.save_pretrained(tmp_path / "model")
    source = open_source(str(tmp_path / "model"))
    model_map = inspect_source(source)
    tensors = open_weights(source, model_map, random_weights=False)
    for name in CHAINS[chain]:
        model_map, tensors = TRANSFORMS[name].apply(model_map, tensors, TransformSettings(unties_head=True))
    out = tmp_path / "out"
    out.mkdir()
    plan = choose(model_map, min_dim=NOTHING)
    write_model(model_map, plan, tensors, out, scheme="int8_block32")
    write_companions(source, model_map, out)
    made = open_decoder(out, threads=1).logits(IDS)
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(IDS), use_cache=False).logits.numpy()
    assert error(made, wanted).relative < 1e-4
    assert error(made, wanted).absolute < 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_rotated_model_is_quantized_as_planned(family, tmp_path):
    row = FAMILIES[family]
    model = build_tiny(row.tiny_class, dict(row.tiny))
    model.save_pretrained(tmp_path / "model")
    source = open_source(str(tmp_path / "model"))
    model_map = inspect_source(source)
    tensors = open_weights(source, model_map, random_weights=False)
    model_map, tensors = TRANSFORMS["hadamard"].apply(model_map, tensors, TransformSettings(unties_head=True))
    out = tmp_path / "out"
    out.mkdir()
    plan = choose(model_map, min_dim=1)
    exported = write_model(model_map, plan, tensors, out, scheme="int8_block32")
    assert set(exported.placement.projections) == {layer.name for layer in model_map.layers}
    write_companions(source, model_map, out)
    made = open_decoder(out, threads=1).logits(IDS)
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(IDS), use_cache=False).logits.numpy()
    assert 1e-4 < error(made, wanted).relative < 0.1, "the quantization shows, and is small"
