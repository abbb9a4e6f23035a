"""The built-in configs of well-known models, so that their names work without a network.

Each `assets/configs/NAME.json` is the model's published config, cut down to the fields that describe its
structure and spelled as transformers 4.57 spells them, which 5.x reads too. A new name is a new file; the
Hub names that mean the same structure are listed here. An instruct model counts as the same structure even
where its end-of-text ids differ, since neither shapes nor costs depend on them.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

_CONFIGS = resources.files("quantkit") / "assets" / "configs"
_SUFFIX = ".json"

# Hub name, in lower case -> built-in name.
ALIASES: dict[str, str] = {
    "albert/albert-base-v2": "albert-base-v2",
    "distilbert/distilbert-base-uncased": "distilbert-base-uncased",
    "eleutherai/pythia-160m": "pythia-160m",
    "eleutherai/pythia-160m-deduped": "pythia-160m",
    "facebook/opt-125m": "opt-125m",
    "facebookai/roberta-base": "roberta-base",
    "google-bert/bert-base-uncased": "bert-base-uncased",
    "google-t5/t5-small": "t5-small",
    "google/gemma-2-2b": "gemma-2-2b",
    "google/gemma-2b": "gemma-2b",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "google/gemma-3-1b-pt": "gemma-3-1b",
    "google/gemma-3-270m": "gemma-3-270m",
    "google/gemma-3-270m-it": "gemma-3-270m",
    "meta-llama/llama-2-70b-hf": "llama-2-70b",
    "meta-llama/llama-2-7b-hf": "llama-2-7b",
    "meta-llama/llama-3.2-1b": "llama-3.2-1b",
    "meta-llama/llama-3.2-1b-instruct": "llama-3.2-1b",
    "microsoft/phi-3-mini-4k-instruct": "phi-3-mini",
    "mistralai/mistral-7b-v0.1": "mistral-7b",
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-large": "gpt2-large",
    "openai-community/gpt2-medium": "gpt2-medium",
    "openai-community/gpt2-xl": "gpt2-xl",
    "qwen/qwen2.5-0.5b": "qwen2.5-0.5b",
    "qwen/qwen3-0.6b": "qwen3-0.6b",
}


def known_names() -> tuple[str, ...]:
    """The built-in names, sorted: one per config file."""
    files = (entry.name for entry in _CONFIGS.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def known_config(name: str) -> dict[str, Any] | None:
    """The config behind a built-in or a Hub name, in any case; None for a name that is neither.

    Every call reads the file again, so that a caller may change what it gets.
    """
    lowered = name.lower()
    built_in = ALIASES.get(lowered, lowered)
    if built_in not in known_names():  # also keeps a path such as "../x" from reaching the file system
        return None
    config: dict[str, Any] = json.loads((_CONFIGS / f"{built_in}{_SUFFIX}").read_text(encoding="utf-8"))
    return config
