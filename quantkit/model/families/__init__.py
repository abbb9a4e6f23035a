"""The families table: one row of facts for each architecture family, and those facts nowhere else.

A row states where the blocks are, the role of each projection, the place of each norm and its readers, and
the kind of positions. Its tiny config builds a small transformers model, on which a contract test traces
every fact. An architecture without a row still maps, with role OTHER throughout.
"""

from __future__ import annotations

from quantkit.model.families.decoders import (
    ARCEE,
    BLOOM,
    CODEGEN,
    COHERE,
    COHERE2,
    ERNIE,
    EXAONE4,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    GPT2,
    GPT_BIGCODE,
    GPT_NEOX,
    GPTJ,
    GRANITE,
    HELIUM,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    NEMOTRON,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    OPT,
    PHI,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)
from quantkit.model.families.encoder_decoders import BART, MARIAN, MBART, MT5, PEGASUS, T5
from quantkit.model.families.encoders import (
    ALBERT,
    BERT,
    DEBERTA_V2,
    DISTILBERT,
    ELECTRA,
    MODERNBERT,
    MPNET,
    ROBERTA,
)
from quantkit.model.families.own import ONE_WIDE, REFERENCE, WS_FFN
from quantkit.model.families.pictures import (
    CLIP_TEXT,
    CLIP_VISION,
    DEIT,
    DINOV2,
    SIGLIP_TEXT,
    SIGLIP_VISION,
    VIT,
)
from quantkit.model.families.schema import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(GPT2, OPT, GPT_NEOX, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3),
        *(PHI, STABLELM, SMOLLM3, GRANITE, STARCODER2, NEMOTRON, ARCEE, SEED_OSS),
        *(COHERE, COHERE2, HELIUM, ERNIE, GLM, GLM4, GPTJ, CODEGEN, GPT_BIGCODE, FALCON),
        *(OLMO, OLMO2, OLMO3, EXAONE4),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE),
        *(BERT, ROBERTA, MPNET, ELECTRA, DEBERTA_V2, MODERNBERT, DISTILBERT, ALBERT),
        *(T5, MT5, BART, MBART, MARIAN, PEGASUS),
        *(VIT, DEIT, DINOV2, CLIP_VISION, CLIP_TEXT, SIGLIP_VISION, SIGLIP_TEXT),
        *(REFERENCE, ONE_WIDE, WS_FFN),
    )
}


def family_of(model_type: str) -> Family | None:
    """The row for a config's `model_type`, or None; never another family's facts."""
    return next((family for family in FAMILIES.values() if model_type in family.model_types), None)
