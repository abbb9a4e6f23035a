"""The key of a cell: a hash of everything that decides its artifact.

It covers the recipe, the files of the model, the texts, and the versions of quantkit and its libraries. It
does not cover the machine, whose times are recorded beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from quantkit.model.load import open_source
from quantkit.runtime.manifest import LARGE_BYTES, sha256_of, sum_of
from quantkit.sweeps.grid import Cell

SHOWN_CHARACTERS = 8  # of a key, in the name of a folder


def source_hashes(model: str, *, trust_remote_code: bool) -> dict[str, str]:
    """File -> hash, of a model that lies on this disk; of another its config."""
    source = open_source(model, trust_remote_code=trust_remote_code)
    if source.folder is None:
        return {source.name: hashlib.sha256(json.dumps(source.config, sort_keys=True).encode()).hexdigest()}
    files = [path for path in sorted(source.folder.rglob("*")) if path.is_file() and path.suffix != ".md"]
    names = {path.relative_to(source.folder).as_posix(): path for path in files}
    return {
        name: sum_of(path) if path.stat().st_size > LARGE_BYTES else sha256_of(path)
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }


def key_of(cell: Cell, sources: Mapping[str, str], versions: Mapping[str, str]) -> str:
    recipe = cell.settings.model_dump(exclude={"model": True})
    for section in ("measure", "calibration"):
        text = recipe[section]["text"]
        if text and Path(text).expanduser().is_file():
            recipe[section]["text"] = sha256_of(Path(text).expanduser())
    content = {"recipe": recipe, "sources": dict(sources), "versions": dict(versions)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
