"""Windows of a user's calibration text, with windows of the bundled text among them."""

from __future__ import annotations

import numpy as np
import pytest
from sentences import DEMO

from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.pipeline.stages.calibration_text import calibration_windows
from quantkit.recipe import Calibration, Recipe
from quantkit.runtime.tokenizer import open_text

GREEK = "Μῆνιν ἄειδε, θεά, Πηληϊάδεω Ἀχιλῆος οὐλομένην, πολλὰς δὲ ψυχὰς Ἄϊδι προΐαψεν ἡρώων. " * 100


def windows_of(**calibration):
    source = open_source(str(DEMO))
    recipe = Recipe(model=str(DEMO), calibration=Calibration(length=32, **calibration))
    return calibration_windows(recipe, source, inspect_source(source))


@pytest.fixture
def greek(tmp_path):
    path = tmp_path / "greek.txt"
    path.write_text(GREEK, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def known():
    return set(open_text(DEMO).encode(GREEK))


@pytest.mark.parametrize(
    ("num_windows", "varied", "expected"), [(10, 0.2, 2), (10, 0.0, 0), (2, 0.2, 0), (8, 0.5, 4), (1, 0.9, 0)]
)
def test_a_share_of_the_windows_is_varied(greek, known, num_windows, varied, expected):
    windows_NT = windows_of(text=str(greek), windows=num_windows, varied=varied)
    assert windows_NT.shape == (num_windows, 32)
    strange = [not set(window_T.tolist()) <= known for window_T in windows_NT]
    assert sum(strange) == expected


def test_varied_windows_are_spread_among_the_others(greek, known):
    windows_NT = windows_of(text=str(greek), windows=20)
    places = [place for place, ids_T in enumerate(windows_NT) if not set(ids_T.tolist()) <= known]
    assert len(places) == 4
    assert all(place // 5 == number for number, place in enumerate(places))


def test_token_ids_and_the_bundled_text_are_taken_alone(tmp_path):
    ids_T = np.arange(640) % 7
    np.save(tmp_path / "ids.npy", ids_T)
    windows_NT = windows_of(text=str(tmp_path / "ids.npy"), windows=10)
    assert windows_NT.max() < 7
    np.testing.assert_array_equal(windows_of(windows=10), windows_of(windows=10, varied=0.9))
