"""A config written by transformers 4.57 and one written by 5.x are the same facts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from quantkit.errors import InputError
from quantkit.model.config import spelled_for
from quantkit.model.inspect import inspect

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
}
LONGROPE = {"short_factor": [1.5] * 4, "long_factor": [3.0] * 4}
PAIRS = {
    "gemma3_text": (
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 5e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ),
    "llama": (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
    ),
    "gpt_neox": (
        {"rotary_emb_base": 20000, "rotary_pct": 0.5},
        {"rope_parameters": {"rope_theta": 20000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}},
    ),
    "phi3": (
        {
            "rope_scaling": {"type": "longrope", **LONGROPE},
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 40,
        },
        {
            "rope_parameters": {
                **LONGROPE,
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            },
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 40,
        },
    ),
    "qwen3": ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}


def write(folder, model_type: str, facts: dict) -> str:
    sizes = {**SIZES, **(LAYER_TYPES if model_type == "gemma3_text" else {})}
    if model_type in ("gpt_neox", "phi3"):
        sizes = {
            name: value
            for name, value in sizes.items()
            if name not in ("head_dim", "num_key_value_heads", "sliding_window")
        }
        sizes |= {"pad_token_id": 0}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **facts}))
    return str(folder)


@pytest.mark.parametrize("model_type", PAIRS)
def test_both_spellings_give_the_same_map(tmp_path, model_type):
    old, new = PAIRS[model_type]
    maps = [inspect(write(tmp_path / name, model_type, facts)) for name, facts in (("a", old), ("b", new))]
    assert dataclasses.replace(maps[0], name="") == dataclasses.replace(maps[1], name="")
    attention = [block.attentions[0] for block in maps[0].blocks]
    if model_type == "gemma3_text":
        assert [a.rope_theta for a in attention] == [5e3, 1e6]
        assert [a.window for a in attention] == [8, None]
    if model_type == "gpt_neox":
        assert attention[0].rope_theta == 20000
        assert attention[0].rotary_dim == 4


def test_dtype_is_the_same_fact():
    assert spelled_for({"dtype": "float16"}, 4) == {"torch_dtype": "float16"}
    assert spelled_for({"dtype": "float16"}, 5) == {"dtype": "float16"}


MODERNBERT = {
    "model_type": "modernbert",
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    },
}


def test_modernbert_of_transformers_5_under_4():
    spelled = spelled_for(MODERNBERT, 4)
    assert spelled["global_attn_every_n_layers"] == 2
    assert (spelled["global_rope_theta"], spelled["local_rope_theta"]) == (500.0, 7.0)
    assert not spelled.get("rope_scaling")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "every n-th layer"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
                }
            },
            "one scaling",
        ),
    ],
)
def test_what_transformers_4_cannot_compute_of_modernbert_is_refused(changes, reason):
    with pytest.raises(InputError, match=reason):
        spelled_for({**MODERNBERT, **changes}, 4)
