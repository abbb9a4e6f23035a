"""Rows of the families that read pictures, and of the text towers beside them.

A picture's patches become tokens by one product, behind the tokens that stand for the whole picture; blocks
are those of encoders.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.schema import (
    DOWN,
    OUT,
    POSITION,
    TOKEN,
    UP,
    Family,
    K,
    NormRow,
    PictureRow,
    Q,
    Stack,
    V,
)
from quantkit.model.model_map import NormKind, NormPlace, NormPlacement, PositionKind

VIT_READ_BY_ATTENTION = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
VIT_ATTENTION = {
    "attention.attention.query": (Q,),
    "attention.attention.key": (K,),
    "attention.attention.value": (V,),
    "attention.output.dense": (OUT,),
}
VIT_NAMES = {  # of transformers 5
    "layers": "encoder.layer",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "mlp.activation_fn": "intermediate.intermediate_act_fn",
}
PATCH_EMBEDDING = "embeddings.patch_embeddings.projection"
VIT_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": [12, 16],
    "patch_size": 4,
}
VIT = Family(
    name="vit",
    model_types=("vit",),
    stacks=(
        Stack(
            path="encoder.layer.*",
            kind="encoder",
            projections={**VIT_ATTENTION, "intermediate.dense": (UP,), "output.dense": (DOWN,)},
            norms={
                "layernorm_before": NormRow(NormPlace.BEFORE_ATTENTION, VIT_READ_BY_ATTENTION),
                "layernorm_after": NormRow(NormPlace.BEFORE_FFN, ("intermediate.dense",)),
            },
            activation="intermediate.intermediate_act_fn",
        ),
    ),
    embeddings={},
    outer_norms={"layernorm": NormRow(NormPlace.FINAL)},
    other={PATCH_EMBEDDING: "enters", "pooler.dense": "reads", "classifier": "reads"},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.LEARNED,
    picture=PictureRow(
        patches=PATCH_EMBEDDING,
        positions="embeddings.position_embeddings",
        first=("embeddings.cls_token",),
        unread=("embeddings.mask_token",),
    ),
    names=VIT_NAMES,
    head_reads_one_token=True,
    tiny_class="ViTForImageClassification",
    tiny=VIT_TINY,
    variants=({"qkv_bias": False, "hidden_act": "gelu_pytorch_tanh", "num_channels": 1},),
)

DEIT = replace(
    VIT,
    name="deit",
    model_types=("deit",),
    other={
        **VIT.other,
        "cls_classifier": "reads",
        "distillation_classifier": "reads",
    },
    picture=PictureRow(
        patches=PATCH_EMBEDDING,
        positions="embeddings.position_embeddings",
        first=("embeddings.cls_token", "embeddings.distillation_token"),
        unread=("embeddings.mask_token",),
    ),
    tiny_class="DeiTForImageClassificationWithTeacher",
    variants=({"qkv_bias": False, "hidden_act": "relu"},),
)

DINOV2 = replace(
    VIT,
    name="dinov2",
    model_types=("dinov2",),
    stacks=(
        Stack(
            path="encoder.layer.*",
            kind="encoder",
            projections={**VIT_ATTENTION, "mlp.fc1": (UP,), "mlp.fc2": (DOWN,)},
            norms={
                "norm1": NormRow(NormPlace.BEFORE_ATTENTION, VIT_READ_BY_ATTENTION),
                "norm2": NormRow(NormPlace.BEFORE_FFN, ("mlp.fc1",)),
            },
            activation="mlp.activation",
            scales={
                "layer_scale1.lambda1": "attention.output.dense",
                "layer_scale2.lambda1": "mlp.fc2",
            },
        ),
    ),
    other={PATCH_EMBEDDING: "enters", "classifier": "reads"},
    picture=PictureRow(
        patches=PATCH_EMBEDDING,
        positions="embeddings.position_embeddings",
        first=("embeddings.cls_token",),
        unread=("embeddings.mask_token",),
        stretches=True,
    ),
    names={
        **{new: old for new, old in VIT_NAMES.items() if new.startswith("attention")},
        "mlp.activation_fn": "mlp.activation",
    },
    tiny_class="Dinov2ForImageClassification",
    tiny={
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mlp_ratio": 2,
        "image_size": 12,
        "patch_size": 4,
        "layerscale_value": 0.5,
    },
    variants=({"qkv_bias": False, "use_mask_token": False},),
)

TOWER_READ_BY_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
TOWER_STACK = Stack(
    path="encoder.layers.*",
    kind="encoder",
    projections={
        "self_attn.q_proj": (Q,),
        "self_attn.k_proj": (K,),
        "self_attn.v_proj": (V,),
        "self_attn.out_proj": (OUT,),
        "mlp.fc1": (UP,),
        "mlp.fc2": (DOWN,),
    },
    norms={
        "layer_norm1": NormRow(NormPlace.BEFORE_ATTENTION, TOWER_READ_BY_ATTENTION),
        "layer_norm2": NormRow(NormPlace.BEFORE_FFN, ("mlp.fc1",)),
    },
    activation="mlp.activation_fn",
)
CLIP_VISION = Family(
    name="clip_vision",
    model_types=("clip_vision_model",),
    stacks=(TOWER_STACK,),
    embeddings={"embeddings.position_embedding": POSITION},
    outer_norms={
        "pre_layrnorm": NormRow(NormPlace.EMBEDDING),
        "post_layernorm": NormRow(NormPlace.HEAD, ("visual_projection",)),
    },
    other={"embeddings.patch_embedding": "enters", "visual_projection": "reads"},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.LEARNED,
    picture=PictureRow(
        patches="embeddings.patch_embedding",
        positions="embeddings.position_embedding.weight",
        first=("embeddings.class_embedding",),
    ),
    head_reads_one_token=True,
    tiny_class="CLIPVisionModelWithProjection",
    tiny={**VIT_TINY, "image_size": 12, "projection_dim": 24},
    variants=({"hidden_act": "gelu"},),
)

CLIP_TEXT = Family(
    name="clip_text",
    model_types=("clip_text_model",),
    stacks=(TOWER_STACK,),
    embeddings={"embeddings.token_embedding": TOKEN, "embeddings.position_embedding": POSITION},
    outer_norms={"final_layer_norm": NormRow(NormPlace.FINAL)},
    other={"text_projection": "reads"},
    norm_kind=NormKind.LAYER_NORM,
    placement=NormPlacement.PRE,
    position=PositionKind.LEARNED,
    is_causal=True,
    finds_end=True,
    head_reads_one_token=True,
    tiny_class="CLIPTextModelWithProjection",
    tiny={
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "projection_dim": 24,
        "eos_token_id": 2,
    },
    variants=({"eos_token_id": 47, "hidden_act": "gelu"},),
)

SIGLIP_TEXT = replace(
    CLIP_TEXT,
    name="siglip_text",
    model_types=("siglip_text_model",),
    other={"head": "reads"},
    is_causal=False,
    finds_end=False,
    tiny_class="SiglipTextModel",
    tiny={**CLIP_TEXT.tiny, "projection_size": 24},
    variants=({"hidden_act": "gelu"},),
)

SIGLIP_VISION = replace(
    CLIP_VISION,
    name="siglip_vision",
    model_types=("siglip_vision_model",),
    outer_norms={
        "post_layernorm": NormRow(NormPlace.FINAL),
        "head.layernorm": NormRow(NormPlace.HEAD, ("head.mlp.fc1",)),
    },
    other={
        "embeddings.patch_embedding": "enters",
        "head.attention.out_proj": "reads",
        "head.mlp.fc1": "apart",
        "head.mlp.fc2": "apart",
    },
    picture=PictureRow(
        patches="embeddings.patch_embedding",
        positions="embeddings.position_embedding.weight",
        probe="head",
    ),
    tiny_class="SiglipVisionModel",
    tiny={**VIT_TINY, "image_size": 12},
    variants=({"hidden_act": "gelu"},),
)
