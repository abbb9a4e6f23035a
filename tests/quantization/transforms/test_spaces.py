"""Spaces by hand: what each architecture permits, written from the papers and not from the code."""

from __future__ import annotations

import json

import pytest
import torch
from exporting import build_tiny
from torch import nn

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.model.model_map import to_json
from quantkit.quantization.transforms.basis import BASIS_KINDS
from quantkit.quantization.transforms.spaces import require_spaces, spaces_of

HEADS = {"diagonal", "permutation", "per_head_orthogonal"}


def map_of(family, **changes):
    row = FAMILIES[family]
    return map_module(build_tiny(row.tiny_class, {**row.tiny, **changes}), name=family)


def spaces(family, **changes):
    return {space.name: space for space in spaces_of(map_of(family, **changes))}


def check(space, *, writers, readers, permits, untied=()):
    assert (set(space.writers), set(space.readers)) == (set(writers), set(readers))
    assert (space.permits, space.permits_untied) == (set(permits), set(untied))


def test_gpt2():
    found = spaces("gpt2")
    h0, h1 = "transformer.h.0", "transformer.h.1"
    qkv = [f"{h0}.attn.c_attn[{part}]" for part in ("query", "key", "value")]
    check(found[f"{h0}.ln_1"], writers=[f"{h0}.ln_1"], readers=qkv, permits=["diagonal"])
    check(found[f"{h0}.ln_2"], writers=[f"{h0}.ln_2"], readers=[f"{h0}.mlp.c_fc"], permits=["diagonal"])
    check(
        found["transformer.ln_f"],
        writers=["transformer.ln_f"],
        readers=["lm_head"],
        permits=[],
        untied=["diagonal"],
    )
    assert "token table" in found["transformer.ln_f"].forbidden["diagonal"]
    hidden = found[f"{h1}.ffn_hidden"]
    check(hidden, writers=[f"{h1}.mlp.c_fc"], readers=[f"{h1}.mlp.c_proj"], permits=["permutation"])
    assert (hidden.width, hidden.block) == (128, h1)
    assert "GELU" in hidden.forbidden["diagonal"]
    values = found[f"{h0}.value_heads"]
    check(values, writers=[qkv[2]], readers=[f"{h0}.attn.c_proj"], permits=[*HEADS, "head_permutation"])
    assert (values.num_heads, values.num_kv_heads, values.head_dim) == (4, 4, 8)
    assert values.aligned == tuple(qkv[:2])
    stream = found["residual"]
    check(
        stream,
        writers=[
            "transformer.wte",
            "transformer.wpe",
            *(f"{h}.{name}" for h in (h0, h1) for name in ("attn.c_proj", "mlp.c_proj")),
        ],
        readers=[
            *qkv,
            *(name.replace(h0, h1) for name in qkv),
            f"{h0}.mlp.c_fc",
            f"{h1}.mlp.c_fc",
            "lm_head",
        ],
        permits=["permutation"],
        untied=["orthogonal"],
    )
    assert set(stream.norms) == {*(f"{h}.ln_{i}" for h in (h0, h1) for i in (1, 2)), "transformer.ln_f"}
    assert len(found) == 5 + 2 + 2 + 1


def test_gpt2_with_relu_scales_its_ffn():
    assert spaces("gpt2", activation_function="relu")["transformer.h.0.ffn_hidden"].permits == {
        "diagonal",
        "permutation",
    }


def test_an_unknown_curve_permits_nothing_that_it_stands_between():
    found = spaces("gpt2", activation_function="mish")["transformer.h.0.ffn_hidden"]
    assert found.permits == set()
    assert "unknown" in found.forbidden["permutation"]


