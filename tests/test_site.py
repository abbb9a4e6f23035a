"""The documentation site: built without a warning, with every file that it names at its place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'quantkit-onnx[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    page = (tmp_path / "python" / "index.html").read_text()
    assert "max_new_tokens" in page and "InputError" in page, "docstrings are on the page"
    loaded = re.findall(r"""(?:src|href)=["'](https?://[^"']+\.(?:js|css|woff2?))""", page)
    assert loaded == [], "the site loads nothing from another host"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:tests|scripts|recipes|quantkit)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f": {page.name}" not in menu] == []


def test_figures_of_choosing_a_scheme_are_those_that_were_measured():
    measured = json.loads((ROOT / "docs" / "benchmarks" / "real.json").read_text(encoding="utf-8"))["models"]
    decoder, encoder = measured["smollm2-135m-instruct"], measured["all-minilm-l6-v2"]
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    rows = [line for line in lines if re.fullmatch(r"\d+\.\d", line[1] if len(line) == 4 else "")]
    assert len(rows) == 20
    for label, *figures in rows:
        is_decoder = figures[-1].endswith("%")
        row = (decoder if is_decoder else encoder)[label]
        prose = row["accuracy"]["prose"]
        if is_decoder:
            wanted = [f"{prose['kl_divergence']:.4f}", f"{prose['top1_agreement']:.1%}"]
        else:
            wanted = [f"{prose['mean_cosine']:.4f}", f"{prose['lowest_cosine']:.4f}"]
        assert figures == [f"{row['bytes'] / 1e6:.1f}", *wanted], label
