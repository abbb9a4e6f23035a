"""An artifact that lies in a folder, opened again as what it was exported, with the recipe that it came from.

What the recipe says holds unless a flag says otherwise, so that the same figures come out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.evaluation.measure import LARGEST_WINDOW
from quantkit.evaluation.models import open_measured
from quantkit.export.written import held_bytes
from quantkit.recipe import RECIPE_FILE, Recipe, load_recipe, override
from quantkit.runtime.graph import holds_model
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An artifact, ready to run."""

    folder: Path
    model: Session
    recipe: Recipe
    metadata: Mapping[str, Any]

    @property
    def context(self) -> int:
        """The most tokens that it reads."""
        return self.model.context or LARGEST_WINDOW

    @property
    def threads(self) -> int:
        """What it runs with."""
        return self.recipe.measure.threads or read_cpu().num_threads

    @property
    def described(self) -> dict[str, str]:
        """The artifact in words."""
        return {
            "artifact": str(self.folder),
            "model": self.recipe.model or str(self.metadata.get("model", "an unnamed model")),
            "scheme": str(self.metadata.get("scheme", self.recipe.scheme)),
        }

    @property
    def size_bytes(self) -> int:
        """Graph and weights."""
        return held_bytes(self.folder, sorted(self.folder.glob("*.onnx")))


def open_artifact(folder: Path, changes: Mapping[str, Any]) -> Opened:
    """Open an artifact with its recipe, of which `changes` replace some keys."""
    if not holds_model(folder):
        raise InputError(
            "no model.onnx there",
            where=str(folder),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        )
    path = folder / RECIPE_FILE
    recipe = override(load_recipe(path) if path.exists() else Recipe(), changes)
    model = open_measured(folder, threads=recipe.measure.threads)
    return Opened(folder=folder, model=model, recipe=recipe, metadata=model.metadata)


def require_room(opened: Opened, asked: Mapping[str, int | None]) -> None:
    """Refuse lengths that were typed and do not fit; those of a recipe shrink to the model's context."""
    total = sum(length or 0 for length in asked.values())
    if total > opened.context:
        raise InputError(
            f"{total} tokens are more than the model's context",
            where=" and ".join(flag for flag, length in asked.items() if length),
            allowed=f"up to {opened.context}",
        )
