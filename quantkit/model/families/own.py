"""Rows of the models that quantkit brings itself."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.schema import CROSS, HEAD, LAST, ByConfig, Family, Stack
from quantkit.model.families.spellings import (
    BERT_TINY,
    LLAMA_ATTENTION,
    LLAMA_FFN,
    LLAMA_TINY,
    READ_BY_ATTENTION,
    READ_BY_FFN,
    TOKEN,
)
from quantkit.model.model_map import NormKind, NormPlacement, PositionKind

READ_NEXT = (*(f">{name}" for name in READ_BY_ATTENTION), LAST)


def norms_with(read_by_ffn: tuple[str, ...]) -> ByConfig:
    """The norms of a block by where they stand, for an FFN that is read by these projections."""
    return ByConfig(
        key="norm_placement",
        absent="pre",
        values={
            "pre": {"attention_norm": READ_BY_ATTENTION, "ffn_norm": read_by_ffn},
            "post": {"attention_norm": read_by_ffn, "ffn_norm": READ_NEXT},
            "sandwich": {
                "attention_norm": READ_BY_ATTENTION,
                "attention_output_norm": (),
                "ffn_norm": read_by_ffn,
                "ffn_output_norm": (),
            },
        },
    )


WITH_FFN = norms_with(READ_BY_FFN)
WITHOUT_FFN = ByConfig(
    key="norm_placement",
    absent="pre",
    values={
        "pre": {"attention_norm": READ_BY_ATTENTION},
        "post": {"attention_norm": READ_NEXT},
        "sandwich": {"attention_norm": READ_BY_ATTENTION, "attention_output_norm": ()},
    },
)

REFERENCE = Family(
    model_types=("quantkit_reference",),
    stacks=(
        Stack(
            path="layers.*",
            kind="decoder",
            projections={**LLAMA_ATTENTION, **LLAMA_FFN},
            norms=ByConfig(
                key="ffn_kind",
                absent="gated",
                values={"gated": WITH_FFN, "standard": WITH_FFN, "none": WITHOUT_FFN},
            ),
            activation="mlp.act_fn",
        ),
    ),
    embeddings={"embed_tokens": TOKEN},
    outer_norms={"norm": (HEAD,)},
    norm_kind=ByConfig(key="norm_kind", absent="rms_norm", values={kind.value: kind for kind in NormKind}),
    placement=ByConfig(
        key="norm_placement", absent="pre", values={each.value: each for each in NormPlacement}
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
    norms={"attention_norm": READ_BY_ATTENTION, "ffn_norm": READ_BY_FFN},
    activation="mlp.act_fn",
)

ONE_WIDE = Family(
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
                "attention_norm": READ_BY_ATTENTION,
                "cross_norm": ("cross_attn.q_proj",),
                "ffn_norm": READ_BY_FFN,
            },
        ),
    ),
    embeddings={"shared": TOKEN},
    outer_norms={"encoder.norm": (CROSS,), "decoder.norm": (HEAD,)},
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
