"""The built-in configs: each is checked against figures published for its model, not against itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from quantkit.model.load import ALIASES, known_config, known_names

# Parameters as published with the weights, a tied table counted once: each model's card or safetensors
# header. Three encoders are derived from their papers' dimensions, since their files also hold a pooler:
#   BERT     30522*768 + 512*768 + 2*768 + 2*768 + 12*7087872 + (768*768+768) + 2*768 + 30522
#   RoBERTa  50265*768 + 514*768 + 1*768 + 2*768 + 12*7087872 + (768*768+768) + 2*768 + 50265
#   ALBERT   30000*128 + 512*128 + 2*128 + 2*128 + (128*768+768) + 1*7087872 + (768*128+128) + 2*128 + 30000
# where 7087872 is one block: 4*(768*768+768) + (768*3072+3072) + (3072*768+768) + 4*768. The published
# BERT file holds 110106428: a pooler of 768*768+768 and a next-sentence head of 2*768+2 more than here.
PUBLISHED_NUM_PARAMETERS = {
    "albert-base-v2": 11_221_680,
    "bert-base-uncased": 109_514_298,
    "distilbert-base-uncased": 66_985_530,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "opt-125m": 125_239_296,
    "phi-3-mini": 3_821_079_552,
    "pythia-160m": 162_322_944,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "roberta-base": 124_697_433,
    "t5-small": 60_506_624,
}

# What a parameter count cannot see, as published with each model:
# (query heads, key/value heads, head_dim, positions the config states).
PUBLISHED_HEADS = {
    "albert-base-v2": (12, 12, 64, 512),
    "bert-base-uncased": (12, 12, 64, 512),
    "distilbert-base-uncased": (12, 12, 64, 512),
    "gemma-2-2b": (8, 4, 256, 8192),
    "gemma-2b": (8, 1, 256, 8192),
    "gemma-3-1b": (4, 1, 256, 32768),
    "gemma-3-270m": (4, 1, 256, 32768),
    "gpt2": (12, 12, 64, 1024),
    "gpt2-large": (20, 20, 64, 1024),
    "gpt2-medium": (16, 16, 64, 1024),
    "gpt2-xl": (25, 25, 64, 1024),
    "llama-2-70b": (64, 8, 128, 4096),
    "llama-2-7b": (32, 32, 128, 4096),
    "llama-3.2-1b": (32, 8, 64, 131072),
    "mistral-7b": (32, 8, 128, 32768),
    "opt-125m": (12, 12, 64, 2048),
    "phi-3-mini": (32, 32, 96, 4096),
    "pythia-160m": (12, 12, 64, 2048),
    "qwen2.5-0.5b": (14, 2, 64, 32768),
    "qwen3-0.6b": (16, 8, 128, 40960),
    "roberta-base": (12, 12, 64, 514),
    "t5-small": (8, 8, 64, 512),
}

# The activation by the name transformers gives it, and the epsilon of the norms.
PUBLISHED_ACTIVATION_AND_EPS = {
    "albert-base-v2": ("gelu_new", 1e-12),
    "bert-base-uncased": ("gelu", 1e-12),
    "distilbert-base-uncased": ("gelu", None),  # fixed in the code at 1e-12
    "gemma-2-2b": ("gelu_pytorch_tanh", 1e-6),
    "gemma-2b": ("gelu_pytorch_tanh", 1e-6),
    "gemma-3-1b": ("gelu_pytorch_tanh", 1e-6),
    "gemma-3-270m": ("gelu_pytorch_tanh", 1e-6),
    "gpt2": ("gelu_new", 1e-5),
    "gpt2-large": ("gelu_new", 1e-5),
    "gpt2-medium": ("gelu_new", 1e-5),
    "gpt2-xl": ("gelu_new", 1e-5),
    "llama-2-70b": ("silu", 1e-5),
    "llama-2-7b": ("silu", 1e-5),
    "llama-3.2-1b": ("silu", 1e-5),
    "mistral-7b": ("silu", 1e-5),
    "opt-125m": ("relu", None),  # fixed in the code at 1e-5
    "phi-3-mini": ("silu", 1e-5),
    "pythia-160m": ("gelu", 1e-5),
    "qwen2.5-0.5b": ("silu", 1e-6),
    "qwen3-0.6b": ("silu", 1e-6),
    "roberta-base": ("gelu", 1e-5),
    "t5-small": ("relu", 1e-6),
}
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "activation", "dense_act_fn")
EPS_FIELDS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")

# Rotary base frequency by layer kind, and the fraction of a head that it turns.
PUBLISHED_ROPE = {
    "gemma-2-2b": {"full_attention": 10_000.0, "fraction": 1.0},
    "gemma-2b": {"full_attention": 10_000.0, "fraction": 1.0},
    "gemma-3-1b": {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0, "fraction": 1.0},
    "gemma-3-270m": {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0, "fraction": 1.0},
    "llama-2-70b": {"full_attention": 10_000.0, "fraction": 1.0},
    "llama-2-7b": {"full_attention": 10_000.0, "fraction": 1.0},
    "llama-3.2-1b": {"full_attention": 500_000.0, "fraction": 1.0},
    "mistral-7b": {"full_attention": 10_000.0, "fraction": 1.0},
    "phi-3-mini": {"full_attention": 10_000.0, "fraction": 1.0},
    "pythia-160m": {"full_attention": 10_000.0, "fraction": 0.25},
    "qwen2.5-0.5b": {"full_attention": 1_000_000.0, "fraction": 1.0},
    "qwen3-0.6b": {"full_attention": 1_000_000.0, "fraction": 1.0},
}

# Of how many layers the attention slides, over how many tokens.
PUBLISHED_WINDOWS = {
    "gemma-2-2b": (13, 4096),  # every other layer
    "gemma-3-1b": (22, 512),  # five of six
    "gemma-3-270m": (15, 512),
    "mistral-7b": (32, 4096),
    "phi-3-mini": (32, 2047),
    "qwen2.5-0.5b": (0, None),  # the config states 32768 and switches it off
    "qwen3-0.6b": (0, None),
}

# Begin, end and padding token ids; None where the tokenizer has none or the config leaves it out.
PUBLISHED_TOKEN_IDS = {
    "albert-base-v2": (2, 3, 0),
    "bert-base-uncased": (None, None, 0),
    "distilbert-base-uncased": (None, None, 0),
    "gemma-2-2b": (2, 1, 0),
    "gemma-2b": (2, 1, 0),
    "gemma-3-1b": (2, 1, 0),
    "gemma-3-270m": (2, 1, 0),
    "gpt2": (50256, 50256, None),
    "gpt2-large": (50256, 50256, None),
    "gpt2-medium": (50256, 50256, None),
    "gpt2-xl": (50256, 50256, None),
    "llama-2-70b": (1, 2, None),
    "llama-2-7b": (1, 2, None),
    "llama-3.2-1b": (128000, 128001, None),
    "mistral-7b": (1, 2, None),
    "opt-125m": (2, 2, 1),
    "phi-3-mini": (1, 32000, 32000),
    "pythia-160m": (0, 0, None),
    "qwen2.5-0.5b": (151643, 151643, None),
    "qwen3-0.6b": (151643, 151645, None),
    "roberta-base": (0, 2, 1),
    "t5-small": (None, 1, 0),
}

# Facts that no count and none of the tables above would notice.
PUBLISHED_FACTS = [
    ("albert-base-v2", "num_hidden_layers", 12),  # one stored block, run twelve times
    ("distilbert-base-uncased", "sinusoidal_pos_embds", False),
    ("gemma-2-2b", "attn_logit_softcapping", 50.0),
    ("gemma-2-2b", "final_logit_softcapping", 30.0),
    ("gemma-2-2b", "query_pre_attn_scalar", 256),
    ("gemma-3-1b", "attn_logit_softcapping", None),
    ("gemma-3-1b", "final_logit_softcapping", None),
    ("gemma-3-1b", "query_pre_attn_scalar", 256),
    ("gemma-3-270m", "query_pre_attn_scalar", 256),
    ("opt-125m", "do_layer_norm_before", True),
    ("phi-3-mini", "original_max_position_embeddings", 4096),
    ("pythia-160m", "use_parallel_residual", True),
    ("t5-small", "is_encoder_decoder", True),
    ("t5-small", "decoder_start_token_id", 0),
    ("t5-small", "relative_attention_max_distance", 128),
]

# Fields that are noise here: training settings, where a file came from, code to fetch.
NOISE = ("_name_or_path", "auto_map", "transformers_version", "use_cache", "task_specific_params")


def load(name: str) -> Any:
    config = known_config(name)
    assert config is not None
    return transformers.AutoConfig.for_model(**config)


def build_without_memory(name: str) -> torch.nn.Module:
    config = load(name)
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])._from_config(config)


def first_field(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def test_every_table_covers_every_file():
    names = set(known_names())
    assert names == set(PUBLISHED_NUM_PARAMETERS) == set(PUBLISHED_HEADS)
    assert names == set(PUBLISHED_ACTIVATION_AND_EPS) == set(PUBLISHED_TOKEN_IDS)


@pytest.mark.parametrize("name", known_names())
def test_it_states_structure_and_nothing_else(name):
    config = known_config(name)
    assert config is not None
    assert isinstance(config["model_type"], str)
    assert len(config["architectures"]) == 1
    assert config["torch_dtype"] in ("float32", "float16", "bfloat16")
    assert isinstance(config["tie_word_embeddings"], bool)
    assert not [key for key in config if key in NOISE or "drop" in key]


@pytest.mark.parametrize("name", known_names())
def test_it_builds_the_published_number_of_parameters(name):
    model = build_without_memory(name)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # a tied one appears once
    assert num_parameters == PUBLISHED_NUM_PARAMETERS[name]
    assert model.config.model_type == known_config(name)["model_type"]


@pytest.mark.parametrize("name", known_names())
def test_heads_and_positions_are_the_published_ones(name):
    config = load(name)
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    positions = config.n_positions if config.model_type == "t5" else config.max_position_embeddings
    found = (num_heads, num_kv_heads, head_dim or config.hidden_size // num_heads, positions)
    assert found == PUBLISHED_HEADS[name]


@pytest.mark.parametrize("name", known_names())
def test_activation_and_norm_eps_are_the_published_ones(name):
    config = load(name)
    found = (first_field(config, ACTIVATION_FIELDS), first_field(config, EPS_FIELDS))
    assert found == PUBLISHED_ACTIVATION_AND_EPS[name]


@pytest.mark.parametrize("name", known_names())
def test_token_ids_are_the_published_ones(name):
    config = known_config(name)
    assert config is not None
    assert (
        tuple(config.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")) == PUBLISHED_TOKEN_IDS[name]
    )


@pytest.mark.parametrize(("name", "field", "value"), PUBLISHED_FACTS)
def test_a_published_fact_is_read_by_either_transformers(name, field, value):
    assert getattr(load(name), field) == value


@pytest.mark.parametrize("name", sorted(PUBLISHED_ROPE))
def test_rope_is_read_by_either_transformers(name):
    config = load(name)
    published = PUBLISHED_ROPE[name]
    parameters = getattr(config, "rope_parameters", None)
    if parameters:  # 5.x
        full = parameters.get("full_attention", parameters)
        found = {"full_attention": full["rope_theta"], "fraction": full.get("partial_rotary_factor", 1.0)}
        if "sliding_attention" in parameters:
            found["sliding_attention"] = parameters["sliding_attention"]["rope_theta"]
    else:  # 4.57
        found = {"full_attention": config.rope_theta, "fraction": getattr(config, "rotary_pct", 1.0)}
        if hasattr(config, "rope_local_base_freq"):
            found["sliding_attention"] = config.rope_local_base_freq
    assert found == published


def test_llama_3_2_stretches_its_rotary_by_32():
    config = load("llama-3.2-1b")
    scaling = getattr(config, "rope_parameters", None) or config.rope_scaling
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    assert scaling["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize("name", sorted(PUBLISHED_WINDOWS))
def test_sliding_windows_are_the_published_ones(name):
    config = load(name)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # no kinds: a window holds for every layer
        kinds = ["sliding_attention"] * config.num_hidden_layers if config.sliding_window else []
    assert (kinds.count("sliding_attention"), config.sliding_window) == PUBLISHED_WINDOWS[name]


@pytest.mark.parametrize("name", ["gemma-3-1b", "gemma-3-270m"])
def test_every_sixth_layer_of_gemma_3_sees_everything(name):
    kinds = load(name).layer_types
    assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == list(
        range(5, len(kinds), 6)
    )


def test_gemma_uses_the_tanh_approximation():
    # The first Gemma's released config says "gelu", which meant the tanh form; 4.57 would take it literally.
    activation = build_without_memory("gemma-2b").model.layers[0].mlp.act_fn
    at = torch.tensor([1.0], dtype=torch.float64)
    # GELU(1) by the tanh formula is 0.841192, by the error function 0.841345.
    torch.testing.assert_close(
        activation(at), torch.tensor([0.841192], dtype=torch.float64), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(("alias", "name"), sorted(ALIASES.items()))
def test_an_alias_means_a_built_in_name(alias, name):
    assert alias == alias.lower()
    assert alias not in known_names()
    assert name in known_names()
    assert known_config(alias) == known_config(name) is not None


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("GPT2", "gpt2"),
        ("openai-community/GPT2-XL", "gpt2-xl"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("EleutherAI/pythia-160m", "pythia-160m"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("FacebookAI/roberta-base", "roberta-base"),
    ],
)
def test_case_does_not_matter(written, name):
    assert known_config(written) == known_config(name) is not None


@pytest.mark.parametrize(
    "name", ["", "gpt5", "gpt2.json", "gpt2/", "./gpt2", "../configs/gpt2", "google/gpt2"]
)
def test_an_unknown_name_gives_none(name):
    assert known_config(name) is None


def test_a_caller_may_change_what_it_gets():
    first = known_config("gpt2")
    assert first is not None
    first["n_layer"] = 1
    assert known_config("gpt2")["n_layer"] == 12
