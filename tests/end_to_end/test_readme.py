"""README as a newcomer reads it: every command and the Python block run, and every named file exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal

import pytest
from commands import quantkit as run_command

from quantkit.recipe import Budget, Measure, Recipe

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0]
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.strip()
]
PLAIN = [
    line.partition("  #")[0] for language, block in BLOCKS if not language for line in block.splitlines()
]


class QuickRecipe(Recipe):
    """A recipe whose defaults measure less: the commands are those of the page."""

    measure: Measure = Measure(max_tokens=1000, seconds=1.0)
    budget: Budget = Budget(evaluations=2)
    fit: Literal["auto", "rtn", "mse", "output", "gptq"] = "rtn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all commands, in the order of the page."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("readme")
        patch.chdir(folder)
        patch.setenv("QUANTKIT_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "110")
        patch.setattr("quantkit.pipeline.quantize.Recipe", QuickRecipe)
        patch.setattr("quantkit.pipeline.stages.search.TABLE_TOKENS", 128)
        yield folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command, folder):
    program, *arguments = shlex.split(command)
    assert program == "quantkit"
    result = run_command(*arguments)
    assert result.returncode == 0, result.stderr


def test_the_python_block_runs(folder):
    (code,) = [block for language, block in BLOCKS if language == "python"]
    exec(compile(code, "README.md", "exec"), {})
    assert (folder / "demo-py" / "model.onnx").exists()


@pytest.mark.parametrize("line", [line for line in PLAIN if line.startswith("scripts/")])
def test_scripts_of_the_page_exist(line):
    assert (ROOT / line.split()[0]).stat().st_mode & 0o100


def test_installation_names_this_distribution():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (name,) = re.findall(r'^name = "(.+)"$', project, flags=re.MULTILINE)
    assert f"pip install {name}" in PLAIN
