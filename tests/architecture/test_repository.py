"""What a newcomer relies on: a true file tree, scripts that run, a small package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]


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


def test_the_embedded_assets_stay_small():
    size = sum(path.stat().st_size for path in (ROOT / "quantkit" / "assets").rglob("*") if path.is_file())
    assert size <= 16_000_000


def test_scripts_can_be_run():
    for name in ("scripts/demo", "scripts/test", "scripts/setup", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o100
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
