"""The documentation site: built without a warning, with every file that it names at its place."""

from __future__ import annotations

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
