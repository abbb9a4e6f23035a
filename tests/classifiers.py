"""Tiny classifiers and rerankers with a tokenizer of words, and their measures in plain loops."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from importlib import resources
from pathlib import Path

from exporting import build_tiny
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quantkit.model.families import FAMILIES

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@cache
def tokenizer_text() -> str:
    """A tokenizer.json that marks the second of two texts with the token type 1, as BERT's does."""
    text = (resources.files("quantkit") / "assets/questions/questions.json").read_text(encoding="utf-8")
    words = [
        *SPECIAL,
        *(word for word, _ in Counter(re.findall(r"[a-z]+|\S", text.lower())).most_common(596)),
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer.to_str()


def save_classifier(
    folder: Path, class_name: str, num_labels: int, *, family: str = "bert", has_padding: bool = True, **sizes
) -> None:
    """A random model, and a tokenizer that cuts texts at 64 tokens."""
    sizes = {
        **FAMILIES[family].tiny,
        "vocab_size": 600,
        "num_labels": num_labels,
        "max_position_embeddings": 128,
        **sizes,
    }
    model = build_tiny(class_name, {**sizes, "pad_token_id": 0 if has_padding else None})
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_text()), model_max_length=64, unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **({"pad_token": "[PAD]"} if has_padding else {}),
    )  # fmt: skip
    tokenizer.save_pretrained(folder)


def change_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def softmax(row) -> list[float]:
    weights = [math.exp(value - max(row)) for value in row]
    return [weight / sum(weights) for weight in weights]
