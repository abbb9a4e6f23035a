"""Text to token ids and back, with the tokenizers library alone: no torch, no transformers.

A tokenizer.json holds everything that encoding needs, special tokens included, so that generation starts in
well under a second and an edge device needs two packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from quantkit.errors import InputError
from quantkit.files import read_json, reading, require_regular

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A tokenizer, and the tokens that end a text."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]

    def encode(self, text: str, *, adds_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids, with the model's special tokens; of a longer text the first `most`, these included."""
        return list(self.read(text, adds_special_tokens=adds_special_tokens, most=most).ids)

    def read(
        self, text: str | tuple[str, str], *, adds_special_tokens: bool = True, most: int | None = None
    ) -> Encoding:
        """Token ids and token types of a text, or of two texts; of two the longer is cut."""
        texts = (text,) if isinstance(text, str) else text
        with reading(TOKENIZER_FILE, "it cannot encode the text"):
            if most:
                self.tokenizer.enable_truncation(most)
            encoding = self.tokenizer.encode(*texts, add_special_tokens=adds_special_tokens)
            self.tokenizer.no_truncation()
            return encoding

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
    with reading(path, "not a tokenizer"):
        require_regular(path)
        tokenizer = Tokenizer.from_file(str(path))
        # Some files pad or cut every text to a length of their training.
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return Text(tokenizer=tokenizer, stop_ids=read_stop_ids(folder))


def read_stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text; generation_config.json goes before config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists() and (ids := token_ids(read_json(path), "eos_token_id", where=path)):
            return frozenset(ids)
    return frozenset()


def token_ids(content: Mapping[str, object], key: str, *, where: Path) -> tuple[int, ...]:
    """Token ids of a config: none, one, or a list."""
    value = content.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and -1 <= token < 1 << 31 for token in ids):
        raise InputError(f"'{key}' is {value!r}", where=str(where), allowed="a token id, or a list of them")
    return tuple(ids)
