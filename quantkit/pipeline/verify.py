"""Verifies a folder that quantkit wrote: every file against the hashes in its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import InputError
from quantkit.runtime.manifest import require_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A folder whose files are those of its manifest."""

    folder: Path
    num_files: int
    num_bytes: int


def verify(folder: str | Path, *, check: str = "all") -> Verified:
    """Compare the files of an artifact, a package or a split model with its manifest; any fault raises."""
    path = Path(folder).expanduser()
    if check == "none":
        raise InputError("'none' compares no file", where="--check", allowed="all, quick")
    files = require_whole(path, check)["files"]
    return Verified(
        folder=path, num_files=len(files), num_bytes=sum((path / name).stat().st_size for name in files)
    )
