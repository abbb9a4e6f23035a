"""Rows of the families that read a whole text: encoders, and T5, which writes with what it read."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.schema import CROSS, HEAD, ByConfig, Family, Stack
from quantkit.model.families.spellings import (
    BERT_EMBEDDINGS,
    BERT_OUTER_NORMS,
    BERT_POSITION,
    BERT_STACK,
    BERT_TINY,
    DOWN,
    OUT,
    POSITION,
    TOKEN,
    UP,
    K,
    Q,
    V,
    t5_stack,
)
from quantkit.model.model_map import NormKind, NormPlacement, PositionKind

BERT = Family(
    model_types=("bert",),
    stacks=(BERT_STACK,),
    embeddings=BERT_EMBEDDINGS,
    outer_norms=BERT_OUTER_NORMS,
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
    model_types=("roberta", "xlm-roberta", "camembert"),
    outer_norms={
        "embeddings.LayerNorm": BERT_OUTER_NORMS["embeddings.LayerNorm"],
        "lm_head.layer_norm": (HEAD,),
    },
    other={"lm_head.dense": "stays", "pooler.dense": "reads"},
    position_offset=2,
    tiny_class="RobertaForMaskedLM",
)

DISTILBERT_READERS = (">attention.q_lin", ">attention.k_lin", ">attention.v_lin")
DISTILBERT = Family(
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
            norms={"sa_layer_norm": ("ffn.lin1",), "output_layer_norm": DISTILBERT_READERS},
            activation="ffn.activation",
        ),
    ),
    embeddings={"embeddings.word_embeddings": TOKEN, "embeddings.position_embeddings": POSITION},
    outer_norms={"embeddings.LayerNorm": DISTILBERT_READERS, "vocab_layer_norm": (HEAD,)},
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
                "attention.LayerNorm": ("ffn",),
                "full_layer_layer_norm": (">attention.query", ">attention.key", ">attention.value"),
            },
            activation="activation",
            calls=("num_hidden_layers", "num_hidden_groups"),
        ),
    ),
    embeddings=BERT_EMBEDDINGS,
    outer_norms={
        "embeddings.LayerNorm": ("encoder.embedding_hidden_mapping_in",),
        "predictions.LayerNorm": (HEAD,),
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

T5 = Family(
    model_types=("t5", "mt5"),
    stacks=(t5_stack("encoder"), t5_stack("decoder")),
    embeddings={"shared": TOKEN},
    outer_norms={"encoder.final_layer_norm": (CROSS,), "decoder.final_layer_norm": (HEAD,)},
    norm_kind=NormKind.RMS_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.RELATIVE,
    scales_tied_head=ByConfig(key="scale_decoder_outputs", absent=True, values={True: True, False: False}),
    tiny_class="T5ForConditionalGeneration",
    tiny={"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    variants=({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},),
)
