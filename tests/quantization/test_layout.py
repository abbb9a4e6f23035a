"""What a quantized model stores, decided from the map and the plan alone: packs, tables and their sizes."""

from __future__ import annotations

import math

import pytest

from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.model.load import model_class
from quantkit.model.model_map import Role
from quantkit.plan.formats import SCHEMES, Format, Grid, in_blocks
from quantkit.plan.select import choose
from quantkit.quantization.layout import contents_of

GRID = Grid(block=32)
FORMAT = in_blocks(32)
NOTHING = 1 << 62
SIZES = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
    "llama": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 40,
    },
}


def map_of(family, **changes):
    row = FAMILIES[family]
    made_from = model_class(row.tiny_class)
    sizes = {**SIZES.get(family, row.tiny), **changes}
    return map_module(made_from(made_from.config_class(**sizes)), name=family)


def contents(model_map, *, min_dim=1, formats=FORMAT, exclude=()):
    return contents_of(model_map, choose(model_map, min_dim=min_dim, exclude=exclude), formats)


def shapes(made):
    return {spec.name: (spec.dtype, spec.shape) for spec in made.tensors()}


def test_a_fused_matrix_is_one_pack_under_its_own_name():
    made = contents(map_of("gpt2"))
    assert [pack.name for pack in made.packs[:4]] == [
        f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    stored = shapes(made)
    assert stored["transformer.h.0.attn.c_attn.codes"] == ("U8", (96, 1, 32))
    assert stored["transformer.h.0.attn.c_attn.scales"] == ("F16", (96, 1))
    assert stored["transformer.h.0.attn.c_attn.bias"] == ("F32", (96,))
    assert stored["transformer.h.0.mlp.c_proj.codes"] == ("U8", (32, 4, 32))


def test_separate_query_key_and_value_are_packed_under_all_three_names():
    made = contents(map_of("llama"))
    pack = made.packs[0]
    assert pack.name == "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    assert [layer.role for layer in pack.layers] == [
        Role.ATTENTION_QUERY,
        Role.ATTENTION_KEY,
        Role.ATTENTION_VALUE,
    ]
    assert pack.out_features == 32 + 16 + 16
    assert not pack.has_bias
    assert made.pack_of(Role.ATTENTION_KEY, "model.layers.0") is pack
    assert made.pack_of(Role.FFN_DOWN, "model.layers.1").name == "model.layers.1.mlp.down_proj"
    assert made.pack_of(Role.FFN_DOWN, "model.layers.1").layers[0].role is Role.FFN_DOWN


def test_a_half_planned_attention_is_not_packed():
    made = contents(map_of("llama"), exclude=["*.k_proj"])
    names = [pack.name for pack in made.packs]
    assert "model.layers.0.self_attn.q_proj" in names
    assert "model.layers.0.self_attn.k_proj" in names
    assert not any("+" in name for name in names)
    stored = shapes(made)
    assert stored["model.layers.0.self_attn.k_proj.weight_IO"] == ("F32", (32, 16))
    assert "model.layers.0.self_attn.q_proj.codes" in stored


def test_a_tied_table_is_stored_once_with_the_head():
    made = contents(map_of("gpt2"))
    token, position = made.tables
    assert (token.shares, token.grid) == ("lm_head", GRID)
    assert position.shares is None
    stored = shapes(made)
    assert stored["lm_head.codes"] == ("U8", (61, 1, 32))
    assert not any(name.startswith("transformer.wte") for name in stored)
    assert stored["transformer.wpe.codes"] == ("U8", (40, 1, 32))


def test_a_tied_head_in_float_reads_the_table():
    made = contents(map_of("gpt2"), min_dim=NOTHING)
    head = made.packs[-1]
    assert (head.name, head.table, head.tensors()) == ("lm_head", "transformer.wte", ())
    stored = shapes(made)
    assert stored["transformer.wte.weight"] == ("F32", (61, 32))
    assert not any(name.startswith("lm_head") for name in stored)


def test_untied_tables_are_stored_beside_the_head():
    made = contents(map_of("llama", tie_word_embeddings=False))
    assert made.tables[0].shares is None
    stored = shapes(made)
    assert stored["lm_head.codes"] == stored["model.embed_tokens.codes"] == ("U8", (61, 1, 32))


def test_a_table_that_a_float_head_reads_stays_float():
    made = contents(map_of("gpt2"), exclude=("lm_head",))
    stored = shapes(made)
    assert stored["transformer.wte.weight"] == ("F32", (61, 32))
    assert stored["transformer.wpe.codes"][0] == "U8", "the other table follows the rule"
    assert not any(name.startswith("lm_head") for name in stored)


def test_per_channel_codes_are_stored_transposed():
    stored = shapes(contents(map_of("llama"), formats=Format(grid=Grid(), activations="tensor")))
    name = "model.layers.0.mlp.down_proj"
    assert stored[f"{name}.codes_IO"] == ("I8", (48, 32))
    assert stored[f"{name}.scales"] == ("F32", (32,))


def test_each_projection_may_have_a_format_of_its_own():
    model_map = map_of("llama")
    formats = {layer.name: in_blocks(16 if layer.role is Role.FFN_DOWN else 32) for layer in model_map.layers}
    made = contents(model_map, formats=formats)
    assert made.pack_of(Role.FFN_DOWN, "model.layers.0").grid == Grid(block=16)
    assert made.pack_of(Role.ATTENTION_VALUE, "model.layers.0").grid == Grid(block=32)


def test_norms_carry_a_bias_where_they_have_one():
    gpt2, llama = shapes(contents(map_of("gpt2"))), shapes(contents(map_of("llama")))
    assert gpt2["transformer.h.0.ln_1.bias"] == ("F32", (32,))
    assert llama["model.norm.weight"] == ("F32", (32,))
    assert "model.norm.bias" not in llama


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("min_dim", [1, NOTHING], ids=["integer", "float"])
def test_everything_of_every_family_is_stored_once(family, min_dim):
    """Nothing is lost and nothing doubled: values without padding and scales add up to the parameters."""
    model_map = map_of(family)
    made = contents(model_map, min_dim=min_dim)
    names = [spec.name for spec in made.tensors()]
    assert len(names) == len(set(names))
    stored = sum(math.prod(spec.shape) for spec in made.tensors() if not spec.name.endswith(".scales"))
    is_biased = model_map.logit_bias is not None  # a buffer, which is no parameter
    stored -= next(layer.out_features for layer in model_map.layers if layer.tied_to) if is_biased else 0
    padding = zero_biases = 0
    for pack in made.packs:
        if pack.grid:
            padding += pack.out_features * (-pack.in_features % 32)
        if pack.has_bias:
            zero_biases += sum(layer.out_features for layer in pack.layers if not layer.has_bias)
    for entry in made.tables:
        if entry.grid and not entry.shares:
            padding += entry.table.num_rows * (-entry.table.num_columns % 32)
    gains_of_ones = sum(norm.features for norm in model_map.norms if not norm.num_parameters)
    names = {spec.name for spec in made.tensors()}
    unread = sum(math.prod(entry.shape) for entry in model_map.unmapped if entry.name not in names)
    assert stored + unread - padding - zero_biases - gains_of_ones == model_map.at_inference.num_parameters


@pytest.mark.parametrize("name", SCHEMES)
def test_every_projection_is_in_exactly_one_pack(name):
    model_map = map_of("llama")
    made = contents(model_map, formats=SCHEMES[name].body)
    packed = [layer.name for pack in made.packs for layer in pack.layers]
    assert sorted(packed) == sorted(layer.name for layer in model_map.layers)