def test_llama():
    found = spaces("llama")
    block = "model.layers.0"
    feeds = [f"{block}.self_attn.{name}_proj" for name in "qkv"]
    check(
        found[f"{block}.input_layernorm"],
        writers=[f"{block}.input_layernorm"],
        readers=feeds,
        permits=["diagonal"],
    )
    check(found["model.norm"], writers=["model.norm"], readers=["lm_head"], permits=["diagonal"])
    hidden = found[f"{block}.ffn_hidden"]
    check(
        hidden,
        writers=[f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"],
        readers=[f"{block}.mlp.down_proj"],
        permits=["diagonal", "permutation"],
    )
    values = found[f"{block}.value_heads"]
    assert (values.width, values.num_heads, values.num_kv_heads, values.head_dim) == (16, 4, 2, 8)
    assert found["residual"].permits == {"permutation", "orthogonal"}
    assert found["residual"].permits_untied == set()
    assert "model.embed_tokens" in found["residual"].writers


def test_llama_with_a_tied_head():
    found = spaces("llama", tie_word_embeddings=True)
    assert found["model.norm"].permits_untied == {"diagonal"}
    assert (found["residual"].permits, found["residual"].permits_untied) == (
        {"permutation"},
        {"orthogonal"},
    )


def test_gemma2():
    found = spaces("gemma2")
    block = "model.layers.0"
    assert found[f"{block}.input_layernorm"].permits == {"diagonal"}
    assert found[f"{block}.pre_feedforward_layernorm"].permits == {"diagonal"}
    for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
        assert found[f"{block}.{name}"].permits | found[f"{block}.{name}"].permits_untied == set()
        assert "sublayer" in found[f"{block}.{name}"].forbidden["diagonal"]
    stream = found["residual"]
    assert (stream.permits, stream.permits_untied) == ({"permutation"}, set())
    assert "sandwich" in stream.forbidden["orthogonal"]
    assert len(stream.norms) == 4 * 2 + 1


def test_query_and_key_norms_are_no_spaces():
    found = spaces("gemma3")
    assert not [name for name in found if name.endswith(("q_norm", "k_norm"))]
    assert not [name for name in found["residual"].norms if name.endswith(("q_norm", "k_norm"))]


@pytest.mark.parametrize("is_parallel", [True, False])
def test_gpt_neox_parallel_or_not(is_parallel):
    found = spaces("gpt_neox", use_parallel_residual=is_parallel)
    block = "gpt_neox.layers.1"
    assert found[f"{block}.input_layernorm"].permits == {"diagonal"}
    assert found[f"{block}.post_attention_layernorm"].readers == (f"{block}.mlp.dense_h_to_4h",)
    assert found["residual"].permits == {"permutation", "orthogonal"}
    assert found["residual"].writers[0] == "gpt_neox.embed_in"
    assert "embed_out" in found["residual"].readers


def test_opt_with_post_norms_and_projections():
    found = spaces("opt", do_layer_norm_before=False, word_embed_proj_dim=16)
    block = "model.decoder.layers.0"
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        assert not found[f"{block}.{name}"].permits
        assert "post-norm" in found[f"{block}.{name}"].forbidden["diagonal"]
    assert found[f"{block}.ffn_hidden"].permits == {"diagonal", "permutation"}  # ReLU
    stream = found["residual"]
    assert (stream.permits, stream.permits_untied) == ({"permutation"}, set())
    assert {"model.decoder.project_in", "model.decoder.embed_positions"} < set(stream.writers)
    assert "model.decoder.embed_tokens" not in stream.writers
    assert "model.decoder.project_out" in stream.readers
    assert "lm_head" not in stream.readers


def test_bloom_tells_positions_by_head_and_norms_its_embedding():
    found = spaces("bloom")
    assert found["transformer.h.0.value_heads"].permits == HEADS
    assert "each head" in found["transformer.h.0.value_heads"].forbidden["head_permutation"]
    assert "embedding" in found["transformer.word_embeddings_layernorm"].forbidden["diagonal"]
    assert found["residual"].permits == {"permutation"}
    assert "word_embeddings_layernorm" in found["residual"].forbidden["orthogonal"]


def test_bert():
    found = spaces("bert")
    block = "bert.encoder.layer.0"
    for name in (f"{block}.attention.output.LayerNorm", f"{block}.output.LayerNorm"):
        assert not found[name].permits | found[name].permits_untied
        assert "post-norm" in found[name].forbidden["diagonal"]
    assert not found["bert.embeddings.LayerNorm"].permits
    parts = [f"{block}.attention.self.{part}" for part in ("query", "key", "value")]
    check(found[f"{block}.attention_input"], writers=[], readers=parts, permits=["diagonal"])
    reader = f"{block}.intermediate.dense"
    check(found[f"{block}.ffn_input"], writers=[], readers=[reader], permits=["diagonal"])
    assert found["cls.predictions.transform.LayerNorm"].permits_untied == {"diagonal"}
    assert found[f"{block}.value_heads"].permits == HEADS | {"head_permutation"}
    assert found[f"{block}.ffn_hidden"].permits == {"permutation"}
    stream = found["residual"]
    assert (stream.permits, stream.permits_untied) == ({"permutation"}, set())
    assert "post-norm" in stream.forbidden["orthogonal"]
    tables = {f"bert.embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")}
    assert tables < set(stream.writers)
    assert "cls.predictions.transform.dense" in {*stream.writers} & {*stream.readers}


