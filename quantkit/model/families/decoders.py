"""Rows of the published decoder families."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.config import FULL, SLIDING
from quantkit.model.families.schema import (
    BERT_TINY,
    DOWN,
    FINAL_NORM,
    GATE,
    GEMMA_TINY,
    LLAMA_ATTENTION,
    LLAMA_EXPERTS,
    LLAMA_STACK,
    LLAMA_TINY,
    ONE_NORM_FOR_BOTH,
    OUT,
    OUTPUT_NORMS,
    POSITION,
    PRE_NORMS,
    QUERY_KEY_NORMS,
    READ_BY_ATTENTION,
    READ_BY_EXPERTS,
    READ_BY_FFN,
    ROUTER,
    SANDWICH_NORMS,
    SHARED_GATE,
    TOKEN,
    UP,
    ByConfig,
    Family,
    K,
    MixtureRow,
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
    fused_rows="by head",
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
    fused_rows="by head",
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

SEED_OSS = replace(
    LLAMA,
    name="seed_oss",
    model_types=("seed_oss",),
    tiny_class="SeedOssForCausalLM",
    tiny=GEMMA_TINY,
    variants=(),
)

SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    model_types=("smollm3",),
    windows="layer_types",
    tiny_class="SmolLM3ForCausalLM",
    tiny={**LLAMA_TINY, "no_rope_layer_interval": 2},
    variants=({"use_sliding_window": True, "sliding_window": 8},),
)

GRANITE = replace(
    LLAMA,
    name="granite",
    model_types=("granite",),
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    logit_divisor="logits_scaling",
    tiny_class="GraniteForCausalLM",
    tiny={
        **LLAMA_TINY,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    variants=({"tie_word_embeddings": True},),
)

ARCEE = replace(
    LLAMA,
    name="arcee",
    model_types=("arcee",),
    stacks=(
        replace(
            LLAMA_STACK,
            projections={**LLAMA_ATTENTION, "mlp.up_proj": (UP,), "mlp.down_proj": (DOWN,)},
        ),
    ),
    tiny_class="ArceeForCausalLM",
    variants=(),
)

NEMOTRON = replace(
    ARCEE,
    name="nemotron",
    model_types=("nemotron",),
    norm_kind=NormKind.LAYER_NORM,
    norm_gain_offset=1.0,
    tiny_class="NemotronForCausalLM",
    tiny={**LLAMA_TINY, "head_dim": 8},
)

STARCODER2 = replace(
    LLAMA,
    name="starcoder2",
    model_types=("starcoder2",),
    stacks=(
        replace(
            LLAMA_STACK,
            projections={**LLAMA_ATTENTION, "mlp.c_fc": (UP,), "mlp.c_proj": (DOWN,)},
            norms={
                "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, READ_BY_ATTENTION),
                "post_attention_layernorm": NormRow(NormPlace.BEFORE_FFN, ("mlp.c_fc",)),
            },
            activation="mlp.act",
        ),
    ),
    norm_kind=NormKind.LAYER_NORM,
    windows="every layer",
    tiny_class="Starcoder2ForCausalLM",
    tiny={**LLAMA_TINY, "sliding_window": 8},
    variants=({"use_bias": False, "sliding_window": None},),
)

PHI = replace(
    LLAMA,
    name="phi",
    model_types=("phi",),
    stacks=(
        Stack(
            path="layers.*",
            kind="decoder",
            projections={
                "self_attn.q_proj": (Q,),
                "self_attn.k_proj": (K,),
                "self_attn.v_proj": (V,),
                "self_attn.dense": (OUT,),
                "mlp.fc1": (UP,),
                "mlp.fc2": (DOWN,),
            },
            norms={
                "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, (*READ_BY_ATTENTION, "mlp.fc1")),
                "self_attn.q_layernorm": NormRow(NormPlace.QUERY),
                "self_attn.k_layernorm": NormRow(NormPlace.KEY),
            },
            activation="mlp.activation_fn",
        ),
    ),
    outer_norms={"final_layernorm": FINAL_NORM},
    norm_kind=NormKind.LAYER_NORM,
    residual=Residual.PARALLEL,
    tiny_class="PhiForCausalLM",
    variants=({"qk_layernorm": True},),
)

STABLELM = replace(
    LLAMA,
    name="stablelm",
    model_types=("stablelm",),
    stacks=(
        replace(
            LLAMA_STACK,
            norms=ByConfig(
                key="use_parallel_residual",
                absent=False,
                values={False: PRE_NORMS, True: ONE_NORM_FOR_BOTH},
            ),
        ),
    ),
    norm_kind=NormKind.LAYER_NORM,
    residual=ByConfig(
        key="use_parallel_residual",
        absent=False,
        values={True: Residual.PARALLEL, False: Residual.SEQUENTIAL},
    ),
    tiny_class="StableLmForCausalLM",
    variants=({"use_parallel_residual": True, "use_qkv_bias": True},),
)

COHERE = replace(
    LLAMA,
    name="cohere",
    model_types=("cohere",),
    stacks=(replace(LLAMA_STACK, norms=ONE_NORM_FOR_BOTH),),
    norm_kind=NormKind.LAYER_NORM,
    residual=Residual.PARALLEL,
    rotates_neighbours=True,
    logit_multiplier="logit_scale",
    tiny_class="CohereForCausalLM",
    variants=({"logit_scale": 0.5, "attention_bias": True},),
)

COHERE2 = replace(
    COHERE,
    name="cohere2",
    model_types=("cohere2",),
    windows="layer_types",
    positions_need_window=True,
    tiny_class="Cohere2ForCausalLM",
    tiny={**LLAMA_TINY, "head_dim": 8, "sliding_window": 8, "layer_types": [SLIDING, FULL]},
    variants=(),
)

HELIUM = replace(
    LLAMA,
    name="helium",
    model_types=("helium",),
    rotates_neighbours=True,
    tiny_class="HeliumForCausalLM",
    tiny={**LLAMA_TINY, "head_dim": 8},
    variants=(),
)

ERNIE = replace(
    HELIUM,
    name="ernie4_5",
    model_types=("ernie4_5",),
    tiny_class="Ernie4_5ForCausalLM",
    tiny=GEMMA_TINY,
    variants=({"use_bias": True},),
)

GLM_NORMS = {
    "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, READ_BY_ATTENTION),
    "post_attention_layernorm": NormRow(NormPlace.BEFORE_FFN, ("mlp.gate_up_proj",)),
}
GLM = replace(
    HELIUM,
    name="glm",
    model_types=("glm",),
    stacks=(
        replace(
            LLAMA_STACK,
            projections={**LLAMA_ATTENTION, "mlp.gate_up_proj": (GATE, UP), "mlp.down_proj": (DOWN,)},
            norms=GLM_NORMS,
            activation="mlp.activation_fn",
        ),
    ),
    tiny_class="GlmForCausalLM",
    tiny=GEMMA_TINY,
    variants=(),
)

GLM4 = replace(
    GLM,
    name="glm4",
    model_types=("glm4",),
    stacks=(
        replace(
            GLM.stacks[0],
            norms={
                **GLM_NORMS,
                "post_self_attn_layernorm": NormRow(NormPlace.AFTER_ATTENTION),
                "post_mlp_layernorm": NormRow(NormPlace.AFTER_FFN),
            },
        ),
    ),
    placement=NormPlacement.SANDWICH,
    tiny_class="Glm4ForCausalLM",
)

GPTJ = Family(
    name="gptj",
    model_types=("gptj",),
    stacks=(
        Stack(
            path="h.*",
            kind="decoder",
            projections={
                "attn.q_proj": (Q,),
                "attn.k_proj": (K,),
                "attn.v_proj": (V,),
                "attn.out_proj": (OUT,),
                "mlp.fc_in": (UP,),
                "mlp.fc_out": (DOWN,),
            },
            norms={
                "ln_1": NormRow(
                    NormPlace.BEFORE_ATTENTION, ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in")
                )
            },
            activation="mlp.act",
        ),
    ),
    embeddings={"wte": TOKEN},
    outer_norms={"ln_f": FINAL_NORM},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    residual=Residual.PARALLEL,
    position=PositionKind.ROPE,
    rotates_neighbours=True,
    fixed_theta=10_000.0,
    tiny_class="GPTJForCausalLM",
    tiny={**GPT2.tiny, "rotary_dim": 4},
)

CODEGEN = replace(
    GPTJ,
    name="codegen",
    model_types=("codegen",),
    stacks=(
        replace(
            GPTJ.stacks[0],
            projections={
                "attn.qkv_proj": (Q, V, K),
                "attn.out_proj": (OUT,),
                "mlp.fc_in": (UP,),
                "mlp.fc_out": (DOWN,),
            },
            norms={"ln_1": NormRow(NormPlace.BEFORE_ATTENTION, ("attn.qkv_proj", "mlp.fc_in"))},
        ),
    ),
    fused_rows=4,
    tiny_class="CodeGenForCausalLM",
)

GPT_BIGCODE = replace(
    GPT2,
    name="gpt_bigcode",
    model_types=("gpt_bigcode",),
    fused_rows=ByConfig(key="multi_query", absent=True, values={True: "end to end", False: "by head"}),
    tiny_class="GPTBigCodeForCausalLM",
    variants=({"multi_query": False},),
)

FALCON_TWO_NORMS = {
    "ln_attn": NormRow(NormPlace.BEFORE_ATTENTION, ("self_attention.query_key_value",)),
    "ln_mlp": NormRow(NormPlace.BEFORE_FFN, ("mlp.dense_h_to_4h",)),
}
FALCON_ONE_NORM = {
    "input_layernorm": NormRow(
        NormPlace.BEFORE_ATTENTION, ("self_attention.query_key_value", "mlp.dense_h_to_4h")
    )
}
FALCON = replace(
    BLOOM,
    name="falcon",
    model_types=("falcon",),
    stacks=(
        replace(
            BLOOM.stacks[0],
            norms=ByConfig(
                key="new_decoder_architecture",
                absent=False,
                values={
                    True: ByConfig(
                        key="num_ln_in_parallel_attn",
                        absent=None,
                        values={None: FALCON_TWO_NORMS, 2: FALCON_TWO_NORMS, 1: FALCON_ONE_NORM},
                    ),
                    False: ByConfig(
                        key="parallel_attn",
                        absent=True,
                        values={True: FALCON_ONE_NORM, False: BLOOM.stacks[0].norms},
                    ),
                },
            ),
            activation="mlp.act",
        ),
    ),
    outer_norms={"ln_f": FINAL_NORM},
    position=ByConfig(key="alibi", absent=False, values={False: PositionKind.ROPE, True: PositionKind.ALIBI}),
    residual=ByConfig(
        key="new_decoder_architecture",
        absent=False,
        values={
            True: Residual.PARALLEL,
            False: ByConfig(
                key="parallel_attn",
                absent=True,
                values={True: Residual.PARALLEL, False: Residual.SEQUENTIAL},
            ),
        },
    ),
    tiny_class="FalconForCausalLM",
    tiny=BERT_TINY,
    variants=(
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"parallel_attn": False, "multi_query": False, "bias": True},
    ),
)

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    model_types=("olmo2",),
    stacks=(replace(LLAMA_STACK, norms={**OUTPUT_NORMS, **QUERY_KEY_NORMS}),),
    placement=NormPlacement.OUTPUT,
    tiny_class="Olmo2ForCausalLM",
    variants=(),
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    model_types=("olmo3",),
    windows="layer_types",
    tiny_class="Olmo3ForCausalLM",
    tiny={**LLAMA_TINY, "sliding_window": 8, "layer_types": [SLIDING, FULL]},
)

EXAONE4 = replace(
    OLMO2,
    name="exaone4",
    model_types=("exaone4",),
    windows="layer_types",
    positions_need_window=True,
    tiny_class="Exaone4ForCausalLM",
    tiny={**LLAMA_TINY, "head_dim": 8, "sliding_window": 8, "layer_types": [SLIDING, FULL]},
    variants=({"sliding_window": None, "layer_types": [FULL, FULL]},),
)

OLMO = replace(
    LLAMA,
    name="olmo",
    model_types=("olmo",),
    norm_kind=NormKind.LAYER_NORM,  # without weights
    clips_projections="clip_qkv",
    tiny_class="OlmoForCausalLM",
    variants=({"clip_qkv": 0.5, "tie_word_embeddings": True},),
)

MIXTRAL_EXPERTS = {
    "block_sparse_moe.gate": (ROUTER,),
    "block_sparse_moe.experts.*.w1": (GATE,),
    "block_sparse_moe.experts.*.w3": (UP,),
    "block_sparse_moe.experts.*.w2": (DOWN,),
}
MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    model_types=("mixtral",),
    stacks=(
        replace(
            LLAMA_STACK,
            projections={**LLAMA_ATTENTION, **MIXTRAL_EXPERTS},
            norms={
                **PRE_NORMS,
                "post_attention_layernorm": NormRow(
                    NormPlace.BEFORE_FFN,
                    (
                        "block_sparse_moe.gate",
                        "block_sparse_moe.experts.*.w1",
                        "block_sparse_moe.experts.*.w3",
                    ),
                ),
            },
            mixture=MixtureRow(activation="block_sparse_moe.experts.0.act_fn"),
        ),
    ),
    names={"mlp": "block_sparse_moe"},
    tiny_class="MixtralForCausalLM",
    tiny={**LLAMA_TINY, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8},
    variants=({"sliding_window": None},),
)

MOE_TINY = {"moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2}
BEFORE_EXPERTS = {
    **PRE_NORMS,
    "post_attention_layernorm": NormRow(NormPlace.BEFORE_FFN, (*READ_BY_FFN, *READ_BY_EXPERTS)),
}
CHOSEN_ADD_UP = ByConfig(key="norm_topk_prob", absent=False, values={True: True, False: False})
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    stacks=(
        replace(
            LLAMA_STACK,
            projections={**LLAMA_STACK.projections, **LLAMA_EXPERTS},
            norms={**BEFORE_EXPERTS, **QUERY_KEY_NORMS},
            mixture=MixtureRow(activation="mlp.experts.0.act_fn", normalises=CHOSEN_ADD_UP),
        ),
    ),
    tiny_class="Qwen3MoeForCausalLM",
    tiny={**GEMMA_TINY, **MOE_TINY, "norm_topk_prob": True},
    variants=({"norm_topk_prob": False, "mlp_only_layers": [0]},),
)

SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": (GATE,),
    "mlp.shared_expert.up_proj": (UP,),
    "mlp.shared_expert.down_proj": (DOWN,),
    "mlp.shared_expert_gate": (SHARED_GATE,),
}
QWEN2_MOE = replace(
    QWEN2,
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    stacks=(
        replace(
            LLAMA_STACK,
            projections={**LLAMA_STACK.projections, **LLAMA_EXPERTS, **SHARED_EXPERT},
            norms={
                **PRE_NORMS,
                "post_attention_layernorm": NormRow(
                    NormPlace.BEFORE_FFN,
                    (
                        *(*READ_BY_FFN, *READ_BY_EXPERTS, "mlp.shared_expert_gate"),
                        *("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
                    ),
                ),
            },
            mixture=MixtureRow(activation="mlp.experts.0.act_fn", normalises=CHOSEN_ADD_UP),
        ),
    ),
    tiny_class="Qwen2MoeForCausalLM",
    tiny={**LLAMA_TINY, **MOE_TINY, "shared_expert_intermediate_size": 40},
    variants=({"norm_topk_prob": True, "decoder_sparse_step": 2},),
)

OLMOE = replace(
    LLAMA,
    name="olmoe",
    model_types=("olmoe",),
    stacks=(
        replace(
            LLAMA_STACK,
            projections={**LLAMA_ATTENTION, **LLAMA_EXPERTS},
            norms={**BEFORE_EXPERTS, **QUERY_KEY_NORMS},
            mixture=MixtureRow(activation="mlp.experts.0.act_fn", normalises=CHOSEN_ADD_UP),
        ),
    ),
    clips_projections="clip_qkv",
    tiny_class="OlmoeForCausalLM",
    tiny={**LLAMA_TINY, "num_experts": 3, "num_experts_per_tok": 2},
    variants=({"norm_topk_prob": True, "clip_qkv": 0.5},),
)
