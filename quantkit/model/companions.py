"""The config and the tokenizer files that go with the weights into an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from quantkit.model.load import Source

PREPROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
    PREPROCESSOR_FILE,
)
NO_VOCABULARY = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    PREPROCESSOR_FILE,
)


def config_for_artifact(source: Source) -> dict[str, Any]:
    """The config without its pointer to the code of the checkpoint, which does not go into the artifact."""
    return {key: value for key, value in source.config.items() if key != "auto_map"}


def tokenizer_files(source: Source) -> tuple[Path, ...]:
    """The tokenizer and generation files beside the weights."""
    if source.folder is None:
        return ()
    paths = (source.folder / name for name in TOKENIZER_FILES)
    return tuple(path for path in paths if path.is_file())


def has_tokenizer(source: Source) -> bool:
    return any(path.name not in NO_VOCABULARY for path in tokenizer_files(source))


def has_preprocessor(source: Source) -> bool:
    return bool(source.folder and (source.folder / PREPROCESSOR_FILE).is_file())


def make_fast_tokenizer(source: Source, folder: Path) -> bool:
    """Write tokenizer.json for a checkpoint that has only the older files; False where it cannot be made."""
    if source.folder is None or not has_tokenizer(source):
        return False
    try:
        loader: Any = transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(str(source.folder), use_fast=True, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    except Exception:  # any tokenizer library may be absent; the model works without one
        return False
    return True
