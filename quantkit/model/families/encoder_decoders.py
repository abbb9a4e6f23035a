"""Rows of the encoder-decoders: families that read a text, or a recording, and write another one."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.schema import (
    DOWN,
    FINAL_NORM,
    GATE,
    OUT,
    POSITION,
    POSITION_BIAS,
    TOKEN,
    UP,
    ByConfig,
    Family,
    K,
    NormRow,
    Q,
    Stack,
    V,
)
from quantkit.model.model_map import NormKind, NormPlace, NormPlacement, PositionBias, PositionKind


def t5_stack(kind: str) -> Stack:
    """T5 numbers its sublayers; the decoder has cross attention between the two."""
    is_decoder = kind == "decoder"
    ffn = "layer.2" if is_decoder else "layer.1"
    attention, cross = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    return Stack(
        path=f"{kind}.block.*",
        kind=kind,
        projections={
            **{f"{attention}.{name}": (role,) for name, role in zip("qkvo", (Q, K, V, OUT), strict=True)},
            f"{ffn}.DenseReluDense.wi": (UP,),
            f"{ffn}.DenseReluDense.wi_0": (GATE,),
            f"{ffn}.DenseReluDense.wi_1": (UP,),
            f"{ffn}.DenseReluDense.wo": (DOWN,),
        },
        cross_projections={
            f"{cross}.{name}": (role,)
            for name, role in zip("qkvo", (Q, K, V, OUT), strict=True)
            if is_decoder
        },
        norms={
            "layer.0.layer_norm": NormRow(
                NormPlace.BEFORE_ATTENTION, tuple(f"{attention}.{name}" for name in "qkv")
            ),
            **(
                {"layer.1.layer_norm": NormRow(NormPlace.BEFORE_CROSS_ATTENTION, (f"{cross}.q",))}
                if is_decoder
                else {}
            ),
            f"{ffn}.layer_norm": NormRow(
                NormPlace.BEFORE_FFN, tuple(f"{ffn}.DenseReluDense.{name}" for name in ("wi", "wi_0", "wi_1"))
            ),
        },
        activation=f"{ffn}.DenseReluDense.act",
    )


T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"
T5 = Family(
    name="t5",
    model_types=("t5",),
    stacks=(t5_stack("encoder"), t5_stack("decoder")),
    embeddings={"shared": TOKEN, **{f"{kind}.{T5_BIAS}": POSITION_BIAS for kind in ("encoder", "decoder")}},
    outer_norms={
        "encoder.final_layer_norm": NormRow(NormPlace.FINAL, feeds_cross_attention=True),
        "decoder.final_layer_norm": FINAL_NORM,
    },
    norm_kind=NormKind.RMS_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.RELATIVE,
    position_biases=tuple(
        PositionBias(
            table=f"{kind}.{T5_BIAS}",
            num_buckets=32,
            max_distance=128,
            stack=kind,
            is_causal=kind == "decoder",
        )
        for kind in ("encoder", "decoder")
    ),
    position_biases_by_config=True,
    scales_tied_head=ByConfig(key="scale_decoder_outputs", absent=True, values={True: True, False: False}),
    tiny_class="T5ForConditionalGeneration",
    tiny={"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    variants=({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},),
)


MT5 = replace(
    T5,
    name="mt5",
    model_types=("mt5",),
    scales_tied_head=True,
    scales_tied_head_until=5,
    tiny_class="MT5ForConditionalGeneration",
    tiny={**T5.tiny, "feed_forward_proj": "gated-gelu"},
    variants=({"tie_word_embeddings": True},),
)

BART_READ_BY_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
BART_ATTENTION = {"q_proj": (Q,), "k_proj": (K,), "v_proj": (V,), "out_proj": (OUT,)}


def bart_stack(kind: str, *, is_post: bool) -> Stack:
    """BART's names; a post-norm stands behind each sublayer's sum, a pre-norm in front of the sublayer."""
    is_decoder = kind == "decoder"
    if is_post:
        norms = {
            "self_attn_layer_norm": NormRow(
                NormPlace.AFTER_ATTENTION, ("encoder_attn.q_proj",) if is_decoder else ("fc1",)
            ),
            "encoder_attn_layer_norm": NormRow(NormPlace.AFTER_CROSS_ATTENTION, ("fc1",)),
            "final_layer_norm": NormRow(
                NormPlace.AFTER_FFN,
                feeds_next_block=BART_READ_BY_ATTENTION,
                feeds_head=is_decoder,
                feeds_cross_attention=not is_decoder,
            ),
        }
    else:
        norms = {
            "self_attn_layer_norm": NormRow(NormPlace.BEFORE_ATTENTION, BART_READ_BY_ATTENTION),
            "encoder_attn_layer_norm": NormRow(NormPlace.BEFORE_CROSS_ATTENTION, ("encoder_attn.q_proj",)),
            "final_layer_norm": NormRow(NormPlace.BEFORE_FFN, ("fc1",)),
        }
    return Stack(
        path=f"{kind}.layers.*",
        kind=kind,
        projections={
            **{f"self_attn.{name}": roles for name, roles in BART_ATTENTION.items()},
            "fc1": (UP,),
            "fc2": (DOWN,),
        },
        cross_projections={
            f"encoder_attn.{name}": roles for name, roles in BART_ATTENTION.items() if is_decoder
        },
        norms={name: row for name, row in norms.items() if is_decoder or name != "encoder_attn_layer_norm"},
        activation="activation_fn",
    )


BART_EMBEDDINGS = {
    **dict.fromkeys(("shared", "encoder.embed_tokens", "decoder.embed_tokens"), TOKEN),
    **dict.fromkeys(("encoder.embed_positions", "decoder.embed_positions"), POSITION),
}
BART_TINY = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
SCALED_BY_CONFIG = ByConfig(key="scale_embedding", absent=False, values={True: True, False: False})
ENDS_OF_PRE_NORMS = {
    "encoder.layer_norm": NormRow(NormPlace.FINAL, feeds_cross_attention=True),
    "decoder.layer_norm": FINAL_NORM,
}
BART = Family(
    name="bart",
    model_types=("bart",),
    stacks=(bart_stack("encoder", is_post=True), bart_stack("decoder", is_post=True)),
    embeddings=BART_EMBEDDINGS,
    outer_norms={
        f"{kind}.layernorm_embedding": NormRow(NormPlace.EMBEDDING, feeds_next_block=BART_READ_BY_ATTENTION)
        for kind in ("encoder", "decoder")
    },
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.POST,
    position=PositionKind.LEARNED,
    position_offset=2,
    scales_embedding=SCALED_BY_CONFIG,
    logit_bias="final_logits_bias",
    tiny_class="BartForConditionalGeneration",
    tiny=BART_TINY,
    variants=({"scale_embedding": True, "activation_function": "relu", "decoder_layers": 3},),
)

MBART = replace(
    BART,
    name="mbart",
    model_types=("mbart",),
    stacks=(bart_stack("encoder", is_post=False), bart_stack("decoder", is_post=False)),
    outer_norms={
        **{f"{kind}.layernorm_embedding": NormRow(NormPlace.EMBEDDING) for kind in ("encoder", "decoder")},
        **ENDS_OF_PRE_NORMS,
    },
    placement=NormPlacement.PRE,
    tiny_class="MBartForConditionalGeneration",
    variants=({"scale_embedding": True},),
)

MARIAN = replace(
    BART,
    name="marian",
    model_types=("marian",),
    outer_norms={},
    position_offset=0,
    tiny_class="MarianMTModel",
    tiny={**BART_TINY, "scale_embedding": True, "activation_function": "swish"},
    variants=({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61},),
)

PEGASUS = replace(
    BART,
    name="pegasus",
    model_types=("pegasus",),
    stacks=MBART.stacks,
    outer_norms=ENDS_OF_PRE_NORMS,
    placement=NormPlacement.PRE,
    position_offset=0,
    tiny_class="PegasusForConditionalGeneration",
    tiny={**BART_TINY, "scale_embedding": True},
    variants=(),
)
