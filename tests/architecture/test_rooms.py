"""The rooms of the package: imports go down, each library stays in its room, torch stays out of some."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
PACKAGE = Path(__file__).parents[2] / "quantkit"
# From the top down: a room imports from itself and from those below it.
ROOMS = (
    "cli",
    "private",
    "sweeps",
    "pipeline",
    "report",
    "evaluation",
    "export",
    "quantization",
    "workers",
    "runtime",
    "recipe",
    "plan",
    "model",
    "files",
    "errors",
    "progress",
)
LIBRARIES = {  # the one room that imports it
    "transformers": "model",
    "huggingface_hub": "model",
    "gguf": "model/gguf",
    "optimum": "export/traced",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxruntime": "runtime",
    "PIL": "runtime/pictures.py",
    "pydantic": "recipe.py",
    "yaml": "recipe.py",
    "typer": "cli",
    "jinja2": "report",
    "jinja2.sandbox": "runtime/on_device/chat.py",  # templates of checkpoints
    "lm_eval": "evaluation/lm_eval",
    "websockets": "private",
    "ray": "workers/ray.py",
}
TORCH_FREE = ("recipe", "errors", "progress", "plan", "runtime", "workers", "evaluation", "report", "cli")
# Names under which anything could lie, so that in time everything does.
VAGUE = {"utils", "util", "helpers", "helper", "base", "manager", "common", "misc"}
FILES = {path.relative_to(PACKAGE): path for path in sorted(PACKAGE.rglob("*.py"))}
ENTRIES = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")} - {"assets", "py"}


def imports_of(path: Path) -> set[str]:
    """Dotted names of all imported modules; of `from quantkit import x`, quantkit.x."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "quantkit":
            found |= {f"quantkit.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_the_package_holds_these_rooms_and_no_others():
    assert set(ROOMS) == ENTRIES


@pytest.mark.parametrize(
    "file", [file for file in FILES if len(file.parts) > 1 or file.stem in ROOMS], ids=str
)
def test_imports_go_down_and_libraries_stay_in_their_room(file):
    room = file.parts[0].removesuffix(".py")
    for name in imports_of(FILES[file]):
        root, _, rest = name.partition(".")
        if root == "quantkit" and rest:
            assert ROOMS.index(rest.split(".")[0]) >= ROOMS.index(room), f"{file} must not import {name}"
        home = LIBRARIES.get(name, LIBRARIES.get(root))
        assert home is None or file.as_posix().startswith(home), f"{name} belongs in {home}"
        assert root != "torch" or room not in TORCH_FREE, f"{file} must stay free of torch"


def test_names_say_what_is_inside():
    vague = [path for path in PACKAGE.rglob("*") if VAGUE & set(path.stem.lower().split("_"))]
    assert not vague, f"say what these hold: {vague}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_says_what_it_is_for(file):
    assert ast.get_docstring(ast.parse(FILES[file].read_text(encoding="utf-8")))
