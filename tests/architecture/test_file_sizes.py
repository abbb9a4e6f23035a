"""Files stay small enough to read in one go, and their names say what is inside."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.once

PACKAGE = Path(__file__).parents[2] / "quantkit"
MAX_LINES = 400
# Names under which anything could lie, so that in time everything does.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "base", "manager", "common", "misc"}


def test_no_file_is_longer_than_one_sitting() -> None:
    num_lines = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert num_lines
    too_long = {name: count for name, count in num_lines.items() if count > MAX_LINES}
    assert not too_long, f"split these at a seam of their subject (at most {MAX_LINES} lines): {too_long}"


def test_no_name_is_empty_of_meaning() -> None:
    named = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in (".py", "")]
    vague = [path.as_posix() for path in named if EMPTY_NAMES & set(path.stem.lower().split("_"))]
    assert not vague, f"say what these hold: {vague}"
