"""The rule and its counts: the required figures, and properties that hold for any sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from quantkit.errors import InputError
from quantkit.model.inspect import inspect, map_module
from quantkit.model.model_map import ModelMap, Role
from quantkit.plan.select import choose, parse_min_dim

pytestmark = pytest.mark.once

MAPS: dict[str, ModelMap] = {}


def mapped(name: str) -> ModelMap:
    if name not in MAPS:
        MAPS[name] = inspect(name)
    return MAPS[name]


@pytest.mark.parametrize(
    ("min_dim", "projections", "matrices"),
    [
        (1, 73, 49),
        (768, 73, 49),
        (769, 25, 25),
        (1024, 25, 25),
        (3072, 25, 25),
        (3073, 1, 1),
        (50257, 1, 1),
        (50258, 0, 0),
    ],
)
def test_gpt2_counts(min_dim, projections, matrices):
    plan = choose(mapped("gpt2"), min_dim=min_dim)
    assert (plan.projections.quantized, plan.projections.total) == (projections, 73)
    assert (plan.matrices.quantized, plan.matrices.total) == (matrices, 49)
    assert plan.formula.agrees
    assert plan.formula.predicted == projections
    assert bool(plan.warnings) == (projections == 0)


def test_nothing_chosen_says_why():
    (warning,) = choose(mapped("gpt2"), min_dim=50258).warnings
    assert "50258" in warning
    assert "50257" in warning


def test_gemma_3_1b_is_183_of_183():
    model = mapped("gemma-3-1b")
    plan = choose(model, min_dim=1152)
    assert (plan.projections.quantized, plan.projections.total) == (183, 183)
    assert plan.formula.agrees
    shapes = {layer.role: (layer.in_features, layer.out_features) for layer in model.layers}
    assert shapes[Role.ATTENTION_QUERY] == (1152, 4 * 256)
    assert shapes[Role.ATTENTION_KEY] == (1152, 256)
    assert shapes[Role.FFN_UP] == (1152, 6912)


def test_the_simplified_gemma_shape_is_183_too():
    config = Gemma3TextConfig(
        hidden_size=1152,
        intermediate_size=4608,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=288,
        vocab_size=262144,
    )
    with torch.device("meta"):
        model = map_module(Gemma3ForCausalLM._from_config(config), name="simplified")
    plan = choose(model, min_dim=1152)
    assert (plan.projections.quantized, plan.projections.total) == (183, 183)
    query = next(layer for layer in model.layers if layer.role is Role.ATTENTION_QUERY)
    assert (query.in_features, query.out_features) == (1152, 1152)
    ffn = sum(
        layer.num_weights for layer in model.layers if layer.block == "model.layers.0" and "mlp" in layer.name
    )
    assert ffn == 12 * 1152**2  # 15.9 M: a gated FFN of four times the width


def test_a_standard_ffn_is_8_d_squared():
    layers = [
        layer for layer in mapped("gpt2").layers if layer.block == "transformer.h.0" and "mlp" in layer.name
    ]
    assert sum(layer.num_weights for layer in layers) == 8 * 768**2


@pytest.mark.parametrize(
    ("name", "gap", "words"),
    [
        ("albert-base-v2", -64, "shared"),
        ("t5-small", 24, "cross-attention"),
        ("bert-base-uncased", 1, "no output layer"),
    ],
)
def test_a_wrong_formula_is_not_called_right(name, gap, words):
    check = choose(mapped(name), min_dim=1).formula
    assert not check.agrees
    assert check.walked - check.predicted == gap
    assert sum(int(line.split(":")[0]) for line in check.differences) == gap
    assert any(words in line for line in check.differences)


@settings(max_examples=60)
@given(
    name=st.sampled_from(["gpt2", "albert-base-v2", "t5-small", "gemma-3-270m", "phi-3-mini"]),
    min_dim=st.integers(1, 70000),
)
def test_the_rule_for_any_size(name, min_dim):
    model = mapped(name)
    plan = choose(model, min_dim=min_dim)
    for layer, planned in zip(model.layers, plan.layers, strict=True):
        assert planned.quantized == (layer.in_features >= min_dim or layer.out_features >= min_dim)
        assert str(min_dim) in planned.reason
    gaps = sum(int(line.split(":")[0]) for line in plan.formula.differences)
    assert plan.formula.walked - plan.formula.predicted == gaps
    assert plan.formula.agrees == (not plan.formula.differences)


@settings(max_examples=30)
@given(smaller=st.integers(1, 60000), more=st.integers(0, 5000))
def test_a_larger_min_dim_never_chooses_more(smaller, more):
    chosen = [
        {layer.name for layer in choose(mapped("gpt2"), min_dim=size).layers if layer.quantized}
        for size in (smaller, smaller + more)
    ]
    assert chosen[1] <= chosen[0]


def test_include_and_exclude():
    model = mapped("gpt2")
    assert choose(model, min_dim=1, include=["ffn"]).projections.quantized == 24
    assert choose(model, min_dim=1, include=["ffn", "lm_head"]).projections.quantized == 25
    assert choose(model, min_dim=1, exclude=["attention"]).projections.quantized == 25
    assert choose(model, min_dim=1, exclude=["*.h.0.*"]).projections.quantized == 67
    assert choose(model, min_dim=1, include=["ffn"], exclude=["ffn_down"]).projections.quantized == 12
    plan = choose(model, min_dim=1, exclude=["attention_query"])
    assert "quantized in part only" in plan.warnings[0]
    reasons = {layer.name: layer.reason for layer in plan.layers}
    assert reasons["transformer.h.3.attn.c_attn[query]"] == "excluded by 'attention_query'"


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(InputError, match=r"'ffn_gate' matches no projection.*allowed: a role"):
        choose(mapped("gpt2"), exclude=["ffn_gate"])


@pytest.mark.parametrize("text", ["0", "-5", "abc", "7.5", ""])
def test_a_wrong_min_dim_is_refused(text):
    with pytest.raises(InputError, match="whole number from 1 up"):
        parse_min_dim(text)


def test_the_plan_does_not_depend_on_fusing():
    """The same shapes, fused (Phi-3) or not (Llama): the same choice role by role."""
    fused = mapped("phi-3-mini")
    unfused = dataclasses.replace(
        fused, layers=tuple(dataclasses.replace(layer, matrix=layer.name) for layer in fused.layers)
    )
    for min_dim in (1, 3072, 3073, 8192, 8193):
        plans = [choose(model, min_dim=min_dim) for model in (fused, unfused)]
        assert [layer.quantized for layer in plans[0].layers] == [
            layer.quantized for layer in plans[1].layers
        ]
        assert plans[0].projections == plans[1].projections
