"""Every family under fields that its config class has and under fields of other families.

The oracle is transformers: the float graph has its logits, or the checkpoint is refused. A field that a
class ignores must be ignored, whatever it means elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exporting import DECODERS, NOTHING, build_tiny, error, export

from quantkit.errors import InputError
from quantkit.export.decoder import why_not
from quantkit.export.encoder import why_not_encoder
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.pipeline.stages.export import kind_of
from quantkit.runtime.decoder import open_decoder
from quantkit.runtime.encoder import encode, open_encoder

ENCODERS = ("bert", "roberta", "mpnet", "electra", "modernbert", "distilbert", "albert")
OWN = ("quantkit_reference", "ws_ffn")
FUSED = [name for name in (*DECODERS, *ENCODERS) if name not in OWN]
LAYER_TYPES = ["full_attention", "sliding_attention"]
# Fields of any family; most classes ignore most of them.
FIELDS: dict[str, dict] = {
    "num_key_value_heads": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 24},
    "d_kv": {"d_kv": 2},
    "num_heads": {"num_heads": 2},
    "num_layers": {"num_layers": 1},
    "sliding_window": {"sliding_window": 4},
    "no_sliding_window": {"sliding_window": None},
    "use_sliding_window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "unused_sliding_window": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    "layer_types": {"layer_types": LAYER_TYPES, "sliding_window": 4, "use_sliding_window": True},
    "attn_logit_softcapping": {"attn_logit_softcapping": 0.2},
    "no_attn_logit_softcapping": {"attn_logit_softcapping": None},
    "final_logit_softcapping": {"final_logit_softcapping": 0.5},
    "no_final_logit_softcapping": {"final_logit_softcapping": None},
    "query_pre_attn_scalar": {"query_pre_attn_scalar": 2},
    "rope_theta": {"rope_theta": 77.0},
    "rotary_emb_base": {"rotary_emb_base": 77},
    "rope_local_base_freq": {"rope_local_base_freq": 55.0, "layer_types": LAYER_TYPES, "sliding_window": 4},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "rotary_pct": {"rotary_pct": 0.5},
    "scale_attn_weights": {"scale_attn_weights": False},
    "scale_attn_by_inverse_layer_idx": {"scale_attn_by_inverse_layer_idx": True},
    "reorder_and_upcast_attn": {"reorder_and_upcast_attn": True},
    "use_parallel_residual": {"use_parallel_residual": False},
    "parallel_attn": {"parallel_attn": True},
    "do_layer_norm_before": {"do_layer_norm_before": False},
    "word_embed_proj_dim": {"word_embed_proj_dim": 16},
    "remove_final_layer_norm": {"_remove_final_layer_norm": True},
    "layer_norm_elementwise_affine": {"layer_norm_elementwise_affine": False},
    "enable_bias": {"enable_bias": False},
    "attention_bias": {"attention_bias": True},
    "no_attention_bias": {"attention_bias": False},
    "mlp_bias": {"mlp_bias": True},
    "bias": {"bias": False},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "pad_token_id": {"pad_token_id": 5},
    "no_pad_token_id": {"pad_token_id": None},
    "position_embedding_type": {"position_embedding_type": "relative_key"},
    "use_bidirectional_attention": {"use_bidirectional_attention": True},
    "is_causal": {"is_causal": False},
    "is_decoder": {"is_decoder": True},
    "add_cross_attention": {"is_decoder": True, "add_cross_attention": True},
    "inner_group_num": {"inner_group_num": 2},
    "uneven_groups": {"num_hidden_groups": 2, "num_hidden_layers": 5},
    "multipliers": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 3.0,
        "residual_multiplier": 3.0,
        "logits_scaling": 3.0,
        "logit_scale": 3.0,
        "scale_embedding": True,
    },
    "epsilons": {"layer_norm_eps": 0.1, "rms_norm_eps": 0.2, "layer_norm_epsilon": 0.3},
    "relu": dict.fromkeys(("hidden_act", "hidden_activation", "activation", "activation_function"), "relu"),
    "gelu_new": dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation", "activation_function"), "gelu_new"
    ),
    "hidden_act": {"hidden_act": "relu"},
    "hidden_activation": {"hidden_activation": "gelu"},
    "n_inner": {"n_inner": 24},
    "max_seq_len": {"max_seq_len": 8},
    "n_positions": {"n_positions": 32},
    "type_vocab_size": {"type_vocab_size": 1},
    "chunk_size_feed_forward": {"chunk_size_feed_forward": 5},
    "norms": {"norm_kind": "layer_norm", "norm_placement": "post", "ffn_kind": "standard"},
    "num_labels": {"num_labels": 3},
    "embedding_size": {"embedding_size": 24},
    "relative_attention_num_buckets": {"relative_attention_num_buckets": 40},
    "too_few_buckets": {"relative_attention_num_buckets": 20},
    "local_attention": {"local_attention": 5, "global_attn_every_n_layers": 2},
    "global_rope_theta": {"global_rope_theta": 77.0, "local_rope_theta": 5.0},
    "rope_scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "norm_bias": {"norm_bias": True},
    "decoder_bias": {"decoder_bias": False},
    "classifier_activation": {"classifier_activation": "relu"},
    "pretraining_tp": {"pretraining_tp": 2},
}
CASES = [
    pytest.param(name, changes, id=f"{name}-{field}") for name in FUSED for field, changes in FIELDS.items()
]
# What once came out wrong, and one of each kind.
SAMPLE = [
    pytest.param(name, FIELDS[field], id=f"{name}-{field}")
    for name, field in (
        ("gpt_neox", "num_key_value_heads"),
        ("gpt2", "scale_attn_by_inverse_layer_idx"),
        ("llama", "sliding_window"),
        ("llama", "final_logit_softcapping"),
        ("llama", "query_pre_attn_scalar"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma3", "attn_logit_softcapping"),
        ("gemma3", "use_bidirectional_attention"),
        ("opt", "layer_norm_elementwise_affine"),
        ("bert", "is_decoder"),
        ("roberta", "pad_token_id"),
        ("albert", "uneven_groups"),
        ("modernbert", "layer_types"),
    )
]
IDS = np.random.default_rng(0).integers(6, 60, (2, 20))
PADDING = 7


def original(model, ids, mask):
    with torch.inference_mode():
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if hasattr(model.config, "use_cache") and not model.config.is_encoder_decoder:
            inputs |= {"use_cache": False} if "use_cache" in model.forward.__code__.co_varnames else {}
        return model(**inputs)[0].numpy()


def build(name, changes):
    """A model that transformers builds and runs, or no test."""
    try:
        model = build_tiny(FAMILIES[name].tiny_class, {**FAMILIES[name].tiny, **changes})
        expected = [original(model, IDS, np.ones_like(IDS)), original(model, *padded(name))]
    except Exception as error:
        pytest.skip(f"transformers cannot run it: {type(error).__name__}")
    return model, expected


def padded(name):
    """(ids, mask): the second row padded, in front for decoders and behind for encoders."""
    ids, mask = IDS.copy(), np.ones_like(IDS)
    hidden = slice(PADDING) if name in DECODERS else slice(-PADDING, None)
    mask[1, hidden] = 0
    return ids, mask


def compare(name, changes, tmp_path):
    model, expected = build(name, changes)
    model.save_pretrained(tmp_path / "model")
    try:
        model_map = inspect(str(tmp_path / "model"))
    except InputError:
        return "refused"
    if why_not(model_map) and why_not_encoder(model_map):
        return "not emitted"
    exported = export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    if exported.kind == "decoder":
        run = open_decoder(tmp_path / "out", threads=1).logits
    else:
        encoder = open_encoder(tmp_path / "out", threads=1)

        def run(ids, mask):
            return encode(encoder, ids, mask)[encoder.outputs[0]]

    ids, mask = padded(name)
    shown = mask.astype(bool)
    assert error(run(IDS, np.ones_like(IDS)), expected[0]).relative < 1e-4
    if not model.config.to_dict().get("is_decoder") and name in ENCODERS:
        assert error(run(ids, mask)[shown], expected[1][shown]).relative < 1e-4
    return "right"


@pytest.mark.parametrize("padding_id", [0, 2, 5])
def test_positions_are_counted_from_the_padding_id(padding_id, tmp_path):
    sizes = {**FAMILIES["roberta"].tiny, "pad_token_id": padding_id}
    model = build_tiny("RobertaForMaskedLM", sizes)
    model.save_pretrained(tmp_path / "model")
    assert inspect(str(tmp_path / "model")).context == sizes["max_position_embeddings"] - padding_id - 1
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    encoder = open_encoder(tmp_path / "out", threads=1)
    ids, mask = IDS.copy(), np.ones_like(IDS)
    ids[0, 6] = padding_id  # inside of a text, where the mask shows it
    ids[1, -PADDING:], mask[1, -PADDING:] = padding_id, 0
    made, shown = encode(encoder, ids, mask)["logits"], mask.astype(bool)
    assert error(made[shown], original(model, ids, mask)[shown]).relative < 1e-4


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Gemma3TextModel"])
def test_a_decoder_that_looks_in_both_directions_is_refused(architecture, tmp_path):
    sizes = {**FAMILIES["gemma3"].tiny, "use_bidirectional_attention": True}
    build_tiny(architecture, sizes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="both directions"):
        kind_of(inspect(str(tmp_path)))


@pytest.mark.parametrize(("name", "changes"), SAMPLE)
def test_what_once_came_out_wrong(name, changes, tmp_path):
    compare(name, changes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_field_means_what_it_means_to_transformers(name, changes, tmp_path):
    compare(name, changes, tmp_path)
