"""The sweep file: models x recipes x targets x texts, and the cells that its rules leave.

Paths are relative to the working folder, as in recipes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.recipe import (
    Count,
    Field,
    Positive,
    Recipe,
    Section,
    Sections,
    check,
    check_recipe,
    load_recipe,
    load_yaml,
)

NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
AXES = ("model", "recipe", "target", "text")
Globs = str | list[str]


class Pattern(Section):
    """Names or globs of each axis. A cell matches where every axis does."""

    model: Globs = Field(default="*", description="globs of model names")
    recipe: Globs = Field(default="*", description="globs of recipe names")
    target: Globs = Field(default="*", description="globs of targets")
    text: Globs = Field(default="*", description="globs of text names")


class Constraint(Section):
    """Cells that match `when` stay only where they match `only` too."""

    when: Pattern = Field(description="cells under this constraint")
    only: Pattern = Field(description="those of them that stay")


class Needs(Section):
    """Resources of a Ray cluster that cells need, such as a disk that only some hosts have."""

    when: Pattern = Field(description="cells that need them")
    resources: dict[str, Positive] = Field(description="name of a resource -> amount")


class SweepFile(Section):
    """Axes and rules of a sweep."""

    models: dict[str, str] = Field(
        default={}, description="name -> model folder, built-in name, Hub name, or 'demo'"
    )
    recipes: dict[str, Any] = Field(default={}, description="name -> recipe file, or the keys of a recipe")
    targets: list[str] = Field(default=[], description="export targets; default: each recipe's own")
    texts: dict[str, str] = Field(
        default={}, description="name -> text file that accuracy is measured on; default: each recipe's own"
    )
    include: list[Pattern] = Field(default=[], description="only cells that match one of these")
    exclude: list[Pattern] = Field(default=[], description="no cell that matches one of these")
    constraints: list[Constraint] = Field(default=[], description="rules between axes")
    needs: list[Needs] = Field(default=[], description="resources of a Ray cluster that some cells need")
    output: str | None = Field(
        default=None,
        description="folder of the artifacts and of sweep.json; default: the name of the sweep file",
    )
    threads: Count | None = Field(
        default=None,
        description="threads of a cell outside of its timed part; default: shared among the workers",
    )
    time_limit_minutes: Positive = Field(default=1440.0, description="most minutes that one cell may run")
    trust_remote_code: bool = Field(default=False, description="run code that ships with the checkpoints")


SECTIONS: Sections = {
    (): SweepFile,
    ("include",): Pattern,
    ("exclude",): Pattern,
    ("constraints",): Constraint,
    ("constraints", "when"): Pattern,
    ("constraints", "only"): Pattern,
    ("needs",): Needs,
    ("needs", "when"): Pattern,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One artifact of a sweep."""

    model: str  # these four are names
    recipe: str
    target: str
    text: str  # "" where the recipe names the text
    settings: Recipe
    needs: Mapping[str, float]  # resources of a Ray cluster

    @property
    def name(self) -> str:
        return "-".join(filter(None, (getattr(self, axis) for axis in AXES)))


def load_sweep(path: Path) -> SweepFile:
    return check_sweep(load_yaml(path), where=str(path))


def check_sweep(content: Any, *, where: str) -> SweepFile:
    sweep = check(SweepFile, content, what="a sweep", where=where, sections=SECTIONS)
    for axis in ("models", "recipes"):
        if not getattr(sweep, axis):
            raise InputError(
                f"no {axis} are listed", where=where, allowed=f"'{axis}': a mapping of names, one or more"
            )
    for axis in ("models", "recipes", "texts"):
        for name in getattr(sweep, axis):
            if not NAME.fullmatch(name):
                raise InputError(
                    f"{axis}: '{name}' cannot name a folder",
                    where=where,
                    allowed="letters, digits, '.', '_', '+' and '-'",
                )
    for name, text in sweep.texts.items():
        if not Path(text).expanduser().is_file():
            raise InputError(
                f"texts.{name}: no file '{text}'", where=where, next_step="check the path of the text file"
            )
    return sweep


def sweep_schema() -> dict[str, Any]:
    """The JSON Schema for editors."""
    return SweepFile.model_json_schema()


def cells_of(sweep: SweepFile, *, where: str) -> tuple[Cell, ...]:
    """The cells of the product that all rules leave; a rule that concerns no cell is refused."""
    recipes = {name: _recipe(name, entry, where) for name, entry in sweep.recipes.items()}
    targets: Sequence[str | None] = sweep.targets or [None]
    texts: Sequence[str | None] = [*sweep.texts] or [None]
    every = [
        _cell(sweep, model, (name, recipes[name]), target, text, where)
        for model, name, target, text in product(sweep.models, recipes, targets, texts)
    ]
    rules = {
        "include": sweep.include,
        "exclude": sweep.exclude,
        "constraints": [constraint.when for constraint in sweep.constraints],
        "needs": [need.when for need in sweep.needs],
    }
    for key, patterns in rules.items():
        for number, pattern in enumerate(patterns):
            if not any(_matches(cell, pattern) for cell in every):
                raise InputError(
                    f"{key}.{number} matches no cell",
                    where=where,
                    allowed="; ".join(
                        f"{axis}: {', '.join(sorted({getattr(cell, axis) for cell in every}))}"
                        for axis in AXES
                    ),
                )
    cells = tuple(cell for cell in every if _stays(cell, sweep))
    if not cells:
        raise InputError(
            "the rules leave no cell", where=where, next_step="loosen include, exclude or constraints"
        )
    return cells


def _recipe(name: str, entry: Any, where: str) -> Recipe:
    if isinstance(entry, str):
        return load_recipe(Path(entry).expanduser())
    return check_recipe(entry, where=f"{where}: recipes.{name}")


def _cell(
    sweep: SweepFile, model: str, recipe: tuple[str, Recipe], target: str | None, text: str | None, where: str
) -> Cell:
    name, settings = recipe
    content = settings.model_dump()
    content["model"] = sweep.models[model]
    content["target"] = target or settings.target
    content["measure"]["text"] = sweep.texts[text] if text else settings.measure.text
    cell = Cell(
        model=model,
        recipe=name,
        target=content["target"],
        text=text or "",
        settings=check_recipe(content, where=where),
        needs={},
    )
    return replace(cell, needs=_needs(cell, sweep.needs))


def _needs(cell: Cell, needs: Iterable[Needs]) -> dict[str, float]:
    return {
        name: amount for need in needs if _matches(cell, need.when) for name, amount in need.resources.items()
    }


def _stays(cell: Cell, sweep: SweepFile) -> bool:
    is_included = not sweep.include or any(_matches(cell, pattern) for pattern in sweep.include)
    is_excluded = any(_matches(cell, pattern) for pattern in sweep.exclude)
    return (
        is_included
        and not is_excluded
        and all(_matches(cell, rule.only) for rule in sweep.constraints if _matches(cell, rule.when))
    )


def _matches(cell: Cell, pattern: Pattern) -> bool:
    return all(
        any(fnmatchcase(getattr(cell, axis), glob) for glob in _listed(getattr(pattern, axis)))
        for axis in AXES
    )


def _listed(globs: Globs) -> list[str]:
    return [globs] if isinstance(globs, str) else globs
