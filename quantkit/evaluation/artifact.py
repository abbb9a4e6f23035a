"""An artifact folder opened with its recipe; the recipe's settings hold unless they are overridden."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import InputError
from quantkit.evaluation.models import open_measured
from quantkit.export.check import held_bytes
from quantkit.recipe import RECIPE_FILE, Recipe, load_recipe
from quantkit.runtime.graph import holds_model
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.session import Session

LARGEST_WINDOW = 1024  # as in Hugging Face's documentation of perplexity


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenArtifact:
    """An artifact folder, its recipe and a session that runs it."""

    folder: Path
    recipe: Recipe
    session: Session

    @property
    def context(self) -> int:
        """The most tokens that the model reads."""
        return self.session.context or LARGEST_WINDOW

    @property
    def vocab_size(self) -> int | None:
        """Of the session, else as config.json says."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return self.session.vocab_size or config.get("vocab_size")

    @property
    def threads(self) -> int:
        return self.recipe.measure.threads or read_cpu().num_threads

    @property
    def described(self) -> dict[str, str]:
        """Folder, model and scheme, as reports name them."""
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


def stored_recipe(folder: Path) -> Recipe:
    """The recipe in an artifact folder; the default one where the folder has none."""
    if not holds_model(folder):
        raise InputError(
            "no model.onnx there",
            where=str(folder),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        )
    path = folder / RECIPE_FILE
    return load_recipe(path) if path.exists() else Recipe()


def open_artifact(folder: Path, recipe: Recipe | None = None) -> OpenArtifact:
    """Open an artifact with its own recipe, or with another one."""
    recipe = recipe or stored_recipe(folder)
    threads = recipe.measure.threads or read_cpu().num_threads
    return OpenArtifact(folder=folder, recipe=recipe, session=open_measured(folder, threads=threads))


def require_room(artifact: OpenArtifact, lengths: dict[str, int | None]) -> None:
    """Refuse given lengths that exceed the context; those of a recipe shrink to it."""
    total = sum(length or 0 for length in lengths.values())
    if total > artifact.context:
        raise InputError(
            f"{total} tokens are more than the model's context",
            where=" and ".join(flag for flag, length in lengths.items() if length),
            allowed=f"up to {artifact.context}",
        )
