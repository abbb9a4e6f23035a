"""What the two sides of a split model are called on disk, and what each says about itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import InputError

HOST, CLIENT = "host", "client"
EMBEDDING_FILE, HEAD_FILE = "embedding.onnx", "head.onnx"
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """One side's description."""

    kind: str
    pair: str  # a hash of the host's files, by which a client knows its host
    width: int  # of features
    context: int


def kind_of(folder: Path) -> str | None:
    """HOST or CLIENT, or None for any other folder."""
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = document.get("kind") if isinstance(document, dict) else None
    return kind if kind in (HOST, CLIENT) else None


def read_half(folder: Path, kind: str) -> Half:
    """The description of a side; any other folder is refused."""
    found = kind_of(folder)
    if found != kind:
        other = f"this is the {found} side" if found else "no side of a protected model"
        raise InputError(
            other,
            where=str(folder),
            allowed=f"the folder '{kind}' that 'quantkit protect' wrote",
            next_step=f"give {folder.parent / kind}" if found else "'quantkit protect' writes one",
        )
    document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    try:
        return Half(
            kind=kind,
            pair=str(document["pair"]),
            width=int(document["width"]),
            context=int(document["context"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"its manifest is damaged ({error!r})", where=str(folder), next_step="copy the folder again"
        ) from error


def default_token_file(folder: Path) -> Path:
    """The token file of both sides where none is named: beside their folders."""
    return folder.absolute().parent / "host.token"


def require_side(folder: Path, *, is_client: bool) -> None:
    """Refuse half a model where a whole one is needed, and a whole one where the client is needed."""
    if is_client:
        read_half(folder, CLIENT)
        return
    kind = kind_of(folder)
    if kind is not None:
        raise InputError(
            f"this is the {kind} side of a protected model and says nothing alone",
            where=str(folder),
            next_step=f"quantkit generate {folder.parent / CLIENT} --host URL, where 'quantkit serve-host "
            f"{folder.parent / HOST}' runs",
        )
