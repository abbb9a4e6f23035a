"""Strict YAML recipes: what a run is asked to do, checked before anything is loaded.

A key that no recipe knows is refused with the nearest one that it does, because a misspelt option that is
ignored costs a whole run. Pydantic and YAML stay behind this file.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.errors import InputError


class Select(BaseModel):
    """Which projections are quantized."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min_dim: int = Field(default=256, ge=1, description="quantize where max(in, out) reaches this")
    include: list[str] = Field(default=[], description="roles or globs that narrow the choice")
    exclude: list[str] = Field(default=[], description="roles or globs that are left as they are")


class Recipe(BaseModel):
    """One run of the pipeline."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str | None = Field(default=None, description="a folder, a built-in name, a Hub name, or 'demo'")
    select: Select = Select()


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe file; every fault is one line that names the key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=str(path), next_step="see recipes/ for examples"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(
            f"not YAML ({error})", where=str(path), next_step="see recipes/ for examples"
        ) from error
    if not isinstance(content, dict):
        raise InputError(
            "a recipe is a mapping of keys", where=str(path), allowed=", ".join(Recipe.model_fields)
        )
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(_explain(error.errors()[0]), where=str(path)) from error


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema that editors complete recipes with."""
    return Recipe.model_json_schema()


def _explain(fault: Any) -> str:  # noqa: ANN401 - pydantic's own mapping
    *parents, key = fault["loc"]
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] != "extra_forbidden":
        return f"{name}: {fault['msg']}, got {fault['input']!r}"
    allowed = _keys_at(parents)
    nearest = difflib.get_close_matches(str(key), allowed, n=1)
    hint = f"; next: did you mean '{nearest[0]}'?" if nearest else ""
    return f"unknown key '{name}'; allowed: {', '.join(allowed)}{hint}"


def _keys_at(parents: Sequence[Any]) -> list[str]:
    return list(Select.model_fields if list(parents) == ["select"] else Recipe.model_fields)
