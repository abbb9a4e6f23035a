"""A GGUF file as a folder of config, tokenizer and weights, which opens like that of a checkpoint.

The folder is temporary and holds a link to the file. config.json and tokenizer.json that lie beside the file
are the original's own: they are taken, once compared with the metadata.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.files import read_json, reading
from quantkit.model.gguf.file import SUFFIX, GgufFile, read_gguf
from quantkit.model.gguf.models import config_of, row_of, stored_tensors, with_rope_factors
from quantkit.model.gguf.tokenizer import write_tokenizer
from quantkit.model.weights.headers import StoredTensor

SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
LINK = f"model{SUFFIX}"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
TAKEN = (  # from beside the file, with tokenizer.json
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    "generation_config.json",
)
BESIDE = (CONFIG, TOKENIZER, *TAKEN)


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path is or holds, and None where it holds a checkpoint of another form."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if next(path.glob("*.safetensors"), None) or (path / "model.safetensors.index.json").exists():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    firsts = [file for file in files if not (shard := SHARD.search(file.name)) or int(shard[1]) == 1]
    if len(firsts) > 1 or (files and not firsts):
        raise InputError(
            f"the folder holds {len(files)} GGUF files",
            where=str(path),
            allowed=", ".join(file.name for file in (firsts or files)[:6]),
            next_step="give the path of one of them",
        )
    return firsts[0] if firsts else None


def read_whole(path: Path) -> GgufFile:
    """The header of a file, with the tensors of its other parts."""
    file = read_gguf(path)
    count = file.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return file
    shard = SHARD.search(path.name)
    if not shard or int(shard[2]) != count or int(shard[1]) != 1:
        raise InputError(
            f"it is one of {count} parts",
            where=str(path),
            allowed=f"the first part, NAME-00001-of-{count:05d}{SUFFIX}, with the others beside it",
        )
    tensors = dict(file.tensors)
    for number in range(2, count + 1):
        part = read_gguf(path.with_name(SHARD.sub(f"-{number:05d}-of-{count:05d}{SUFFIX}", path.name)))
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice:
            raise InputError(f"the tensor '{twice}' is in two parts", where=str(part.path))
        tensors.update(part.tensors)
    return GgufFile(path=path, metadata=file.metadata, tensors=tensors)


def gguf_folder(path: Path) -> Path:
    """The folder of config, tokenizer and weights of a GGUF file; it lives as long as the process."""
    with reading(path):
        path = path.resolve()
        files = (path, *(path.parent / name for name in BESIDE))
        states = tuple(
            (state.st_size, state.st_mtime_ns) if (state := _state(file)) else None for file in files
        )
    return _made(path, states)


def _state(path: Path) -> os.stat_result | None:
    return path.stat() if path.exists() else None


@cache
def _made(path: Path, states: tuple[tuple[int, int] | None, ...]) -> Path:
    """`states` are sizes and times of the files: a changed one is read again."""
    file = read_whole(path)
    beside = path.parent / CONFIG
    config = config_of(file, read_json(beside) if beside.exists() else None)
    config = with_rope_factors(file, config)
    stored_tensors(file, config)
    folder = Path(tempfile.mkdtemp(prefix="quantkit-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write_json(folder / CONFIG, config)
    if (path.parent / TOKENIZER).exists():
        for name in (TOKENIZER, *TAKEN):
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, folder / name)
    else:
        write_tokenizer(file, folder)
    if not (folder / "generation_config.json").exists():
        ends = {key: value for key, value in config.items() if key.endswith("_token_id")}
        _write_json(folder / "generation_config.json", ends)
    (folder / LINK).symlink_to(path)
    return folder


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def is_gguf_folder(folder: Path) -> bool:
    return (folder / LINK).is_symlink()


def gguf_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The weights of a folder that `gguf_folder` made."""
    return stored_tensors(read_whole((folder / LINK).resolve()), config)


def gguf_note(path: Path) -> str:
    """What the original is, in a sentence of the report."""
    file = read_whole(path)
    values: Counter[str] = Counter()
    for tensor in file.tensors.values():
        values[tensor.kind] += prod(tensor.shape)
    total, num_bytes = sum(values.values()), sum(tensor.num_bytes for tensor in file.tensors.values())
    shares = ", ".join(f"{kind} {count / total:.1%}" for kind, count in values.most_common())
    name, _ = row_of(file)
    bits = f"{8 * num_bytes / total:.2f} bits a weight"
    return f"the original is a GGUF file ({name}; {shares} of its weights; {bits})"
