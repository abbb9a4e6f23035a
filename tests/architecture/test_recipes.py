"""Every recipe that ships can be run, and says what it is for."""

from pathlib import Path

import pytest

from quantkit.recipe import load_recipe

pytestmark = pytest.mark.once

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*") if path.is_file() and path.name != "recipe.schema.json")


def test_there_is_a_recipe_to_start_from() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_parses_and_says_what_it_is_for(path: Path) -> None:
    assert path.suffix == ".yaml"
    load_recipe(path)
    assert path.read_text(encoding="utf-8").startswith("# "), "the first line says what the recipe shows"
