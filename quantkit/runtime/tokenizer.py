"""Text to token ids and back, with the tokenizers library alone: no torch, no transformers.

A tokenizer.json holds everything that encoding needs, special tokens included, so that generation starts in
well under a second and an edge device needs two packages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quantkit.errors import InputError

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A tokenizer, and the tokens that end a text."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model begins a text with."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """The text without special tokens."""
        decoded: str = self.tokenizer.decode(ids)
        return decoded


def open_text(folder: Path) -> Text:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise InputError(
            "the folder has no tokenizer.json",
            where=str(folder),
            next_step="copy the model's tokenizer.json into it, or quantize from a folder that has one",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise InputError(
            f"not a tokenizer ({error})", where=str(path), next_step="copy the file again"
        ) from error
    # Some files pad or cut every text to a length of their training.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Text(tokenizer=tokenizer, stop_ids=read_stop_ids(folder))


def read_stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text; generation_config.json goes before config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        ids = content.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
