"""Rotary frequencies against transformers: its rules one by one, and what its own modules hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from exporting import NOTHING, error, export
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantkit.errors import InputError
from quantkit.export.rotary import RULES, rotation_of
from quantkit.model.inspect import map_module
from quantkit.model.model_map import Attention, PositionKind
from quantkit.runtime.decoder import open_decoder, start

HEAD_DIM, POSITIONS, ORIGINAL = 64, 4096, 512
RANDOM = np.random.default_rng(0)
SHORT = [float(each) for each in RANDOM.uniform(1, 2, HEAD_DIM // 2)]
LONG = [float(each) for each in RANDOM.uniform(2, 40, HEAD_DIM // 2)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3 of Llama 3.2": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 2048},
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, past the last pair": {**YARN, "beta_slow": 1e-6},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "longrope, attention factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.1,
    },
}
THETAS = (10000.0, 500000.0)


def config_of(scaling, theta):
    """Phi-3, which brought LongRoPE, spells it in three fields and one beside them; Llama has the rest."""
    scaling = dict(scaling) if scaling else None
    sizes = {
        "vocab_size": 31,
        "hidden_size": 2 * HEAD_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": POSITIONS,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    if not scaling or scaling["rope_type"] != "longrope":
        return transformers.LlamaConfig(**sizes)
    sizes["original_max_position_embeddings"] = ORIGINAL
    if len(scaling) > 3:
        return transformers.LlamaConfig(**sizes)
    scaling["type"] = scaling.pop("rope_type")
    return transformers.Phi3Config(**sizes, pad_token_id=0)


def model_of(config):
    model_class = {"phi3": transformers.Phi3ForCausalLM, "llama": transformers.LlamaForCausalLM}[
        config.model_type
    ]
    return model_class(config)


def attention_of(scaling, theta=10000.0):
    pairs = tuple(sorted(scaling.items())) if scaling else ()
    return Attention(
        num_heads=2,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        position=PositionKind.ROPE,
        rope_theta=theta,
        rotary_dim=HEAD_DIM,
        rope_scaling=pairs,
    )


def agree(made, frequencies, factor):
    wanted = frequencies.double().numpy()
    difference = np.abs(made.frequencies - wanted)
    assert made.frequencies.shape == wanted.shape == (HEAD_DIM // 2,)
    assert made.frequencies.dtype == np.float32
    assert (difference / wanted).max() < 1e-6
    assert difference.max() < 1e-6
    assert made.factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("name", SCALINGS)
def test_each_rule_is_that_of_transformers(name, theta):
    scaling = SCALINGS[name]
    kind = scaling["rope_type"] if scaling else "default"
    if kind not in ROPE_INIT_FUNCTIONS:
        pytest.skip(f"transformers {transformers.__version__} keeps the rule '{kind}' in its modules")
    wanted = ROPE_INIT_FUNCTIONS[kind](config_of(scaling, theta), "cpu")
    attention = attention_of(scaling, theta)
    if kind == "longrope":  # Phi-3 says it beside the rule and not in it
        attention = attention_of({**scaling, "original_max_position_embeddings": ORIGINAL}, theta)
    agree(rotation_of(attention, max_positions=POSITIONS), *wanted)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("name", SCALINGS)
def test_from_a_config_to_what_its_module_holds(name, theta):
    model = model_of(config_of(SCALINGS[name], theta))
    model_map = map_module(model, name=name)
    made = rotation_of(model_map.blocks[0].attentions[0], max_positions=model_map.max_positions)
    rotary = model.model.rotary_emb
    agree(made, rotary.inv_freq, rotary.attention_scaling)
    assert made.max_positions == (ORIGINAL if "longrope" in name else None)


def test_partly_rotated_heads():
    config = transformers.GPTNeoXConfig(
        vocab_size=31,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        rotary_pct=0.25,
        rotary_emb_base=5000,
    )
    model = transformers.GPTNeoXForCausalLM(config)
    attention = map_module(model, name="partly").blocks[0].attentions[0]
    made = rotation_of(attention, max_positions=2048)
    wanted = model.gpt_neox.rotary_emb.inv_freq.numpy()
    assert made.frequencies.shape == wanted.shape == (8,)
    assert (np.abs(made.frequencies - wanted) / wanted).max() < 1e-6


@pytest.mark.parametrize("position", [0, 1, 37, POSITIONS - 1])
def test_cosines_and_sines_are_those_of_the_module(position):
    """The angles themselves, at the far end of the context too."""
    model = model_of(config_of(SCALINGS["yarn"], 10000.0))
    attention = map_module(model, name="yarn").blocks[0].attentions[0]
    made = rotation_of(attention, max_positions=POSITIONS)
    cosines, sines = model.model.rotary_emb(torch.zeros(1), torch.tensor([[position]]))
    angles = np.float32(position) * made.frequencies
    half = HEAD_DIM // 2
    # Float32 frequencies that differ by an ulp turn by 4096 ulps at the end of the context.
    assert np.abs(np.cos(angles) * made.factor - cosines[0, 0, :half].numpy()).max() < 1e-3
    assert np.abs(np.sin(angles) * made.factor - sines[0, 0, :half].numpy()).max() < 1e-3


def test_only_longrope_ends_before_the_model_does():
    assert rotation_of(attention_of(YARN), max_positions=POSITIONS).max_positions is None
    scaling = {**SCALINGS["longrope"], "original_max_position_embeddings": ORIGINAL}
    assert rotation_of(attention_of(scaling), max_positions=POSITIONS).max_positions == ORIGINAL


def test_a_longrope_model_runs_as_far_as_its_table(tmp_path):
    torch.manual_seed(0)
    model = model_of(config_of(SCALINGS["longrope"], 10000.0)).eval()
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    decoder = open_decoder(tmp_path / "out", threads=1)
    ids = np.random.default_rng(0).integers(0, 31, (1, ORIGINAL))
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
    assert error(decoder.logits(ids), wanted).relative < 1e-4
    assert decoder.context == ORIGINAL
    with pytest.raises(InputError, match=f"up to {ORIGINAL} tokens"):
        start(decoder, batch=1, capacity=ORIGINAL + 1)
    settings = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert settings["model"]["context_length"] == ORIGINAL


@pytest.mark.once
def test_a_rule_that_changes_with_the_length_is_refused():
    with pytest.raises(InputError) as caught:
        rotation_of(attention_of({"rope_type": "dynamic", "factor": 2.0}), max_positions=POSITIONS)
    assert "'dynamic'" in str(caught.value)
    assert all(kind in str(caught.value) for kind in RULES)
