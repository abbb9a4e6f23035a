"""What a fit loses, against sums written out in float64 over the inputs themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import decode_all
from quantkit.quantization.rounding.errors import Sums, sums_of
from quantkit.quantization.rounding.rtn import round_to_nearest

pytestmark = pytest.mark.once


def case(rows=40, columns=70, tokens=300):
    random = np.random.default_rng(0)
    x_TI = (random.normal(size=(tokens, columns)) * np.linspace(0.1, 3, columns)).astype(np.float32)
    return random.normal(size=(rows, columns)).astype(np.float32), x_TI


def relative(difference, whole):
    return float(np.sqrt((difference.astype(np.float64) ** 2).sum() / (whole.astype(np.float64) ** 2).sum()))


@pytest.mark.parametrize("grid", [Grid(block=32), Grid(bits=4, block=32), Grid(bits=4, is_symmetric=False)])
def test_errors_are_those_of_the_weights_and_of_the_outputs(grid):
    weight_OI, x_TI = case()
    coarse = replace(round_to_nearest(np.round(weight_OI, 1), grid), is_plain=False)  # any other fit
    moment_II = (x_TI.T.astype(np.float64) @ x_TI / len(x_TI)).astype(np.float32)
    sums = sums_of(weight_OI, coarse, grid, moment_II)
    lost = weight_OI - decode_all(coarse, 70)
    plain = weight_OI - decode_all(round_to_nearest(weight_OI, grid), 70)
    assert sums.weights.error == pytest.approx(relative(lost, weight_OI), rel=1e-5)
    assert sums.weights.plain_error == pytest.approx(relative(plain, weight_OI), rel=1e-5)
    outputs = x_TI.astype(np.float64)
    assert sums.outputs.error == pytest.approx(relative(outputs @ lost.T, outputs @ weight_OI.T), rel=1e-4)
    assert sums.outputs.plain_error == pytest.approx(
        relative(outputs @ plain.T, outputs @ weight_OI.T), rel=1e-4
    )
    assert sums.weights.plain_errors < sums.weights.errors


def test_parts_add_up_and_plain_is_plain():
    weight_OI, x_TI = case()
    grid, moment_II = Grid(block=32), (x_TI.T @ x_TI / len(x_TI)).astype(np.float32)

    def sums(rows):
        return sums_of(rows, round_to_nearest(rows, grid), grid, moment_II)

    whole, parts = sums(weight_OI), sums(weight_OI[:13]) + sums(weight_OI[13:])
    assert parts.outputs.error == pytest.approx(whole.outputs.error, rel=1e-6)
    assert whole.outputs.error == whole.outputs.plain_error
    assert Sums().weights.error == 0.0
    assert Sums().outputs.values == 0.0


def test_without_calibration_a_sample_of_the_rows_tells():
    weight_OI = np.random.default_rng(1).normal(size=(3000, 64)).astype(np.float32)
    grid = Grid(block=32)
    encoded = round_to_nearest(weight_OI, grid)
    sums = sums_of(weight_OI, encoded, grid, None)
    exact = relative(weight_OI - decode_all(encoded, 64), weight_OI)
    assert sums.weights.error == pytest.approx(exact, rel=0.05)
    assert sums.weights.values == pytest.approx(float((weight_OI.astype(np.float64) ** 2).sum()), rel=0.1)
    assert sums.outputs.values == 0.0
