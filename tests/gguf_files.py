"""Tiny models of transformers as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**WINDOW, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {**WINDOW, "num_hidden_layers": 7, "tie_word_embeddings": True}),
}
TEXT = "The king said: don't count 12345 sheep, naïve friend!\n\n  Twice 67 is 134.\tWe'll see… 8 ≥ 7"


def build(architecture: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    name, own = MODELS[architecture]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    sizes = {key: value for key, value in SIZES.items() if not (name == "Qwen2" and key == "head_dim")}
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**sizes, **own, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


def alternating(weight: np.ndarray, heads: int) -> np.ndarray:
    """Llama's queries and keys, the two halves of each head in turns."""
    written = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for pair in range(size // 2):
            written[head * size + 2 * pair] = weight[head * size + pair]
            written[head * size + 2 * pair + 1] = weight[head * size + size // 2 + pair]
    return written


def byte_tokenizer() -> Tokenizer:
    """GPT-2's kind, trained on a line, with three special tokens in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def tokenizer_entries(tokenizer: Tokenizer, pre: str = "gpt-2") -> dict[str, Any]:
    import json

    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    tokens += [f"<unused{number}>" for number in range(len(tokens), SIZES["vocab_size"])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    theta = getattr(config, "rope_theta", None) or SIZES["rope_theta"]
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(theta),
        "rope.dimension_count": 16,
    }
    if architecture != "qwen2":
        own |= {"attention.key_length": 16, "attention.value_length": 16}
    if architecture in ("gemma2", "gemma3"):
        own["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        own["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        own["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return {f"{architecture}.{key}": value for key, value in own.items()}


def tensors_of(architecture: str, model: Any) -> dict[str, np.ndarray]:
    config = model.config
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture], config.num_hidden_layers
    )
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            is_query = name.endswith("q_proj.weight")
            values = alternating(
                values, config.num_attention_heads if is_query else config.num_key_value_heads
            )
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        stem, _, kind = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{kind}"] = values
    return tensors


def write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kind: str = "F32",
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """Matrices are stored in `kind`, vectors in float32; entries of None are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    tokens = tokenizer_entries(byte_tokenizer()) if tokenizer is None else tokenizer
    entries = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in tokens.items()}}
    for key, value in entries.items():
        if isinstance(value, (bool, str, list)):
            {bool: writer.add_bool, str: writer.add_string, list: writer.add_array}[type(value)](key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    stored = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if values.ndim == 2 and kind != "F32":
            writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def file_of(
    path: Path, architecture: str = "llama", *, kind: str = "F32", **changes: Any
) -> tuple[Path, Any]:
    """(a GGUF file, the model that it was made from)."""
    model = build(architecture, **changes)
    metadata, tensors = metadata_of(architecture, model.config), tensors_of(architecture, model)
    return write(path, architecture, metadata, tensors, kind=kind), model
