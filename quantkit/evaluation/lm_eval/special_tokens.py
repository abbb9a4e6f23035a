"""The tokens that begin and end a text, from the files beside a tokenizer.json, which does not name them.

The order of the files is that of transformers, so that a text gets the same first token in both:
tokenizer_config.json, where null means no token, then special_tokens_map.json, then config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.files import read_json
from quantkit.runtime.tokenizer import Text, token_ids

TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Ids; None where a model has no such token."""

    begin: int | None
    end: int | None


def read_special_tokens(folder: Path, text: Text) -> SpecialTokens:
    return SpecialTokens(begin=_id_of(folder, text, "bos_token"), end=_id_of(folder, text, "eos_token"))


def _id_of(folder: Path, text: Text, name: str) -> int | None:
    for file in TOKEN_FILES:
        path = folder / file
        content = read_json(path) if path.exists() else {}
        if name not in content:
            continue
        value = content[name]
        token = value.get("content") if isinstance(value, dict) else value
        token_id: int | None = None if token is None else text.tokenizer.token_to_id(str(token))
        return token_id
    path = folder / "config.json"
    return next(iter(token_ids(read_json(path), f"{name}_id", where=path)), None) if path.exists() else None
