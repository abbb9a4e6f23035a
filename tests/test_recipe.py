"""Recipes: every fault is one line that names the key, and what is written reads back the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.plan.formats import SCHEMES
from quantkit.recipe import SECTIONS, Recipe, dump_recipe, load_recipe, override, recipe_schema

pytestmark = pytest.mark.once
FOLDER = Path(__file__).parents[1] / "recipes"
SCHEMA = FOLDER / "recipe.schema.json"
MODELINE = "# yaml-language-server: $schema=recipe.schema.json"


def loaded(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def refused(tmp_path, text):
    with pytest.raises(InputError) as caught:
        loaded(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    assert "recipe.yaml" in message
    return message


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("shceme: int8_block32", "shceme", "scheme"),
        ("select: {mindim: 3}", "select.mindim", "min_dim"),
        ("select: {exclud: [ffn]}", "select.exclud", "exclude"),
        ("measure: {latencies: true}", "measure.latencies", "latency"),
        ("measure: {max_token: 5}", "measure.max_token", "max_tokens"),
        ("min_dim: 3", "min_dim", "select.min_dim"),
        ("acuracy: false", "acuracy", "measure.accuracy"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(text, key, nearest, tmp_path):
    message = refused(tmp_path, text)
    assert f"unknown key '{key}'" in message
    assert f"did you mean '{nearest}'?" in message


@pytest.mark.parametrize("section", SECTIONS, ids=lambda path: ".".join(path) or "top")
def test_an_unknown_key_is_refused_with_all_that_are_allowed(section, tmp_path):
    content = {"zzzzzz": 1}
    for key in reversed(section):
        content = {key: content}
    message = refused(tmp_path, json.dumps(content))
    assert "did you mean" not in message, "nothing is near"
    for allowed in SECTIONS[section].model_fields:
        assert allowed in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model: [gpt2]", "model"),
        ("model: 3", "model"),
        ("scheme: int8_blck32", "scheme"),
        ("target: toaster", "target"),
        ("fit: guess", "fit"),
        ("select: 768", "select"),
        ("select:", "select"),
        ("select: {min_dim: large}", "select.min_dim"),
        ("select: {min_dim: '768'}", "select.min_dim"),
        ("select: {min_dim: 7.5}", "select.min_dim"),
        ("select: {min_dim: true}", "select.min_dim"),
        ("select: {min_dim: 0}", "select.min_dim"),
        ("select: {include: ffn}", "select.include"),
        ("select: {include: [1]}", "select.include"),
        ("measure: {accuracy: 1}", "measure.accuracy"),
        ("measure: {accuracy: 'yes'}", "measure.accuracy"),
        ("measure: {seconds: 0}", "measure.seconds"),
        ("measure: {seconds: .nan}", "measure.seconds"),
        ("measure: {threads: 0}", "measure.threads"),
        ("measure: {window: 1}", "measure.window"),
        ("single_file_mb: -1", "single_file_mb"),
        ("seed: -1", "seed"),
        ("random_weights: on the whole", "random_weights"),
        ("{1: 2}", "1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(text, key, tmp_path):
    assert f"recipe.yaml: {key}" in refused(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- b",
        "just words",
        "3",
        "a: [",
        "a: b: c",
        "\x00",
        "seed: 2024-13-45",
        "? [a]\n: 1",
        "x: !!python/name:os.system",
    ],
)
def test_what_is_no_recipe_is_refused(text, tmp_path):
    refused(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            load_recipe(path)
    (tmp_path / "latin.yaml").write_bytes("model: caf\xe9".encode("latin-1"))
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


def test_defaults_are_kept_where_nothing_is_said(tmp_path):
    recipe = loaded(tmp_path, "select: {min_dim: 768}")
    assert recipe == Recipe(select={"min_dim": 768})
    assert recipe.select.include == []
    assert recipe.scheme == "auto"
    assert loaded(tmp_path, "{}") == Recipe()


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path):
    recipe = loaded(tmp_path, "model: gpt2\nselect: {min_dim: 768, include: [ffn]}\nseed: 4")
    changed = override(
        recipe, {"select.min_dim": 1024, "scheme": "int8_channel", "model": None, "measure.text": None}
    )
    assert changed.select.min_dim == 1024
    assert changed.scheme == "int8_channel"
    assert (changed.model, changed.select.include, changed.seed) == ("gpt2", ["ffn"], 4), (
        "None changes nothing"
    )
    assert (changed.fit, changed.measure) == (Recipe().fit, Recipe().measure)
    assert recipe.select.min_dim == 768, "the recipe itself is as it was"
    assert override(recipe, {"select.include": []}).select.include == []
    assert override(recipe, {"measure.latency": False}).measure.latency is False


def test_flags_are_checked_like_a_file():
    with pytest.raises(InputError) as caught:
        override(Recipe(), {"scheme": "int3"})
    assert str(caught.value).startswith("the command line: scheme")
    with pytest.raises(InputError, match=r"measure\.threads"):
        override(Recipe(), {"measure.threads": 0})


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
RECIPES = st.builds(
    Recipe,
    model=st.none()
    | TEXTS
    | st.sampled_from(["yes", "null", "1e3", "0x10", "~", "2024-01-01", "a: b", "#", ""]),
    select=st.fixed_dictionaries(
        {"min_dim": st.integers(1, 1 << 40), "include": st.lists(TEXTS, max_size=3), "exclude": st.just([])}
    ),
    scheme=st.sampled_from(sorted(SCHEMES)),
    single_file_mb=st.integers(0, 1 << 20),
    random_weights=st.booleans(),
    seed=st.integers(0, 1 << 62),
    measure=st.fixed_dictionaries(
        {
            "text": st.none() | TEXTS,
            "accuracy": st.booleans(),
            "window": st.none() | st.integers(2, 4096),
            "seconds": st.floats(1e-9, 1e9),
        }
    ),
)


@settings(max_examples=60)
@given(recipe=RECIPES)
def test_what_is_dumped_reads_back_the_same(tmp_path_factory, recipe):
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    again = load_recipe(path)
    assert again == recipe
    assert dump_recipe(again) == dump_recipe(recipe)


def test_a_dumped_recipe_writes_every_key_out():
    """A target size only where one was asked for."""
    assert "target_size" not in yaml.safe_load(dump_recipe(Recipe()))["budget"]
    content = yaml.safe_load(dump_recipe(override(Recipe(model="demo"), {"budget.target_size": 0.2})))
    for section, model in SECTIONS.items():
        part = content
        for key in section:
            part = part[key]
        assert list(part) == list(model.model_fields)


def test_the_schema_in_the_repository_is_that_of_the_code():
    """After a change, write the text on the right of the last line into the file."""
    text = SCHEMA.read_text(encoding="utf-8")
    assert json.loads(text) == recipe_schema()
    assert text == json.dumps(recipe_schema(), indent=2) + "\n"


def test_the_schema_forbids_and_describes_as_the_code_does():
    schema = recipe_schema()
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for name, entry in section["properties"].items():
            assert "$ref" in entry or "description" in entry, name
    assert set(schema["properties"]["scheme"]["enum"]) == {"auto", *SCHEMES}


def test_every_shipped_recipe_says_what_it_shows_and_may_name_the_schema():
    paths = sorted(FOLDER.glob("*.yaml"))
    assert {"int8_cpu", "int8_block32_cpu", "int8_channel_cpu"} <= {path.stem for path in paths}
    for path in paths:
        first, *rest = path.read_text(encoding="utf-8").splitlines()
        assert first.startswith("# "), path.name
        assert len(first) > 30, path.name
        named = [number for number, line in enumerate(rest) if "yaml-language-server" in line]
        assert named in ([], [0]), f"{path.name}: the schema is named on the second line"
        assert not named or rest[0] == MODELINE


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("int8_cpu", "int8_block32"),
        ("int8_block128_cpu", "int8_block128"),
        ("int8_block32_cpu", "int8_block32"),
        ("int8_channel_cpu", "int8_channel"),
    ],
)
def test_the_recipe_of_each_scheme(name, scheme):
    recipe = load_recipe(FOLDER / f"{name}.yaml")
    assert (recipe.scheme, recipe.target) == (scheme, "cpu")
    assert recipe.model is None, "a recipe that ships fits any model"
