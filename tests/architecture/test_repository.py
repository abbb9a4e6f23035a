"""The repository around the package: a short README, true links, scripts that parse, small assets."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
MAX_README_BYTES = 10_000
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    """Relative links, those to a heading of a page included."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link) and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name
)
def test_modules_in_pages_exist(page):
    """Paths to modules, in pages other than the log, which is history."""
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:quantkit|tests|scripts|recipes)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
    made = {path.replace("/", ".") for path in re.findall(r"# (quantkit/[\w/]+)\.py: new file", text)}
    for module in re.findall(r"(?:from|import) (quantkit(?:\.\w+)+)", text):
        assert module in made or importlib.util.find_spec(module), module


def test_the_embedded_assets_stay_small():
    size = sum(path.stat().st_size for path in (ROOT / "quantkit" / "assets").rglob("*") if path.is_file())
    assert size <= 16_000_000


def test_scripts_can_be_run():
    for name in ("scripts/demo", "scripts/test", "scripts/setup", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o100
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
