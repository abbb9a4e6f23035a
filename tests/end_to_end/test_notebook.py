"""The example notebook: each cell runs and prints what is stored in it, but for digits of measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.slow]
NOTEBOOK = Path(__file__).parents[2] / "docs" / "example.ipynb"


def test_the_notebook_runs_and_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        capsys.readouterr()
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert without_digits(capsys.readouterr().out) == without_digits(stored)


def without_digits(text: str) -> str:
    return re.sub(r"[\d. ]+", "#", text)