def test_t5():
    found = spaces("t5")
    assert set(found["encoder.final_layer_norm"].readers) == {
        f"decoder.block.{i}.layer.1.EncDecAttention.{name}" for i in (0, 1) for name in "kv"
    }
    assert found["encoder.final_layer_norm"].permits == {"diagonal"}
    assert found["decoder.final_layer_norm"].permits_untied == {"diagonal"}
    assert found["decoder.block.0.value_heads"].permits == HEADS
    cross = found["decoder.block.0.cross_value_heads"]
    check(
        cross,
        writers=["decoder.block.0.layer.1.EncDecAttention.v"],
        readers=["decoder.block.0.layer.1.EncDecAttention.o"],
        permits=[*HEADS, "head_permutation"],  # only self attention has a bias for each head
    )
    stream = found["residual"]
    assert (stream.permits, stream.permits_untied) == ({"permutation"}, {"orthogonal"})
    assert {"shared", "encoder.block.0.layer.0.SelfAttention.o"} < set(stream.writers)
    assert len(stream.norms) == 2 * (2 + 3) + 2
    gated = spaces("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    # Transformers 5 ties T5's head whatever the config says.
    is_tied = map_of("t5", tie_word_embeddings=False).has_tied_head
    assert ("orthogonal" in gated["residual"].permits) != is_tied
    assert ("orthogonal" in gated["residual"].permits_untied) == is_tied
    assert len(gated["decoder.block.1.ffn_hidden"].writers) == 2


def test_phi3_in_fused_matrices():
    found = spaces("phi3")
    block = "model.layers.0"
    check(
        found[f"{block}.ffn_hidden"],
        writers=[f"{block}.mlp.gate_up_proj[gate]", f"{block}.mlp.gate_up_proj[up]"],
        readers=[f"{block}.mlp.down_proj"],
        permits=["diagonal", "permutation"],
    )
    assert found[f"{block}.value_heads"].writers == (f"{block}.self_attn.qkv_proj[value]",)
    assert found["residual"].permits == {"permutation", "orthogonal"}


def test_albert_shares_blocks_and_has_narrow_tables():
    found = spaces("albert")
    stream = found["residual"]
    assert stream.width == 32
    assert "albert.encoder.embedding_hidden_mapping_in" in stream.writers
    assert "predictions.dense" in stream.readers
    assert not [name for name in stream.writers if "embeddings" in name]
    assert not [name for name in stream.norms if name.startswith(("albert.embeddings", "predictions"))]
    assert found["albert.embeddings.LayerNorm"].permits == {"diagonal"}
    assert len([space for space in found.values() if space.kind == "ffn_hidden"]) == 1


def test_a_table_as_wide_as_the_stream_still_lies_before_alberts_projection():
    stream = spaces("albert", embedding_size=32)["residual"]
    assert not [name for name in stream.writers if "embeddings" in name]
    assert "predictions.LayerNorm" not in stream.norms


def test_without_a_head_the_stream_is_the_result():
    row = FAMILIES["llama"]
    model_map = map_module(build_tiny("LlamaModel", dict(row.tiny)), name="base")
    found = {space.name: space for space in spaces_of(model_map)}
    assert not found["residual"].permits
    assert "head" in found["residual"].forbidden["permutation"]
    assert "the model's" in found["norm"].forbidden["diagonal"]
    assert found["layers.0.ffn_hidden"].permits == {"diagonal", "permutation"}


def test_what_has_no_role_is_not_guessed():
    row = FAMILIES["llama"]
    model = build_tiny(row.tiny_class, dict(row.tiny))
    model.model.layers[0].adapter = nn.Linear(32, 32)
    model.extra = nn.Linear(32, 7)
    model.model.layers[1].gate = nn.Parameter(torch.ones(32))
    found = {space.name: space for space in spaces_of(map_module(model, name="llama"))}
    assert "adapter" in found["model.layers.0.input_layernorm"].forbidden["diagonal"]
    assert "adapter" in found["model.layers.0.ffn_hidden"].forbidden["permutation"]
    assert "gate" in found["model.layers.1.value_heads"].forbidden["diagonal"]
    assert "extra" in found["model.norm"].forbidden["diagonal"]
    assert not found["residual"].permits | found["residual"].permits_untied


def test_an_architecture_without_a_row_lists_every_missing_role():
    model = nn.Sequential(nn.Linear(4, 4))
    model_map = map_module(model, name="plain")
    assert spaces_of(model_map) == ()
    with pytest.raises(InputError, match=r"attention_query, .*attention_out, ffn_up, ffn_down"):
        require_spaces(model_map)


def test_a_space_is_json():
    document = json.loads(json.dumps(to_json(spaces("t5")["residual"])))
    assert set(document["forbidden"]) == set(BASIS_KINDS) - {"permutation"}
