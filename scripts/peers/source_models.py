"""The models that every system starts from: random weights in the published shapes, always the same.

    python source_models.py MODEL FOLDER

Speed, size and memory do not depend on what weights say, so seeded ones do where published ones are not at
hand. A converter may insist on a tokenizer: this one has GPT-2's shape and merges that mean nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import (  # type: ignore[import-untyped,unused-ignore]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)

untyped: Any = transformers
CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("GPT2", {"n_ctx": 1024}),
    # Two blocks of 64: what a process needs before any weight of a size.
    "gpt2-tiny": ("GPT2", {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_ctx": 1024}),
    "bert-6x384": (
        "Bert",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "bert-base": ("Bert", {}),
}
CLASSES = {"GPT2": untyped.GPT2LMHeadModel, "Bert": untyped.BertModel}


def write_tokenizer(folder: Path) -> None:
    """256 bytes, the first 50,000 pairs of them, and the end of text: 50,257 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(itertools.product(alphabet, repeat=2), 50_000))
    end = "<|endoftext|>"
    words = [*alphabet, *(first + second for first, second in merges), end]
    tokenizer: Any = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand: each version of transformers has another class of its own, and this one they all know.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    family, sizes = CONFIGS[name]
    model = CLASSES[family](getattr(untyped, f"{family}Config")(**sizes))
    model.eval().save_pretrained(folder, safe_serialization=True)
    if family == "GPT2":
        write_tokenizer(folder)
