"""Folders of a split model: names of their files, and the description in their manifests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.files import read_json, reading
from quantkit.runtime.manifest import MANIFEST

HOST, CLIENT = "host", "client"
EMBEDDING_FILE, HEAD_FILE = "embedding.onnx", "head.onnx"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideManifest:
    pair: str  # hash of the host's files, by which a client recognizes its host
    width: int  # of features
    context: int


def kind_of(folder: Path) -> str | None:
    """HOST or CLIENT, or None for any other folder."""
    kind = _manifest(folder).get("kind")
    return kind if kind in (HOST, CLIENT) else None


def read_side(folder: Path, kind: str) -> SideManifest:
    """The manifest of a host or client folder; any other folder is refused."""
    actual = kind_of(folder)
    if actual != kind:
        raise InputError(
            f"this is the {actual} side" if actual else "no side of a protected model",
            where=str(folder),
            allowed=f"the folder '{kind}' that 'quantkit protect' wrote",
            next_step=f"give {folder.parent / kind}" if actual else "'quantkit protect' writes one",
        )
    manifest = _manifest(folder)
    with reading(folder, "its manifest is damaged", next_step="copy the folder again"):
        pair, width, context = str(manifest["pair"]), int(manifest["width"]), int(manifest["context"])
    return SideManifest(pair=pair, width=width, context=context)


def require_side(folder: Path, *, is_client: bool) -> None:
    """Refuses half a model where a whole one is needed, and a whole one where the client is needed."""
    if is_client:
        read_side(folder, CLIENT)
        return
    kind = kind_of(folder)
    if kind is not None:
        raise InputError(
            f"this is the {kind} side of a protected model and says nothing alone",
            where=str(folder),
            next_step=f"quantkit generate {folder.parent / CLIENT} --host URL, where 'quantkit serve-host "
            f"{folder.parent / HOST}' runs",
        )


def default_token_file(folder: Path) -> Path:
    """Token file of both sides, beside their folders."""
    return folder.absolute().parent / "host.token"


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / MANIFEST)
    except InputError:
        return {}
