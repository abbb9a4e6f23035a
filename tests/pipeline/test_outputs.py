"""Every verb with an output refuses, before any work, one that would harm an input or a file of the user."""

from __future__ import annotations

import os
import shutil
from importlib import resources
from pathlib import Path

import pytest

import quantkit
from quantkit.errors import InputError
from quantkit.pipeline import quantize as quantize_module
from quantkit.pipeline.package import pack
from quantkit.private import protect as protect_module
from quantkit.recipe import Recipe

pytestmark = pytest.mark.once


@pytest.fixture
def model(tmp_path, monkeypatch):
    def no_work(*_, **__):
        pytest.fail("the work began")

    monkeypatch.setattr(quantize_module, "resolve", no_work)
    monkeypatch.setattr(protect_module, "resolve", no_work)
    demo = Path(str(resources.files("quantkit") / "assets" / "demo"))
    return shutil.copytree(demo, tmp_path / "out" / "model")


def verbs(model, output, force):
    yield lambda: quantkit.quantize(model, output=output, force=force)
    yield lambda: protect_module.protect(
        Recipe(model=str(model)), key_file=model.parent.parent / "key", output=output, force=force
    )
    yield lambda: pack(model, output, force=force)


def contents(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("place", ["out", "out/model", "out/model/new", "link"])
def test_an_output_around_or_inside_the_input(place, force, model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    (model / "manifest.json").write_text('{"files": {}}')
    before = contents(tmp_path)
    for verb in verbs(model, tmp_path / place, force):
        with pytest.raises(InputError, match="or replace it"):
            verb()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("entry", ["a link", "a pipe", "a file", "a device"])
def test_an_output_that_is_no_folder(entry, model, tmp_path):
    (model / "manifest.json").write_text('{"files": {}}')
    place = tmp_path / "place"
    if entry == "a link":
        place.symlink_to(tmp_path / "nowhere")
    elif entry == "a pipe":
        os.mkfifo(place)
    elif entry == "a file":
        place.write_text("mine")
    else:
        place = Path(os.devnull)
    before = contents(tmp_path)
    for verb in verbs(model, place, True):
        with pytest.raises(InputError, match=f"{entry} is in the way"):
            verb()
    assert contents(tmp_path) == before


def test_statistics_in_the_output_and_statistics_that_are_no_folder(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place, fault in (("new/statistics", "or replace it"), ("file", "not a folder")):
        with pytest.raises(InputError, match=fault):
            quantkit.quantize(model, output=tmp_path / "new", statistics=tmp_path / place)
