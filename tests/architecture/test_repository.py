"""What a newcomer relies on: a quick start, a true file tree, recipes that parse, a small package."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.recipe import load_recipe

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "pydantic", "optimum", "numpy")


def test_the_command_starts_in_well_under_a_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "quantkit.cli", "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.7


def test_nothing_heavy_is_imported_at_start():
    code = f"import sys, quantkit.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_the_readme_tree_is_true():
    """Every file of the package, the scripts and the recipes has one line; no line is about nothing."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("<!-- tree -->")[1].split("```")[1].splitlines()
    listed: dict[str, str] = {}
    folder = ""
    for line in tree:
        if not line.strip():
            continue
        name, *purpose = line.split()
        if not line.startswith(" "):
            folder = name
        else:
            listed[folder + name] = " ".join(purpose)
    patterns = ("quantkit/**/*.py", "scripts/*", "recipes/*")
    real = {
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file() and path.name != "__init__.py" and "__pycache__" not in path.parts
    }
    assert set(listed) == real
    assert all(3 <= len(purpose.split()) <= 14 for purpose in listed.values())


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_parses(path):
    assert load_recipe(path).select.min_dim >= 1


def test_the_embedded_assets_stay_small():
    size = sum(path.stat().st_size for path in (ROOT / "quantkit" / "assets").rglob("*") if path.is_file())
    assert size <= 16_000_000


def test_scripts_can_be_run():
    for name in ("scripts/demo", "scripts/test", "scripts/setup", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o100
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
