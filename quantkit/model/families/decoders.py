"""Rows of the published decoder families."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.schema import (
    BERT_TINY,
    DOWN,
    FINAL_NORM,
    GATE,
    GEMMA_TINY,
    LLAMA_STACK,
    LLAMA_TINY,
    OUT,
    POSITION,
    PRE_NORMS,
    QUERY_KEY_NORMS,
    READ_BY_ATTENTION,
    SANDWICH_NORMS,
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
from quantkit.model.model_map import NormKind, NormPlace, NormPlacement, PositionKind, Residual

GPT2 = Family(
    name="gpt2",
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
            norms={
                "ln_1": NormRow(NormPlace.BEFORE_ATTENTION, ("attn.c_attn",)),
                "ln_2": NormRow(NormPlace.BEFORE_FFN, ("mlp.c_fc",)),
            },
            activation="mlp.act",
        ),
    ),
    embeddings={"wte": TOKEN, "wpe": POSITION},
    outer_norms={"ln_f": FINAL_NORM},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.LEARNED,
    tiny_class="GPT2LMHeadModel",
    tiny={"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
    variants=({"activation_function": "relu", "n_inner": 48},),
)

OPT = Family(
    name="opt",
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
                    True: {
                        "self_attn_layer_norm": NormRow(NormPlace.BEFORE_ATTENTION, READ_BY_ATTENTION),
                        "final_layer_norm": NormRow(NormPlace.BEFORE_FFN, ("fc1",)),
                    },
                    False: {
                        "self_attn_layer_norm": NormRow(NormPlace.AFTER_ATTENTION, ("fc1",)),
                        "final_layer_norm": NormRow(NormPlace.AFTER_FFN, feeds_next_block=READ_BY_ATTENTION),
                    },
                },
            ),
            activation="activation_fn",
        ),
    ),
    embeddings={"decoder.embed_tokens": TOKEN, "decoder.embed_positions": POSITION},
    outer_norms={"decoder.final_layer_norm": FINAL_NORM},
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
    name="gpt_neox",
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
                "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, ("attention.query_key_value",)),
                "post_attention_layernorm": NormRow(NormPlace.BEFORE_FFN, ("mlp.dense_h_to_4h",)),
            },
            activation="mlp.act",
        ),
    ),
    embeddings={"embed_in": TOKEN},
    outer_norms={"final_layer_norm": FINAL_NORM},
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
    name="bloom",
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
                "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, ("self_attention.query_key_value",)),
                "post_attention_layernorm": NormRow(NormPlace.BEFORE_FFN, ("mlp.dense_h_to_4h",)),
            },
            activation="mlp.gelu_impl",
        ),
    ),
    embeddings={"word_embeddings": TOKEN},
    outer_norms={"word_embeddings_layernorm": NormRow(NormPlace.EMBEDDING), "ln_f": FINAL_NORM},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    interleaves_heads=True,
    position=PositionKind.ALIBI,
    tiny_class="BloomForCausalLM",
    tiny={"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
)

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    stacks=(LLAMA_STACK,),
    embeddings={"embed_tokens": TOKEN},
    outer_norms={"norm": FINAL_NORM},
    norm_kind=NormKind.RMS_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.ROPE,
    tiny_class="LlamaForCausalLM",
    tiny=LLAMA_TINY,
    variants=({"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},),
)

GEMMA = replace(
    LLAMA,
    name="gemma",
    model_types=("gemma",),
    norm_gain_offset=1.0,
    scales_embedding=True,
    tiny_class="GemmaForCausalLM",
    tiny=GEMMA_TINY,
    variants=(),
)

GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    model_types=("gemma2",),
    stacks=(replace(LLAMA_STACK, norms=SANDWICH_NORMS),),
    placement=NormPlacement.SANDWICH,
    windows="layer_types",
    softcaps_scores=True,
    softcaps_logits=True,
    tiny_class="Gemma2ForCausalLM",
    tiny={**GEMMA_TINY, "sliding_window": 8},
)

PHI3 = replace(
    LLAMA,
    name="phi3",
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
                "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, ("self_attn.qkv_proj",)),
                "post_attention_layernorm": NormRow(NormPlace.BEFORE_FFN, ("mlp.gate_up_proj",)),
            },
            activation="mlp.activation_fn",
        ),
    ),
    windows="every layer",
    tiny_class="Phi3ForCausalLM",
    variants=(),
)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    model_types=("mistral",),
    windows="every layer",
    tiny_class="MistralForCausalLM",
    tiny={**LLAMA_TINY, "sliding_window": 8},
    variants=(),
)

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    model_types=("qwen2",),
    windows="layer_types",
    tiny_class="Qwen2ForCausalLM",
    variants=(),
)

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    model_types=("qwen3",),
    stacks=(replace(LLAMA_STACK, norms={**PRE_NORMS, **QUERY_KEY_NORMS}),),
    windows="layer_types",
    tiny_class="Qwen3ForCausalLM",
    tiny=GEMMA_TINY,
    variants=(),
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    model_types=("gemma3_text",),
    stacks=(replace(LLAMA_STACK, norms={**SANDWICH_NORMS, **QUERY_KEY_NORMS}),),
    softcaps_scores=False,  # its class has the field and computes without it
    tiny_class="Gemma3ForCausalLM",
)
