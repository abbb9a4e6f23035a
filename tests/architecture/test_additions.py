"""The additions of CONTRIBUTING.md: every path exists, and the two examples work in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ADDITIONS = (
    "rounding method (fit)", "transform", "architecture family", "linear-like module", "scheme", "target",
    "execution provider", "machine", "well-known model", "report page", "verb",
)  # fmt: skip
EXAMPLES = re.findall(r"```python\n# (\S+): (new file|after ([^\n]*))\n(.*?)```", PAGE, flags=re.DOTALL)


def test_every_addition_has_a_row():
    section = PAGE.partition("## Additions")[2]
    rows = re.findall(r"^\| ([^|]+) \| .+ \| .+ \|$", section, flags=re.MULTILINE)
    assert tuple(rows[1:]) == ADDITIONS


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:quantkit|tests|recipes)/[^`]+)`", PAGE))))
def test_paths_exist(path):
    assert (ROOT / path).exists()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with a copy of the package in which the examples are applied."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "quantkit", folder / "quantkit", ignore=shutil.ignore_patterns("__pycache__"))
    for path, place, anchor, code in EXAMPLES:
        if place == "new file":
            assert not (folder / path).exists()
            (folder / path).write_text(code, encoding="utf-8")
            continue
        lines = (folder / path).read_text(encoding="utf-8").splitlines(keepends=True)
        (position,) = [number for number, line in enumerate(lines) if line.startswith(anchor)]
        (folder / path).write_text("".join([*lines[: position + 1], code, *lines[position + 1 :]]), "utf-8")
    return folder


def run_python(package: Path, *arguments: str | Path) -> str:
    """The output of a process that imports the copy."""
    environment = {**os.environ, "PYTHONPATH": str(package), "COLUMNS": "110"}
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        env=environment, cwd=package, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_are_a_scheme_and_a_verb():
    assert [path for path, *_ in EXAMPLES] == [
        "quantkit/plan/formats.py",
        "quantkit/cli/size.py",
        "quantkit/cli/__init__.py",
    ]


@pytest.mark.slow
def test_the_scheme_passes_its_contract_and_quantizes(package, tmp_path):
    contract = ROOT / "tests" / "contracts" / "test_every_scheme.py"
    chosen = ("-k", "int8_block256 and name_says", "-p", "no:cacheprovider")
    settings = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT)
    assert "1 passed" in run_python(package, "-m", "pytest", "-q", *settings, *chosen, contract)
    artifact = tmp_path / "out"
    command = ("quantize", "demo", "--scheme", "int8_block256", "--transform", "none", "--no-eval")
    run_python(package, "-m", "quantkit.cli", *command, "-o", artifact)
    assert int(run_python(package, "-m", "quantkit.cli", "size", artifact)) > 1_000_000


def test_the_verb_appears_in_help(package):
    assert "size" in run_python(package, "-m", "quantkit.cli", "--help").split()
    assert "Print the bytes of graphs and weights." in run_python(
        package, "-m", "quantkit.cli", "size", "--help"
    )
