"""What every fit of the table promises on every grid, whatever it minimises."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.grid import decode, encode
from quantkit.quantizers import QUANTIZERS
from quantkit.recipe import Recipe
from quantkit.schemes import SCHEMES, Grid

pytestmark = pytest.mark.once
GRIDS = {scheme.grid for scheme in SCHEMES.values()}
FITS = pytest.mark.parametrize("name", QUANTIZERS)
ON_EVERY_GRID = pytest.mark.parametrize("grid", sorted(GRIDS, key=str), ids=lambda grid: f"block{grid.block}")


def weights(rows=12, columns=200):
    """Correlated rows with a few outliers, as trained ones are."""
    random = np.random.default_rng(0)
    weight_OI = random.normal(size=(rows, 8)) @ random.normal(size=(8, columns)) * 0.02
    weight_OI[random.integers(0, rows, 6), random.integers(0, columns, 6)] *= 20
    return weight_OI.astype(np.float32)


def quantized(name, weight_OI, grid):
    scales = QUANTIZERS[name](weight_OI, grid)
    return decode(encode(weight_OI, scales, grid), scales, weight_OI.shape[1])


def squared_error(made, wanted):
    return float(((made.astype(np.float64) - wanted) ** 2).sum())


@FITS
@ON_EVERY_GRID
def test_scales_are_positive_finite_and_one_for_each_block(name, grid):
    for weight_OI in (weights(), np.zeros((3, 200), np.float32), weights(1, 1), weights(2, 129)):
        scales = QUANTIZERS[name](weight_OI, grid)
        assert scales.shape == (len(weight_OI), grid.num_blocks(weight_OI.shape[1]))
        assert scales.dtype == np.float32
        assert np.isfinite(scales).all()
        assert (scales > 0).all()


@FITS
@ON_EVERY_GRID
def test_no_worse_than_the_largest_magnitude_rule(name, grid):
    weight_OI = weights()
    wanted = np.zeros_like(weight_OI, np.float64)
    size = grid.block or weight_OI.shape[1]
    for row in range(weight_OI.shape[0]):
        for start in range(0, weight_OI.shape[1], size):
            values = weight_OI[row, start : start + size].astype(np.float64)
            scale = np.abs(values).max() / 127
            wanted[row, start : start + size] = np.round(values / scale) * scale
    naive = squared_error(wanted, weight_OI)
    assert naive > 0
    assert squared_error(quantized(name, weight_OI, grid), weight_OI) <= naive * 1.001


@FITS
@ON_EVERY_GRID
def test_weights_that_lie_on_the_grid_are_kept(name, grid):
    random = np.random.default_rng(3)
    size = grid.block or 256
    codes = random.integers(-127, 128, (4, 256 // size, size)).astype(np.int8)
    codes[:, :, 0] = 127
    scales = np.ldexp(np.float32(1), random.integers(-12, 2, codes.shape[:2])).astype(np.float32)
    weight_OI = decode(codes, scales, 256)
    assert (quantized(name, weight_OI, grid) == weight_OI).all()


@FITS
@ON_EVERY_GRID
def test_rows_are_fitted_alone_so_that_any_cut_gives_the_same(name, grid):
    weight_OI = weights()
    whole = QUANTIZERS[name](weight_OI, grid)
    parts = [QUANTIZERS[name](weight_OI[start : start + 5], grid) for start in range(0, 12, 5)]
    assert (np.concatenate(parts) == whole).all()


def test_smaller_blocks_are_more_accurate():
    weight_OI = weights()
    for name in QUANTIZERS:
        errors = [
            squared_error(quantized(name, weight_OI, Grid(block=block)), weight_OI)
            for block in (16, 32, 64, 128)
        ]
        assert errors == sorted(errors)


def test_a_recipe_can_name_every_fit_and_no_other():
    schema = Recipe.model_json_schema()["properties"]["fit"]
    assert set(schema.get("enum", [schema.get("const")])) == set(QUANTIZERS)
