"""The manifest of a folder that quantkit wrote: hashes of its files, and the check against them.

Every file has its SHA-256. A large one also has 64-bit sums of its parts: they take a tenth of the time that
onnxruntime needs to load it, and SHA-256 takes half of that time. Both detect accidental damage; deliberate
changes are detected by SHA-256 alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np

from quantkit.errors import InputError, not_one_of
from quantkit.files import expect, read_json, reading

MANIFEST = "manifest.json"
HASHED_PACKAGES = ("quantkit-onnx", "torch", "transformers", "onnx", "onnxruntime", "numpy", "safetensors")
LARGE_BYTES = 8 << 20
PART_BYTES = 1 << 18
IGNORED_FOLDERS = ("compiled", "__pycache__")  # written by runs; compiled graphs have hashes of their own
Check = Literal["all", "quick", "none"]
MOST_NAMED = 4
WRITTEN = "a folder that 'quantkit quantize', 'package' or 'protect' wrote"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, with the hashes of its files."""
    manifest = read_json(
        folder / MANIFEST, allowed=WRITTEN, next_step="check the path, or copy the folder again"
    )
    for key, kind in (("versions", dict), ("scheme", str), ("target", str)):
        expect(manifest, key, kind, where=folder / MANIFEST)
    files, sums = manifest.get("files"), manifest.get("sums", {})
    for hashes in (files, sums):
        if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
            raise InputError(
                f"its {MANIFEST} lists no files",
                where=str(folder),
                allowed=WRITTEN,
                next_step="make it again; --check none opens it as it is",
            )
    return manifest


def require_whole(folder: Path, check: str = "quick") -> dict[str, Any]:
    """The manifest of a folder; files that differ from it, are missing or not listed are refused by name."""
    if check not in get_args(Check):
        raise not_one_of(check, get_args(Check), where="--check")
    if check == "none":
        return {}
    manifest = read_manifest(folder)
    faults = list(islice(faults_of(folder, manifest, sums_large=check == "quick"), MOST_NAMED + 1))
    if faults:
        rest = "; and more" if len(faults) > MOST_NAMED else ""
        raise InputError(
            f"the folder is damaged: {'; '.join(faults[:MOST_NAMED])}{rest}",
            where=str(folder),
            next_step="copy it again, or make it again; --check none opens it as it is",
        )
    return manifest


def faults_of(folder: Path, manifest: dict[str, Any], *, sums_large: bool) -> Iterator[str]:
    files, sums = manifest["files"], manifest.get("sums", {})
    for name, sha256 in sorted(files.items()):
        file = folder / name
        if not is_plain(name):
            yield f"{name} lies outside of the folder"
        elif not os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises where a name is too long
            yield f"{name} is missing"
        else:
            with reading(file):
                uses_sums = sums_large and name in sums and file.stat().st_size > LARGE_BYTES
                actual, listed = (sum_of(file), sums[name]) if uses_sums else (sha256_of(file), sha256)
            if actual != listed:
                yield f"{name} differs from the manifest"
    for parent, folders, names in os.walk(folder):
        place = Path(parent).relative_to(folder)
        ignored = () if place.parts else IGNORED_FOLDERS
        folders[:] = [name for name in sorted(folders) if not name.startswith(".") and name not in ignored]
        for name in sorted(names):
            path = (place / name).as_posix()
            is_known = path in files or path == MANIFEST or name.startswith(".") or name.endswith(".md")
            if not is_known:
                yield f"{path} is not in the manifest"


def is_plain(name: str) -> bool:
    """Whether a name in a manifest is in its shortest form and stays in the folder on every system."""
    parts = PurePosixPath(name).parts
    is_shortest = bool(parts) and "/".join(parts) == name
    return is_shortest and name.isprintable() and not {"..", "/"} & {*parts} and not {"\\", ":"} & {*name}


def hash_files(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Path in the folder -> SHA-256, of every file but the folder's own manifest; `known` ones are given."""
    names = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    return {name: (known or {}).get(name) or sha256_of(path) for name, path in names.items()}


def sum_files(folder: Path) -> dict[str, str]:
    """Path in the folder -> hash of the sums of its parts, of large files."""
    large = (path for path in _files(folder) if path.stat().st_size > LARGE_BYTES)
    return {path.relative_to(folder).as_posix(): sum_of(path) for path in large}


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sum_of(path: Path) -> str:
    """SHA-256 of the 64-bit sums of a file's parts, the last part padded with zeros, and of its length."""
    part = np.zeros(PART_BYTES // 8, np.uint64)
    content = part.view(np.uint8)
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        while count := file.readinto(content.data):
            content[count:] = 0
            digest.update(int(part.sum(dtype=np.uint64)).to_bytes(8, "little"))
    return digest.hexdigest()


def target_of(folder: Path) -> str | None:
    """The target in the artifact's manifest."""
    try:
        target = read_json(folder / MANIFEST).get("target")
    except InputError:
        return None
    return target if isinstance(target, str) else None
