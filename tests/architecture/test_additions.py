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
EXAMPLES = re.findall(
    r"```python\n# (\S+): (new file|(?:after|before|in place of) )([^\n]*)\n(.*?)```", PAGE, flags=re.DOTALL
)


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
    (folder / "tests" / "contracts").mkdir(parents=True)
    for path, place, anchor, code in EXAMPLES:
        if place == "new file":
            assert not (folder / path).exists()
            (folder / path).write_text(code, encoding="utf-8")
            continue
        source = folder / path if (folder / path).exists() else ROOT / path
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        (position,) = [number for number, line in enumerate(lines) if line.startswith(anchor)]
        first, last = position + (place == "after "), position + (place != "before ")
        (folder / path).write_text("".join([*lines[:first], code, *lines[last:]]), "utf-8")
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


def test_the_examples_are_those_that_the_page_promises():
    assert list(dict.fromkeys(path for path, *_ in EXAMPLES)) == [
        "quantkit/plan/formats.py",
        "quantkit/quantization/rounding/unweighted.py",
        "quantkit/quantization/rounding/__init__.py",
        "quantkit/recipe.py",
        "tests/contracts/test_every_fit.py",
        "quantkit/plan/targets.py",
        "quantkit/model/families/decoders.py",
        "quantkit/model/families/__init__.py",
        "quantkit/cli/size.py",
        "quantkit/cli/__init__.py",
    ]


def run_contract(package: Path, name: str, chosen: str) -> str:
    """The last line of the row's own tests, against the copy; changed tests are the copy's."""
    contract = Path("tests") / "contracts" / name
    contract = package / contract if (package / contract).exists() else ROOT / contract
    settings = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider")
    return run_python(package, "-m", "pytest", "-q", *settings, "-k", chosen, contract).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contract", "chosen", "num_tests"),
    [
        ("test_every_fit.py", "unweighted or a_recipe_can_name", 50),
        ("test_every_target.py", "cpu-old", 4),
        ("test_every_family.py", "ministral", 4),
    ],
)
def test_an_added_row_passes_its_contract(package, contract, chosen, num_tests):
    last = run_contract(package, contract, chosen)
    passed = re.search(r"(\d+) passed", last)
    assert passed and int(passed[1]) >= num_tests and "failed" not in last, last


@pytest.mark.slow
def test_added_rows_quantize(package, tmp_path):
    command = ("-m", "quantkit.cli", "quantize", "demo", "--no-eval", "--transform", "none")
    fast = ("--calibration-windows", "4", "--calibration-length", "32")
    run_python(package, *command, *fast, "--fit", "unweighted", "--target", "cpu-old", "-o", tmp_path / "out")
    recipe = (tmp_path / "out" / "recipe.yaml").read_text(encoding="utf-8")
    assert "fit: unweighted" in recipe and "target: cpu-old" in recipe


@pytest.mark.slow
def test_the_scheme_passes_its_contract_and_quantizes(package, tmp_path):
    assert "1 passed" in run_contract(package, "test_every_scheme.py", "int8_block256 and name_says")
    artifact = tmp_path / "out"
    command = ("quantize", "demo", "--scheme", "int8_block256", "--transform", "none", "--no-eval")
    run_python(package, "-m", "quantkit.cli", *command, "-o", artifact)
    assert int(run_python(package, "-m", "quantkit.cli", "size", artifact)) > 1_000_000


def test_the_verb_appears_in_help(package):
    assert "size" in run_python(package, "-m", "quantkit.cli", "--help").split()
    assert "Print the bytes of graphs and weights." in run_python(
        package, "-m", "quantkit.cli", "size", "--help"
    )
