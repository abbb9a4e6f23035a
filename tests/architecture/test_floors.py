"""Floors and fences: imports go down only, siblings never import each other, each library has its place."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
PACKAGE = Path(__file__).parents[2] / "quantkit"
FLOORS = {
    0: ("records", "recipe", "machines", "errors", "measurements", "schemes"),
    1: ("plan", "cost", "search", "auto_size"),
    2: ("model", "tensor_records", "grid"),
    3: (
        "calibrate",
        "transforms",
        "quantizers",
        "checkpoint",
        "traffic",
        "artifact",
        "fake_quant",
        "export",
        "runtime",
        "evaluate",
        "report",
    ),
    4: (
        "pipeline",
        "stages",
        "static_stages",
        "subjects",
        "measuring",
        "sensitivity",
        "sizing",
        "weighing",
        "preparation",
        "rounding",
        "caching",
        "budget",
        "opening",
        "ffn_units",
        "writing",
        "quantization",
        "reopening",
        "evaluating",
        "benchmarking",
        "harness",
        "package_kinds",
        "packaging",
        "protection",
    ),
    5: ("requests", "cli"),
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
WITHIN_FLOOR = {("grid", "tensor_records"), ("tensor_records", "grid"), ("cli", "requests")}
# On the floor that joins the stages, a module knows only those before it in the list above.
WITHIN_FLOOR |= set(itertools.combinations(reversed(FLOORS[4]), 2))
ALLOWED_BELOW = {
    ("machines", "errors"),
    ("recipe", "errors"),
    ("machines", "records"),
    ("recipe", "records"),
    ("measurements", "records"),
    ("schemes", "errors"),
    ("schemes", "records"),
    ("recipe", "schemes"),
}
FENCES = {
    "transformers": ("model",),
    "huggingface_hub": ("model",),
    "optimum": ("export/trace.py",),
    "onnx": ("export",),
    "onnx_ir": ("export",),
    "onnxruntime": ("runtime",),
    "rich": ("report",),
    "jinja2": ("report",),
    "matplotlib": ("report",),
    "pydantic": ("recipe.py",),
    "yaml": ("recipe.py",),
    "typer": ("cli",),
    "lm_eval": ("harness",),
}
TORCH_FREE = (
    "records",
    "recipe",
    "machines",
    "errors",
    "plan",
    "cost",
    "runtime",
    "evaluate",
    "report",
    "cli",
    "requests",
    "harness",
)
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """The architectural part a file belongs to; cost_rows.py is part of cost."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return next((part for part in ("cost", "requests") if name.startswith(part)), name)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "quantkit"}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    part = part_of(path)
    assert part in FLOOR_OF, f"{part} stands on no floor"
    for name in imports_of(path):
        if not name.startswith("quantkit.") or name == "quantkit.__version__":
            continue
        other = name.split(".")[1]
        other = next((part for part in ("cost", "requests") if other.startswith(part)), other)
        if other == part or (part, other) in WITHIN_FLOOR | ALLOWED_BELOW:
            continue
        assert FLOOR_OF[other] < FLOOR_OF[part], f"{part} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_fences(path):
    place = path.relative_to(PACKAGE)
    for name in imports_of(path):
        root = name.split(".")[0]
        for allowed in [FENCES[root]] if root in FENCES else []:
            assert str(place) in allowed or place.parts[0] in allowed, f"{root} belongs in {allowed}"
        if part_of(path) in TORCH_FREE:
            assert root != "torch", f"{place} must stay free of torch"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small_and_named(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    assert path.stem not in {"utils", "helpers", "base", "manager", "common", "misc"}
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
