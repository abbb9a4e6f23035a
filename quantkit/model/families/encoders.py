"""Rows of the encoders: families that read a whole text at once."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.schema import (
    BERT_EMBEDDING_NORM,
    BERT_EMBEDDINGS,
    BERT_POSITION,
    BERT_STACK,
    BERT_TINY,
    DISTANCE,
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

BERT = Family(
    name="bert",
    model_types=("bert",),
    stacks=(BERT_STACK,),
    embeddings=BERT_EMBEDDINGS,
    outer_norms={**BERT_EMBEDDING_NORM, "cls.predictions.transform.LayerNorm": FINAL_NORM},
    other={
        "cls.predictions.transform.dense": "stays",
        "pooler.dense": "reads",
        "cls.seq_relationship": "apart",
    },
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.POST,
    position=BERT_POSITION,
    tiny_class="BertForMaskedLM",
    tiny=BERT_TINY,
)

ROBERTA = replace(
    BERT,
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert"),
    outer_norms={**BERT_EMBEDDING_NORM, "lm_head.layer_norm": FINAL_NORM},
    other={"lm_head.dense": "stays", "pooler.dense": "reads"},
    counts_from_padding=True,
    tiny_class="RobertaForMaskedLM",
)

MPNET_READ_BY_ATTENTION = ("attention.attn.q", "attention.attn.k", "attention.attn.v")
MPNET = Family(
    name="mpnet",
    model_types=("mpnet",),
    stacks=(
        Stack(
            path="encoder.layer.*",
            kind="encoder",
            projections={
                "attention.attn.q": (Q,),
                "attention.attn.k": (K,),
                "attention.attn.v": (V,),
                "attention.attn.o": (OUT,),
                "intermediate.dense": (UP,),
                "output.dense": (DOWN,),
            },
            norms={
                "attention.LayerNorm": NormRow(NormPlace.AFTER_ATTENTION, ("intermediate.dense",)),
                "output.LayerNorm": NormRow(NormPlace.AFTER_FFN, feeds_next_block=MPNET_READ_BY_ATTENTION),
            },
            activation="intermediate.intermediate_act_fn",
        ),
    ),
    embeddings={
        "embeddings.word_embeddings": TOKEN,
        "embeddings.position_embeddings": POSITION,
        "encoder.relative_attention_bias": POSITION_BIAS,
    },
    outer_norms={
        "embeddings.LayerNorm": NormRow(NormPlace.EMBEDDING, feeds_next_block=MPNET_READ_BY_ATTENTION),
        "lm_head.layer_norm": FINAL_NORM,
    },
    other={"lm_head.dense": "stays", "pooler.dense": "reads"},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.POST,
    position=PositionKind.LEARNED,
    counts_from_padding=True,
    padding_id=1,
    is_causal_by_config=True,
    position_biases=(
        PositionBias(table="encoder.relative_attention_bias", num_buckets=32, max_distance=128),
    ),
    tiny_class="MPNetForMaskedLM",
    tiny=BERT_TINY,
)

ELECTRA = replace(
    BERT,
    name="electra",
    model_types=("electra",),
    outer_norms={
        "embeddings.LayerNorm": replace(
            BERT_EMBEDDING_NORM["embeddings.LayerNorm"], feeds_alone="embeddings_project"
        ),
        "generator_predictions.LayerNorm": FINAL_NORM,
    },
    other={
        "embeddings_project": "enters",
        "generator_predictions.dense": "leaves",
        "discriminator_predictions.dense": "reads",
        "discriminator_predictions.dense_prediction": "apart",
    },
    tiny_class="ElectraForMaskedLM",
    tiny={**BERT_TINY, "embedding_size": 16},
    variants=({"embedding_size": 32},),
)

DEBERTA_READ_BY_ATTENTION = (
    "attention.self.query_proj",
    "attention.self.key_proj",
    "attention.self.value_proj",
)
DEBERTA_V2 = replace(
    BERT,
    name="deberta_v2",
    model_types=("deberta-v2",),
    stacks=(
        replace(
            BERT_STACK,
            projections={
                **dict(zip(DEBERTA_READ_BY_ATTENTION, ((Q,), (K,), (V,)), strict=True)),
                "attention.output.dense": (OUT,),
                "intermediate.dense": (UP,),
                "output.dense": (DOWN,),
            },
            norms={
                "attention.output.LayerNorm": NormRow(NormPlace.AFTER_ATTENTION, ("intermediate.dense",)),
                "output.LayerNorm": NormRow(NormPlace.AFTER_FFN, feeds_next_block=DEBERTA_READ_BY_ATTENTION),
            },
        ),
    ),
    embeddings={**BERT_EMBEDDINGS, "encoder.rel_embeddings": DISTANCE},
    outer_norms={
        "embeddings.LayerNorm": NormRow(NormPlace.EMBEDDING, feeds_next_block=DEBERTA_READ_BY_ATTENTION),
        "encoder.LayerNorm": NormRow(NormPlace.DISTANCE, feeds_every_block=DEBERTA_READ_BY_ATTENTION[:2]),
        "cls.predictions.transform.LayerNorm": FINAL_NORM,
    },
    other={"cls.predictions.transform.dense": "stays", "pooler.dense": "reads"},
    position=ByConfig(
        key="position_biased_input",
        absent=True,
        values={
            True: PositionKind.LEARNED,
            False: ByConfig(
                key="relative_attention",
                absent=False,
                values={True: PositionKind.RELATIVE, False: PositionKind.NONE},
            ),
        },
    ),
    distance_table="encoder.rel_embeddings",
    head_activation="pooler_hidden_act",
    tiny_class="DebertaV2ForMaskedLM",
    tiny={
        **BERT_TINY,
        "type_vocab_size": 0,
        "position_biased_input": False,
        "relative_attention": True,
        "position_buckets": 4,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    variants=(
        {
            "type_vocab_size": 2,
            "position_biased_input": True,
            "position_buckets": -1,
            "pos_att_type": ["c2p"],
            "norm_rel_ebd": "none",
        },
    ),
)

MODERNBERT = Family(
    name="modernbert",
    model_types=("modernbert",),
    stacks=(
        Stack(
            path="layers.*",
            kind="encoder",
            projections={
                "attn.Wqkv": (Q, K, V),
                "attn.Wo": (OUT,),
                "mlp.Wi": (GATE, UP),
                "mlp.Wo": (DOWN,),
            },
            norms={  # the first block has no norm before its attention
                "attn_norm": NormRow(NormPlace.BEFORE_ATTENTION, ("attn.Wqkv",)),
                "mlp_norm": NormRow(NormPlace.BEFORE_FFN, ("mlp.Wi",)),
            },
            activation="mlp.act",
        ),
    ),
    embeddings={"embeddings.tok_embeddings": TOKEN},
    outer_norms={
        "embeddings.norm": NormRow(NormPlace.EMBEDDING, feeds_next_block=("attn.Wqkv",)),
        "final_norm": NormRow(NormPlace.FINAL, ("head.dense",)),
        "head.norm": NormRow(NormPlace.HEAD, feeds_head=True),
    },
    other={"head.dense": "stays"},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.ROPE,
    windows="own",
    head_activation="head.act",
    reads_mean=ByConfig(key="classifier_pooling", absent="cls", values={"cls": False, "mean": True}),
    tiny_class="ModernBertForMaskedLM",
    tiny={
        **BERT_TINY,
        "num_hidden_layers": 4,  # the first and the last see all tokens
        "local_attention": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    variants=(
        {
            **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
            "decoder_bias": False,
            "tie_word_embeddings": False,
            "classifier_activation": "silu",
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
)

DISTILBERT_READ_BY_ATTENTION = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
DISTILBERT = Family(
    name="distilbert",
    model_types=("distilbert",),
    stacks=(
        Stack(
            path="transformer.layer.*",
            kind="encoder",
            projections={
                "attention.q_lin": (Q,),
                "attention.k_lin": (K,),
                "attention.v_lin": (V,),
                "attention.out_lin": (OUT,),
                "ffn.lin1": (UP,),
                "ffn.lin2": (DOWN,),
            },
            norms={
                "sa_layer_norm": NormRow(NormPlace.AFTER_ATTENTION, ("ffn.lin1",)),
                "output_layer_norm": NormRow(
                    NormPlace.AFTER_FFN, feeds_next_block=DISTILBERT_READ_BY_ATTENTION
                ),
            },
            activation="ffn.activation",
        ),
    ),
    embeddings={"embeddings.word_embeddings": TOKEN, "embeddings.position_embeddings": POSITION},
    outer_norms={
        "embeddings.LayerNorm": NormRow(NormPlace.EMBEDDING, feeds_next_block=DISTILBERT_READ_BY_ATTENTION),
        "vocab_layer_norm": FINAL_NORM,
    },
    other={"vocab_transform": "stays"},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.POST,
    position=PositionKind.LEARNED,
    tiny_class="DistilBertForMaskedLM",
    tiny={
        "vocab_size": 61,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 40,
    },
)

ALBERT = Family(
    name="albert",
    model_types=("albert",),
    stacks=(
        Stack(
            path="encoder.albert_layer_groups.*.albert_layers.*",
            kind="encoder",
            projections={
                "attention.query": (Q,),
                "attention.key": (K,),
                "attention.value": (V,),
                "attention.dense": (OUT,),
                "ffn": (UP,),
                "ffn_output": (DOWN,),
            },
            norms={
                "attention.LayerNorm": NormRow(NormPlace.AFTER_ATTENTION, ("ffn",)),
                "full_layer_layer_norm": NormRow(
                    NormPlace.AFTER_FFN,
                    feeds_next_block=("attention.query", "attention.key", "attention.value"),
                ),
            },
            activation="activation",
            calls=("num_hidden_layers", "num_hidden_groups"),
        ),
    ),
    embeddings=BERT_EMBEDDINGS,
    outer_norms={
        "embeddings.LayerNorm": NormRow(NormPlace.EMBEDDING, ("encoder.embedding_hidden_mapping_in",)),
        "predictions.LayerNorm": FINAL_NORM,
    },
    other={
        "encoder.embedding_hidden_mapping_in": "enters",
        "predictions.dense": "leaves",
        "pooler": "reads",
    },
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.POST,
    position=BERT_POSITION,
    tiny_class="AlbertForMaskedLM",
    tiny={**BERT_TINY, "embedding_size": 16, "num_hidden_layers": 4},
    variants=({"num_hidden_groups": 2, "inner_group_num": 2},),
)
