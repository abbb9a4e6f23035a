"""Sweep files: the cells that axes and rules leave, and refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.sweeps.grid import cells_of, check_sweep, load_sweep, sweep_schema

pytestmark = pytest.mark.once
FOLDER = Path(__file__).parents[2] / "recipes" / "sweeps"
SWEEP = {
    "models": {"small": "demo", "large": "demo"},
    "recipes": {"int8": {}, "static": {"scheme": "int8_static16"}},
    "targets": ["cpu", "npu"],
}


def names(**rules):
    return {
        cell.name
        for cell in cells_of(check_sweep({**SWEEP, **rules}, where="sweep.yaml"), where="sweep.yaml")
    }


def refused(content):
    with pytest.raises(InputError) as caught:
        cells_of(check_sweep(content, where="sweep.yaml"), where="sweep.yaml")
    assert "\n" not in str(caught.value)
    assert "sweep.yaml" in str(caught.value)
    return str(caught.value)


def test_cells_are_the_product_of_the_axes():
    assert names() == {
        f"{model}-{recipe}-{target}"
        for model in ("small", "large")
        for recipe in ("int8", "static")
        for target in ("cpu", "npu")
    }


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"include": [{"model": "small", "target": "cpu"}]}, {"small-int8-cpu", "small-static-cpu"}),
        (
            {"exclude": [{"model": "l*"}, {"recipe": ["int8"], "target": "npu"}]},
            {"small-int8-cpu", "small-static-cpu", "small-static-npu"},
        ),
        (
            {
                "include": [{"model": "large"}],
                "constraints": [{"when": {"recipe": "static"}, "only": {"target": ["npu", "openvino"]}}],
            },
            {"large-int8-cpu", "large-int8-npu", "large-static-npu"},
        ),
    ],
)
def test_rules_leave_these_cells(rules, left):
    assert names(**rules) == left


def test_axes_that_are_left_out_are_the_recipes_own(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words")
    recipe = {"target": "gpu", "measure": {"text": str(text)}}
    (cell,) = cells_of(check_sweep({"models": {"a": "demo"}, "recipes": {"r": recipe}}, where=""), where="")
    assert (cell.name, cell.settings.model, cell.settings.target) == ("a-r-gpu", "demo", "gpu")
    assert cell.settings.measure.text == str(text)
    other = {"models": {"a": "demo"}, "recipes": {"r": {}}, "texts": {"prose": str(text)}}
    (cell,) = cells_of(check_sweep(other, where=""), where="")
    assert (cell.name, cell.settings.measure.text) == ("a-r-cpu-prose", str(text))


def test_needs_concern_the_cells_that_match():
    needs = [{"when": {"model": "large"}, "resources": {"disk": 1.0}}]
    cells = cells_of(check_sweep({**SWEEP, "needs": needs}, where=""), where="")
    assert {cell.model: dict(cell.needs) for cell in cells} == {"small": {}, "large": {"disk": 1.0}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"modles": {"a": "demo"}}, "unknown key 'modles'"),
        ({"exclude": [{"modle": "small"}]}, "unknown key 'exclude.0.modle'"),
        ({"constraints": [{"when": {}, "onyl": {}}]}, "unknown key 'constraints.0.onyl'"),
        ({"recipes": {"a": {"shceme": "int8"}}}, "recipes.a: unknown key 'shceme'"),
        ({"recipes": {"a": {"scheme": "int8_blck32"}}}, "'int8_block32'"),
        ({"targets": ["npuu"]}, "did you mean 'npu'?"),
        ({"exclude": [{"model": 3}]}, "exclude.0.model"),
        ({"exclude": [{"model": "huge"}]}, "exclude.0 matches no cell"),
        ({"exclude": [{}]}, "the rules leave no cell"),
        ({"models": {}}, "no models are listed"),
        ({"models": {"a/b": "demo"}}, "'a/b' cannot name a folder"),
        ({"models": ["demo"]}, "models"),
        ({"texts": {"prose": "no-such-file.txt"}}, "texts.prose: no file 'no-such-file.txt'"),
        ({"time_limit_minutes": 0}, "time_limit_minutes"),
        ({"threads": 0}, "threads"),
    ],
)
def test_a_fault_is_refused_with_its_key(change, line):
    assert line in refused({**SWEEP, **change})


def test_a_sweep_that_is_no_mapping_is_refused():
    assert "a mapping of keys" in refused(["models"])


def test_the_schema_in_the_repository_is_that_of_the_code():
    """After a change, write the text on the right of the last line into the file."""
    text = (FOLDER / "sweep.schema.json").read_text(encoding="utf-8")
    assert text == json.dumps(sweep_schema(), indent=2) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_sweeps_that_ship_are_read_and_say_what_they_are_for(path, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    assert cells_of(load_sweep(path), where=str(path))
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith("# ")
    assert second == "# yaml-language-server: $schema=sweep.schema.json"
