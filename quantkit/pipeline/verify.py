"""Verifies a folder that quantkit wrote: every file against the hashes in its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.pipeline.folder import folder_bytes
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
    files = require_whole(path, check).get("files", {})
    return Verified(folder=path, num_files=len(files), num_bytes=folder_bytes(path))
