"""Artifacts open for measurement: folder, recipe and session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.errors import InputError
from quantkit.export.check import held_bytes
from quantkit.export.static.shared_weights import with_all_logits
from quantkit.files import expect, read_json
from quantkit.recipe import RECIPE_FILE, Recipe, load_recipe
from quantkit.runtime.graph import NotTextError, holds_model
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.session import Session, example_of, open_session

LARGEST_WINDOW = 1024  # as in Hugging Face's documentation of perplexity


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenArtifact:
    """An artifact folder, its recipe and a session that runs it."""

    folder: Path
    recipe: Recipe
    session: Session

    @property
    def context(self) -> int:
        """Maximum number of tokens."""
        return self.session.context or LARGEST_WINDOW

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the session, else of config.json."""
        path = self.folder / "config.json"
        config = read_json(path) if path.exists() else {}
        return self.session.vocab_size or expect(config, "vocab_size", int, where=path)

    @property
    def threads(self) -> int:
        return read_cpu().threads_for(self.recipe.measure.threads)

    @property
    def described(self) -> dict[str, str]:
        """Folder, model and scheme for reports."""
        metadata = self.session.metadata
        return {
            "artifact": str(self.folder),
            "model": self.recipe.model or str(metadata.get("model", "an unnamed model")),
            "scheme": str(metadata.get("scheme", self.recipe.scheme)),
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of graphs and weights."""
        return held_bytes(self.folder, sorted(self.folder.glob("*.onnx")))


def open_measured(folder: Path, *, threads: int | None = None, provider: str | None = None) -> Session:
    """Open a session with logits of every position; a static prompt graph is rewritten for that."""
    return open_session(folder, threads=threads, provider=provider, with_all_logits=with_all_logits)


def run_once(folder: Path, name: str) -> str:
    """Run every graph of a new artifact on two tokens, and a decoder on one token more.

    Graphs that do not run are refused. The answer is why a sound artifact reads no text, or "".
    """
    ids = np.ones((1, 2), np.int64)
    try:
        session = open_session(folder)
        if session.generates:
            batch = session.begin(ids.tolist(), 1)
            outputs = [batch.read().copy(), batch.step(ids[:, 0], [0])]
        else:
            outputs = [session.logits(example_of(session, ids))]
    except NotTextError as error:
        return str(error)
    except Exception as error:  # onnxruntime's own exceptions share no useful base class
        reason = error.what if isinstance(error, InputError) else str(error)
        raise _not_running(" ".join(reason.split())[:300], name) from error
    for output in outputs:
        if len(output) != 1 or session.vocab_size not in (None, output.shape[-1]):
            raise _not_running(f"its output has the shape {list(output.shape)}", name)
        if not np.isfinite(output).all():
            raise _not_running("its outputs are not finite", name)
    return ""


def _not_running(reason: str, name: str) -> InputError:
    return InputError(
        f"the written graph does not run: {reason}",
        where=name,
        next_step="another --scheme or --target may run; please report the model's config.json",
    )


def require_model(folder: Path) -> None:
    if not holds_model(folder):
        raise InputError(
            "no model.onnx there",
            where=str(folder),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        )


def stored_recipe(folder: Path) -> Recipe:
    """The recipe of an artifact folder; a folder without recipe.yaml gets the default recipe."""
    require_model(folder)
    path = folder / RECIPE_FILE
    return load_recipe(path) if path.exists() else Recipe()


def open_artifact(folder: Path, recipe: Recipe | None = None) -> OpenArtifact:
    """Open an artifact; `recipe` overrides the stored one."""
    recipe = recipe or stored_recipe(folder)
    threads = read_cpu().threads_for(recipe.measure.threads)
    return OpenArtifact(folder=folder, recipe=recipe, session=open_measured(folder, threads=threads))


def require_room(artifact: OpenArtifact, lengths: dict[str, int | None]) -> None:
    """Raise if lengths from the command line exceed the context; lengths of a recipe are cut instead."""
    total = sum(length or 0 for length in lengths.values())
    if total > artifact.context:
        raise InputError(
            f"{total} tokens are more than the model's context",
            where=" and ".join(flag for flag, length in lengths.items() if length),
            allowed=f"up to {artifact.context}",
        )
