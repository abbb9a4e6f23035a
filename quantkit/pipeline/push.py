"""An artifact to the Hub: the files that its manifest lists, compared with their hashes first."""

from __future__ import annotations

from pathlib import Path

from quantkit.model.hub import upload
from quantkit.report.card import CARD_FILE
from quantkit.runtime.manifest import MANIFEST, require_whole


def push(folder: str | Path, repository: str, *, private: bool = False) -> str:
    """Upload an artifact, its model card included; the repository's address."""
    folder = Path(folder)
    files = require_whole(folder, "all")["files"]
    return upload(folder, [*files, MANIFEST, CARD_FILE], repository, private=private)
