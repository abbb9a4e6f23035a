"""Rotations of every width: orthogonal, seeded, and as even as Hadamard matrices allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.quantization.transforms.hadamard import paley_hadamard, random_hadamard, sylvester_hadamard

pytestmark = pytest.mark.once
PALEY = (4, 8, 12, 20, 24, 28, 32, 36, 44, 48, 60, 68, 72, 76, 80, 84, 104, 108)


@settings(max_examples=60)
@given(width=st.integers(1, 200), seed=st.integers(0, 5))
def test_a_rotation_is_orthogonal(width, seed):
    rotation = random_hadamard(width, seed)
    matrix = rotation.matrix_II()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-12)
    x = np.random.default_rng(0).normal(size=(3, width))
    np.testing.assert_allclose(rotation.written(x), x @ matrix, atol=1e-12)
    np.testing.assert_allclose(rotation.read(x), x @ np.linalg.inv(matrix).T, atol=1e-10)


@pytest.mark.parametrize("order", PALEY)
def test_paley_gives_hadamard_matrices(order):
    matrix = paley_hadamard(order)
    assert set(np.unique(matrix)) == {-1, 1}
    assert (matrix @ matrix.T == order * np.eye(order)).all()


@pytest.mark.parametrize("order", [1, 2, 6, 10, 92])
def test_orders_that_it_cannot_make(order):
    assert paley_hadamard(order) is None


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_sylvester(size):
    matrix = sylvester_hadamard(size)
    assert (matrix @ matrix.T == size * np.eye(size)).all()


@pytest.mark.parametrize(
    "width", [64, 384, 576, 640, 768, 896, 1024, 1152, 1600, 2048, 2560, 3072, 4096, 5120]
)
def test_widths_of_published_models_spread_evenly(width):
    rotation = random_hadamard(width, 0)
    one = np.zeros((1, width))
    one[0, width // 3] = 1
    np.testing.assert_allclose(np.abs(rotation.written(one)), width**-0.5, rtol=1e-9)


def test_an_odd_width_still_spreads():
    rotation = random_hadamard(43 * 256, 0)
    one = np.zeros((1, 43 * 256))
    one[0, 5] = 1
    assert np.abs(rotation.written(one)).max() < 0.05


def test_seeds_differ():
    assert (random_hadamard(64, 1).matrix_II() == random_hadamard(64, 1).matrix_II()).all()
    assert (random_hadamard(64, 1).matrix_II() != random_hadamard(64, 2).matrix_II()).any()
