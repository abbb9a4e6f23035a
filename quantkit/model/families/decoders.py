"""What quantkit knows of each architecture family: one row of facts each, and nothing anywhere else.

A row says where the blocks are, which module plays which role, which norm feeds what, and how positions
are told; it also carries the tiny config on which one contract test checks every word of it by tracing
the real transformers modules. An architecture without a row still maps, with role OTHER throughout.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.encoders import ALBERT, BERT, DISTILBERT, ROBERTA, T5
from quantkit.model.families.own import ONE_WIDE, REFERENCE
from quantkit.model.families.schema import HEAD, ByConfig, Family, Stack
from quantkit.model.families.spellings import (
    BERT_TINY,
    DOWN,
    GATE,
    GEMMA_TINY,
    LLAMA_STACK,
    LLAMA_TINY,
    OPT_POST_NORMS,
    OUT,
    POSITION,
    READ_BY_ATTENTION,
    SANDWICH_NORMS,
    TOKEN,
    UP,
    K,
    Q,
    V,
)
from quantkit.model.families.ws_ffn_row import WS_FFN
from quantkit.model.model_map import NormKind, NormPlacement, PositionKind, Residual

GPT2 = Family(
    model_types=("gpt2",),
    stacks=(
        Stack(
            path="h.*",
            kind="decoder",
            projections={
                "attn.c_attn": (Q, K, V),
                "attn.c_proj": (OUT,),
                "mlp.c_fc": (UP,),
                "mlp.c_proj": (DOWN,),
            },
            norms={"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
            activation="mlp.act",
        ),
    ),
    embeddings={"wte": TOKEN, "wpe": POSITION},
    outer_norms={"ln_f": (HEAD,)},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.LEARNED,
    tiny_class="GPT2LMHeadModel",
    tiny={"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
    variants=({"activation_function": "relu", "n_inner": 48},),
)

OPT = Family(
    model_types=("opt",),
    stacks=(
        Stack(
            path="decoder.layers.*",
            kind="decoder",
            projections={
                "self_attn.q_proj": (Q,),
                "self_attn.k_proj": (K,),
                "self_attn.v_proj": (V,),
                "self_attn.out_proj": (OUT,),
                "fc1": (UP,),
                "fc2": (DOWN,),
            },
            norms=ByConfig(
                key="do_layer_norm_before",
                absent=True,
                values={
                    True: {"self_attn_layer_norm": READ_BY_ATTENTION, "final_layer_norm": ("fc1",)},
                    False: OPT_POST_NORMS,
                },
            ),
            activation="activation_fn",
        ),
    ),
    embeddings={"decoder.embed_tokens": TOKEN, "decoder.embed_positions": POSITION},
    outer_norms={"decoder.final_layer_norm": (HEAD,)},
    other={"decoder.project_in": "enters", "decoder.project_out": "leaves"},
    norm_kind=NormKind.LAYER_NORM,
    placement=ByConfig(
        key="do_layer_norm_before", absent=True, values={True: NormPlacement.PRE, False: NormPlacement.POST}
    ),
    position=PositionKind.LEARNED,
    position_offset=2,
    tiny_class="OPTForCausalLM",
    tiny={**BERT_TINY, "ffn_dim": 48, "word_embed_proj_dim": 32},
    variants=({"do_layer_norm_before": False, "word_embed_proj_dim": 16},),  # OPT-350m is such a one
)

GPT_NEOX = Family(
    model_types=("gpt_neox",),
    stacks=(
        Stack(
            path="layers.*",
            kind="decoder",
            projections={
                "attention.query_key_value": (Q, K, V),
                "attention.dense": (OUT,),
                "mlp.dense_h_to_4h": (UP,),
                "mlp.dense_4h_to_h": (DOWN,),
            },
            norms={
                "input_layernorm": ("attention.query_key_value",),
                "post_attention_layernorm": ("mlp.dense_h_to_4h",),
            },
            activation="mlp.act",
        ),
    ),
    embeddings={"embed_in": TOKEN},
    outer_norms={"final_layer_norm": (HEAD,)},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    residual=ByConfig(
        key="use_parallel_residual", absent=True, values={True: Residual.PARALLEL, False: Residual.SEQUENTIAL}
    ),
    interleaves_heads=True,
    position=PositionKind.ROPE,
    names={"lm_head": "embed_out"},
    tiny_class="GPTNeoXForCausalLM",
    tiny=BERT_TINY,
    variants=({"use_parallel_residual": False},),
)

BLOOM = Family(
    model_types=("bloom",),
    stacks=(
        Stack(
            path="h.*",
            kind="decoder",
            projections={
                "self_attention.query_key_value": (Q, K, V),
                "self_attention.dense": (OUT,),
                "mlp.dense_h_to_4h": (UP,),
                "mlp.dense_4h_to_h": (DOWN,),
            },
            norms={
                "input_layernorm": ("self_attention.query_key_value",),
                "post_attention_layernorm": ("mlp.dense_h_to_4h",),
            },
            activation="mlp.gelu_impl",
        ),
    ),
    embeddings={"word_embeddings": TOKEN},
    outer_norms={"word_embeddings_layernorm": (), "ln_f": (HEAD,)},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    interleaves_heads=True,
    position=PositionKind.ALIBI,
    tiny_class="BloomForCausalLM",
    tiny={"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
)

LLAMA = Family(
    model_types=("llama",),
    stacks=(LLAMA_STACK,),
    embeddings={"embed_tokens": TOKEN},
    outer_norms={"norm": (HEAD,)},
    norm_kind=NormKind.RMS_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.ROPE,
    tiny_class="LlamaForCausalLM",
    tiny=LLAMA_TINY,
    variants=({"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},),
)

QWEN3_STACK = replace(LLAMA_STACK, query_key_norms=("self_attn.q_norm", "self_attn.k_norm"))

GEMMA = replace(
    LLAMA,
    model_types=("gemma",),
    norm_gain_offset=1.0,
    scales_embedding=True,
    tiny_class="GemmaForCausalLM",
    tiny=GEMMA_TINY,
    variants=(),
)

GEMMA2 = replace(
    GEMMA,
    model_types=("gemma2",),
    stacks=(replace(LLAMA_STACK, norms=SANDWICH_NORMS),),
    placement=NormPlacement.SANDWICH,
    tiny_class="Gemma2ForCausalLM",
    tiny={**GEMMA_TINY, "sliding_window": 8},
)

PHI3 = replace(
    LLAMA,
    model_types=("phi3",),
    stacks=(
        Stack(
            path="layers.*",
            kind="decoder",
            projections={
                "self_attn.qkv_proj": (Q, K, V),
                "self_attn.o_proj": (OUT,),
                "mlp.gate_up_proj": (GATE, UP),
                "mlp.down_proj": (DOWN,),
            },
            norms={
                "input_layernorm": ("self_attn.qkv_proj",),
                "post_attention_layernorm": ("mlp.gate_up_proj",),
            },
            activation="mlp.activation_fn",
        ),
    ),
    tiny_class="Phi3ForCausalLM",
    variants=(),
)

FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "opt": OPT,
    "gpt_neox": GPT_NEOX,
    "bloom": BLOOM,
    "llama": LLAMA,
    "mistral": replace(
        LLAMA,
        model_types=("mistral",),
        tiny_class="MistralForCausalLM",
        tiny={**LLAMA_TINY, "sliding_window": 8},
        variants=(),
    ),
    "qwen2": replace(LLAMA, model_types=("qwen2",), tiny_class="Qwen2ForCausalLM", variants=()),
    "qwen3": replace(
        LLAMA,
        model_types=("qwen3",),
        stacks=(QWEN3_STACK,),
        tiny_class="Qwen3ForCausalLM",
        tiny=GEMMA_TINY,
        variants=(),
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": replace(
        GEMMA2,
        model_types=("gemma3_text",),
        stacks=(replace(QWEN3_STACK, norms=SANDWICH_NORMS),),
        tiny_class="Gemma3ForCausalLM",
    ),
    "phi3": PHI3,
    "bert": BERT,
    "roberta": ROBERTA,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "t5": T5,
    "quantkit_reference": REFERENCE,
    "quantkit_one_wide": ONE_WIDE,
    "ws_ffn": WS_FFN,
}


def family_of(model_type: str) -> tuple[str, Family] | None:
    """The row for a config's `model_type`, or None; never another family's facts."""
    return next(((name, row) for name, row in FAMILIES.items() if model_type in row.model_types), None)
