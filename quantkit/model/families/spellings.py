"""Spellings that several families share: module names, roles and tiny configs, named once.

The families table is written with these, so that a row shows only what sets its family apart.
"""

from __future__ import annotations

from quantkit.model.families.schema import HEAD, ByConfig, Stack
from quantkit.model.model_map import EmbeddingKind, PositionKind, Role

Q, K, V, OUT = Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE, Role.ATTENTION_OUT
GATE, UP, DOWN = Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN
TOKEN, POSITION, TOKEN_TYPE = EmbeddingKind.TOKEN, EmbeddingKind.POSITION, EmbeddingKind.TOKEN_TYPE

# Spellings that several families share.
LLAMA_ATTENTION = {
    "self_attn.q_proj": (Q,),
    "self_attn.k_proj": (K,),
    "self_attn.v_proj": (V,),
    "self_attn.o_proj": (OUT,),
}
LLAMA_FFN = {"mlp.gate_proj": (GATE,), "mlp.up_proj": (UP,), "mlp.down_proj": (DOWN,)}
READ_BY_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
READ_BY_FFN = ("mlp.gate_proj", "mlp.up_proj")
SANDWICH_NORMS: dict[str, tuple[str, ...]] = {
    "input_layernorm": READ_BY_ATTENTION,
    "post_attention_layernorm": (),
    "pre_feedforward_layernorm": READ_BY_FFN,
    "post_feedforward_layernorm": (),
}
OPT_POST_NORMS = {
    "self_attn_layer_norm": ("fc1",),
    "final_layer_norm": (">self_attn.q_proj", ">self_attn.k_proj", ">self_attn.v_proj"),
}
LLAMA_STACK = Stack(
    path="layers.*",
    kind="decoder",
    projections={**LLAMA_ATTENTION, **LLAMA_FFN},
    norms={"input_layernorm": READ_BY_ATTENTION, "post_attention_layernorm": READ_BY_FFN},
    activation="mlp.act_fn",
)
BERT_STACK = Stack(
    path="encoder.layer.*",
    kind="encoder",
    projections={
        "attention.self.query": (Q,),
        "attention.self.key": (K,),
        "attention.self.value": (V,),
        "attention.output.dense": (OUT,),
        "intermediate.dense": (UP,),
        "output.dense": (DOWN,),
    },
    norms={
        "attention.output.LayerNorm": ("intermediate.dense",),
        "output.LayerNorm": (">attention.self.query", ">attention.self.key", ">attention.self.value"),
    },
    activation="intermediate.intermediate_act_fn",
)
BERT_EMBEDDINGS = {
    "embeddings.word_embeddings": TOKEN,
    "embeddings.position_embeddings": POSITION,
    "embeddings.token_type_embeddings": TOKEN_TYPE,
}
BERT_OUTER_NORMS: dict[str, tuple[str, ...]] = {
    "embeddings.LayerNorm": (">attention.self.query", ">attention.self.key", ">attention.self.value"),
    "cls.predictions.transform.LayerNorm": (HEAD,),
}
BERT_POSITION = ByConfig(
    key="position_embedding_type",
    absent="absolute",
    values={
        "absolute": PositionKind.LEARNED,
        "relative_key": PositionKind.RELATIVE,
        "relative_key_query": PositionKind.RELATIVE,
    },
)
BERT_TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
LLAMA_TINY = {**BERT_TINY, "num_key_value_heads": 2, "pad_token_id": 0}
GEMMA_TINY = {**LLAMA_TINY, "head_dim": 16}


def t5_stack(kind: str) -> Stack:
    """T5 numbers its sublayers; the decoder has cross attention between the two."""
    ffn = "layer.2" if kind == "decoder" else "layer.1"
    attention, cross = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    is_decoder = kind == "decoder"
    cross_norm = {"layer.1.layer_norm": (f"{cross}.q",)} if is_decoder else {}
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
            "layer.0.layer_norm": tuple(f"{attention}.{name}" for name in "qkv"),
            **cross_norm,
            f"{ffn}.layer_norm": tuple(f"{ffn}.DenseReluDense.{name}" for name in ("wi", "wi_0", "wi_1")),
        },
        activation=f"{ffn}.DenseReluDense.act",
    )
