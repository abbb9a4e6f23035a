"""The fit of `scripts/bench_scale.py`: a constant and a factor, neither negative."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
pytestmark = pytest.mark.once


def test_the_fit_finds_constant_and_factor():
    from bench_scale import fitted

    work = np.array([1.0, 3.0, 10.0])
    assert fitted(work, 2 + 0.5 * work) == pytest.approx([2, 0.5])
    assert fitted(work, 0.5 * work) == pytest.approx([0, 0.5], abs=1e-12)


def test_neither_is_negative_and_the_relative_error_is_least():
    from bench_scale import fitted

    work, observed = np.array([1.0, 2.0, 4.0]), np.array([0.5, 2.0, 5.0])  # a line below zero at no work
    constant, factor = fitted(work, observed)
    assert constant == 0
    grid = np.linspace(0.1, 2, 20_000)
    errors = np.square(grid[:, None] * work / observed - 1).sum(axis=1)
    assert factor == pytest.approx(grid[errors.argmin()], rel=1e-3)


def test_shapes_are_those_that_were_published():
    from bench_scale import PROJECTED

    billions = {
        name: sum(np.prod(sizes, dtype=float) for sizes in shape.tensors().values()) / 1e9
        for name, shape in PROJECTED.items()
    }
    assert billions == pytest.approx({"8B": 8.03, "70B": 70.6, "405B": 405.9}, rel=2e-3)
