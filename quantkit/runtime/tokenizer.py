"""Text to token ids and back, with the tokenizers library alone: no torch, no transformers.

A tokenizer.json says everything that encoding needs, special tokens included, so generating text starts in
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
        """Token ids, with what the model wants in front of a text."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, special tokens left out."""
        decoded: str = self.tokenizer.decode(ids)
        return decoded


def open_text(folder: Path) -> Text:
    """The tokenizer of an artifact or a checkpoint folder."""
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
    # Some files pad or cut every text to a length of their training; neither belongs here.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Text(tokenizer=tokenizer, stop_ids=read_stop_ids(folder))


def read_stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text: generation_config.json goes before config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        ids = content.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
