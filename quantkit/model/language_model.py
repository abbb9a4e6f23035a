"""The language model inside of a multimodal one, as a config of its own.

A row states that the multimodal class runs its `text_config` as that model's causal class does where no image
is given. Multi-axis rotary positions (Qwen-VL) are the plain ones there: the three positions of a text token
are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantkit.errors import InputError

AS_STATED = ""
# Model type of the multimodal model -> that of its language model, where text_config states another.
LANGUAGE_MODELS: dict[str, str] = {
    "gemma3": AS_STATED,
    "idefics2": AS_STATED,
    "idefics3": AS_STATED,
    "internvl": AS_STATED,
    "llava": AS_STATED,
    "llava_next": AS_STATED,
    "llava_onevision": AS_STATED,
    "mistral3": AS_STATED,
    "qwen2_audio": AS_STATED,
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "smolvlm": AS_STATED,
    "voxtral": AS_STATED,
}
REASONS = {"paligemma": "it reads a prompt in both directions, which no causal graph does"}
GENERATING = ("ForConditionalGeneration", "ForCausalLM", "ForVision2Seq")


def has_language_model(model_type: str, config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a model which generates text from more than text."""
    if model_type in LANGUAGE_MODELS:
        return True
    classes = [str(name) for name in config.get("architectures") or ()]
    is_multimodal = isinstance(config.get("text_config"), Mapping) or "thinker_config" in config
    return is_multimodal and any(name.endswith(GENERATING) for name in classes)


def language_model(config: Any, *, tied: bool, where: str) -> dict[str, Any]:
    """The config of the language model inside of a multimodal transformers config."""
    if config.model_type not in LANGUAGE_MODELS:
        reason = REASONS.get(config.model_type, "its language model is not known to run alone")
        raise InputError(
            f"{config.model_type} is a multimodal model: {reason}",
            where=where,
            allowed=f"language models, and those inside of {', '.join(LANGUAGE_MODELS)}",
            next_step="use the text-only checkpoint of the same model, where there is one",
        )
    text: dict[str, Any] = config.text_config.to_dict()
    model_type = LANGUAGE_MODELS[config.model_type] or text["model_type"]
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"the language model inside, {model_type}, has no class of its own in transformers",
            where=where,
            next_step="use the text-only checkpoint of the same model, where there is one",
        )
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(field), Mapping):
            text[field] = _plain_rope(text[field])
    return {
        **text,
        "model_type": model_type,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        "tie_word_embeddings": tied,
    }


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary settings without the sections of image positions."""
    plain = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    return plain
