"""Tiny folders of sentence-transformers, and its pooling in plain numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from exporting import build_tiny
from safetensors.numpy import save_file

import quantkit
from quantkit.model.families import FAMILIES

DEMO = Path(quantkit.__file__).parent / "assets" / "demo"
LEGACY = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}
ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "GELU": lambda x: torch.nn.functional.gelu(torch.tensor(x)).numpy(),
}


def write(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def save_sentence_model(
    folder: Path, poolings, steps=(), *, class_name="BertModel", family="bert", settings=None, **sizes
) -> None:
    """A tiny encoder with modules behind it; a step is "Normalize" or (outputs, bias, activation)."""
    sizes = {**FAMILIES[family].tiny, "vocab_size": 4096, "max_position_embeddings": 64, **sizes}
    model = build_tiny(class_name, sizes)
    model.save_pretrained(folder)
    shutil.copyfile(DEMO / "tokenizer.json", folder / "tokenizer.json")
    hidden = sizes["hidden_size"]
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    flags = {f"pooling_mode_{key}": mode in poolings for mode, key in LEGACY.items()}
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": hidden, **flags})
    width = hidden * len(poolings)
    random = np.random.default_rng(1)
    for number, step in enumerate(steps, 2):
        kind = step if isinstance(step, str) else "Dense"
        modules.append((kind, f"{number}_{kind}"))
        if kind == "Dense":
            outputs, has_bias, activation = step
            place = "linear" if activation == "Identity" else "activation"
            content = {
                "in_features": width,
                "out_features": outputs,
                "bias": has_bias,
                "activation_function": f"torch.nn.modules.{place}.{activation}",
            }
            write(folder / f"{number}_Dense/config.json", content)
            weights = {"linear.weight": random.standard_normal((outputs, width)).astype(np.float32)}
            if has_bias:
                weights["linear.bias"] = random.standard_normal(outputs).astype(np.float32)
            save_file(weights, folder / f"{number}_Dense/model.safetensors")
            width = outputs
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    write(folder / "modules.json", entries)
    write(folder / "config_sentence_transformers.json", settings or {})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": False})


def pooled(states_TD, mode: str):
    """One row's tokens, without padding, in float64."""
    states_TD = np.asarray(states_TD, np.float64)
    count = len(states_TD)
    places = np.arange(1, count + 1)
    return {
        "cls": lambda: states_TD[0],
        "max": lambda: states_TD.max(axis=0),
        "mean": lambda: states_TD.sum(axis=0) / count,
        "mean_sqrt_len_tokens": lambda: states_TD.sum(axis=0) / np.sqrt(count),
        "weightedmean": lambda: (states_TD * places[:, None]).sum(axis=0) / places.sum(),
        "lasttoken": lambda: states_TD[-1],
    }[mode]()


def reference(folder: Path, ids, mask, poolings, steps=()):
    """What sentence-transformers computes, from transformers' states on."""
    from safetensors.numpy import load_file

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))[0].numpy()
    rows = [
        [pooled(row[kept == 1], mode) for mode in poolings] for row, kept in zip(states, mask, strict=True)
    ]
    vectors = np.stack([np.concatenate(parts) for parts in rows])
    for number, step in enumerate(steps, 2):
        if step == "Normalize":
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        elif isinstance(step, tuple):
            weights = load_file(folder / f"{number}_Dense/model.safetensors")
            vectors = vectors @ weights["linear.weight"].astype(np.float64).T + weights.get("linear.bias", 0)
            vectors = ACTIVATIONS[step[2]](vectors)
    return vectors
