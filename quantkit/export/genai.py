"""The configuration by which onnxruntime-genai runs an artifact, for the architectures that it knows.

Its model types name tokenizer and cache conventions, not graphs: a file with one cache tensor a layer is
run in the same way whatever lies between. Format:
https://onnxruntime.ai/docs/genai/reference/config.html
"""

from __future__ import annotations

from typing import Any

from quantkit.model.model_map import ModelMap

# Family -> the type that onnxruntime-genai knows it by.
MODEL_TYPES: dict[str, str] = {
    "gpt2": "decoder",
    "opt": "decoder",
    "gpt_neox": "decoder",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
CONFIG_FILE = "genai_config.json"


def genai_config(
    model_map: ModelMap, *, stop_ids: list[int], config: dict[str, Any]
) -> dict[str, Any] | None:
    """The content of genai_config.json, or None for an architecture that it does not run."""
    model_type = MODEL_TYPES.get(model_map.family or "")
    if model_type is None or not model_map.blocks:
        return None
    attention = model_map.blocks[0].attentions[0]
    context = model_map.context or 2048
    first_stop = stop_ids[0] if stop_ids else 0
    return {
        "model": {
            "type": model_type,
            "bos_token_id": config.get("bos_token_id") or 0,
            "eos_token_id": stop_ids if len(stop_ids) > 1 else first_stop,
            "pad_token_id": first_stop if config.get("pad_token_id") is None else config["pad_token_id"],
            "vocab_size": model_map.vocab_size,
            "context_length": context,
            "decoder": {
                "filename": "model.onnx",
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "head_size": attention.head_dim,
                "hidden_size": model_map.hidden_size,
                "num_attention_heads": attention.num_heads,
                "num_key_value_heads": attention.num_kv_heads,
                "num_hidden_layers": len(model_map.blocks),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": context,
            "do_sample": False,
            "past_present_share_buffer": True,
            "num_beams": 1,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }
