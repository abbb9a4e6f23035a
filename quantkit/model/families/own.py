"""Rows of the models that quantkit brings itself."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.schema import (
    BERT_TINY,
    DOWN,
    FINAL_NORM,
    GATE,
    LLAMA_ATTENTION,
    LLAMA_FFN,
    LLAMA_TINY,
    READ_BY_ATTENTION,
    READ_BY_FFN,
    TOKEN,
    UP,
    ByConfig,
    Family,
    NormRow,
    Stack,
)
from quantkit.model.model_map import NormKind, NormPlace, NormPlacement, PositionKind, Role


def norms_by_placement(read_by_ffn: tuple[str, ...], *, has_ffn: bool = True) -> ByConfig:
    """The norms of a block under each placement; `read_by_ffn` are the projections after the FFN's norm."""
    before_attention = NormRow(NormPlace.BEFORE_ATTENTION, READ_BY_ATTENTION)
    before_ffn = NormRow(NormPlace.BEFORE_FFN, read_by_ffn)
    after_attention = (
        NormRow(NormPlace.AFTER_ATTENTION, read_by_ffn)
        if has_ffn
        else NormRow(NormPlace.AFTER_ATTENTION, feeds_next_block=READ_BY_ATTENTION, feeds_head=True)
    )
    return ByConfig(
        key="norm_placement",
        absent="pre",
        values={
            "pre": {"attention_norm": before_attention, "ffn_norm": before_ffn},
            "post": {
                "attention_norm": after_attention,
                "ffn_norm": NormRow(NormPlace.AFTER_FFN, feeds_next_block=READ_BY_ATTENTION, feeds_head=True),
            },
            "sandwich": {
                "attention_norm": before_attention,
                "attention_output_norm": NormRow(NormPlace.AFTER_ATTENTION),
                "ffn_norm": before_ffn,
                "ffn_output_norm": NormRow(NormPlace.AFTER_FFN),
            },
        },
    )


WITH_FFN = norms_by_placement(READ_BY_FFN)

REFERENCE = Family(
    name="quantkit_reference",
    model_types=("quantkit_reference",),
    stacks=(
        Stack(
            path="layers.*",
            kind="decoder",
            projections={**LLAMA_ATTENTION, **LLAMA_FFN},
            norms=ByConfig(
                key="ffn_kind",
                absent="gated",
                values={
                    "gated": WITH_FFN,
                    "standard": WITH_FFN,
                    "none": norms_by_placement((), has_ffn=False),
                },
            ),
            activation="mlp.act_fn",
        ),
    ),
    embeddings={"embed_tokens": TOKEN},
    outer_norms={"norm": FINAL_NORM},
    norm_kind=ByConfig(key="norm_kind", absent="rms_norm", values={kind.value: kind for kind in NormKind}),
    placement=ByConfig(
        key="norm_placement", absent="pre", values={placement.value: placement for placement in NormPlacement}
    ),
    position=PositionKind.ROPE,
    tiny_class="ReferenceForCausalLM",
    tiny=LLAMA_TINY,
    variants=(
        {"ffn_kind": "standard", "hidden_act": "relu", "norm_kind": "layer_norm", "uses_bias": True},
        {"norm_placement": "post", "hidden_act": "gelu", "tie_word_embeddings": True},
        {"norm_placement": "sandwich", "norm_kind": "layer_norm", "hidden_act": "gelu_pytorch_tanh"},
    ),
)

ENCODER_STACK = Stack(
    path="encoder.layers.*",
    kind="encoder",
    projections={**LLAMA_ATTENTION, **LLAMA_FFN},
    norms=WITH_FFN.values["pre"],
    activation="mlp.act_fn",
)

ONE_WIDE = Family(
    name="quantkit_one_wide",
    model_types=("quantkit_one_wide",),
    stacks=(
        ENCODER_STACK,
        replace(
            ENCODER_STACK,
            path="decoder.layers.*",
            kind="decoder",
            cross_projections={
                name.replace("self_attn", "cross_attn"): role for name, role in LLAMA_ATTENTION.items()
            },
            norms={
                **WITH_FFN.values["pre"],
                "cross_norm": NormRow(NormPlace.BEFORE_CROSS_ATTENTION, ("cross_attn.q_proj",)),
            },
        ),
    ),
    embeddings={"shared": TOKEN},
    outer_norms={
        "encoder.norm": NormRow(NormPlace.FINAL, feeds_cross_attention=True),
        "decoder.norm": FINAL_NORM,
    },
    norm_kind=REFERENCE.norm_kind,
    placement=NormPlacement.PRE,
    position=PositionKind.ROPE,
    tiny_class="OneWideForConditionalGeneration",
    tiny={**BERT_TINY, "num_key_value_heads": 2, "num_decoder_layers": 2, "pad_token_id": 0},
    variants=(
        {"encoder_ffn": "own", "decoder_ffn": "own", "tie_word_embeddings": True},
        {"ffn_kind": "standard", "hidden_act": "relu", "norm_kind": "layer_norm", "uses_bias": True},
    ),
)


WS_FFN = replace(
    REFERENCE,
    name="ws_ffn",
    model_types=("ws_ffn",),
    stacks=(
        replace(
            REFERENCE.stacks[0],
            projections={
                **LLAMA_ATTENTION,
                "mlp.w3": (GATE,),
                "mlp.w1": (UP,),
                "mlp.latent": (Role.FFN_LATENT,),
                "mlp.w2": (DOWN,),
            },
            training_only={"mlp.latent": "num_latent_heads"},
            norms=norms_by_placement(("mlp.w3", "mlp.w1")),
            activation="mlp.activation",
        ),
    ),
    tiny_class="WsFfnForCausalLM",
    tiny={**LLAMA_TINY, "num_latent_heads": 4},
    variants=(
        {"norm_placement": "post", "norm_kind": "layer_norm", "tie_word_embeddings": True},
        {"norm_placement": "sandwich", "num_latent_heads": 3},
    ),
)
