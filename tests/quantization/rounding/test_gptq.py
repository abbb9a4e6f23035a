"""Feedback against the textbook, column by column in float64, and by what it gains on correlated inputs."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.plan.formats import Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import decode_all
from quantkit.quantization.rounding import FITS, gptq
from quantkit.quantization.rounding.gptq import DAMPING, SCARCITY, factorise, with_feedback

pytestmark = pytest.mark.once
GRIDS = [
    Grid(bits=4, block=32),
    Grid(bits=4, block=32, is_symmetric=False),
    Grid(bits=4, block=128),
    Grid(bits=8, block=32),
    Grid(bits=8, block=None),
]
ON_GRIDS = pytest.mark.parametrize("grid", GRIDS, ids=str)


def inputs(columns, tokens, *, seed=0, hidden=None):
    """Tokens that a few directions explain, on channels of different size."""
    random = np.random.default_rng(seed)
    mixing_HI = random.normal(size=(hidden or columns // 4, columns))
    noise_TI = 0.3 * random.normal(size=(tokens, columns))
    sizes_I = np.exp(0.7 * random.normal(size=columns))
    return (random.normal(size=(tokens, len(mixing_HI))) @ mixing_HI + noise_TI) * sizes_I


def weights(rows, columns, seed=7):
    return (np.random.default_rng(seed).normal(size=(rows, columns)) * 0.02).astype(np.float32)


def statistics_of(x_TI):
    return InputStatistics(
        num_rows=len(x_TI), second_moment_II=(x_TI.T @ x_TI / len(x_TI)).astype(np.float32)
    )


def damped(statistics):
    moment_II = statistics.second_moment_II.astype(np.float64)
    factor = DAMPING + SCARCITY * len(moment_II) / statistics.num_rows
    return moment_II + factor * np.diag(np.diag(moment_II))


def textbook(weight_OI, moment_II, grid, encoded):
    """The paper's first algorithm: the inverse's upper factor, columns one by one, by falling power."""
    order = np.argsort(-np.diag(moment_II))
    inverse_II = np.linalg.inv(moment_II[np.ix_(order, order)])
    upper_II = np.linalg.cholesky(inverse_II).T
    rest_OI, codes_OI = weight_OI.astype(np.float64)[:, order], np.zeros(weight_OI.shape, int)
    for step, column in enumerate(order):
        block = column // (grid.block or len(order))
        scale_O = encoded.scales[:, block].astype(np.float64)
        zero_O = 0 if encoded.zeros is None else encoded.zeros[:, block].astype(int)
        codes_OI[:, column] = np.clip(
            np.round(rest_OI[:, step] / scale_O) + zero_O, grid.lowest, grid.largest
        )
        error_O = (rest_OI[:, step] - (codes_OI[:, column] - zero_O) * scale_O) / upper_II[step, step]
        rest_OI[:, step:] -= error_O[:, None] * upper_II[step, None, step:]
    return codes_OI


@ON_GRIDS
@pytest.mark.parametrize("columns", [40, 64, 200])
def test_the_codes_are_the_textbooks(grid, columns):
    """One panel, whole panels and a part of one; a last block that is not full."""
    statistics = statistics_of(inputs(columns, 600))
    weight_OI = weights(24, columns)
    made = with_feedback(weight_OI, grid, factorise(statistics, grid))
    wanted = textbook(weight_OI, damped(statistics), grid, made)
    assert (made.codes.reshape(24, -1)[:, :columns] == wanted).all()


def test_the_factor_holds_over_several_of_its_panels(monkeypatch):
    monkeypatch.setattr(gptq, "FACTOR_PANEL", 24)
    statistics = statistics_of(inputs(100, 600))
    grid, weight_OI = Grid(bits=4, block=32), weights(8, 100)
    made = with_feedback(weight_OI, grid, factorise(statistics, grid))
    wanted = textbook(weight_OI, damped(statistics), grid, made)
    assert (made.codes.reshape(8, -1)[:, :100] == wanted).all()


def test_the_factor_is_that_of_the_moment():
    """H = (F^T + I) D (F + I) in the order of the columns, with D up to the scale that fits do not see."""
    statistics = statistics_of(inputs(90, 500))
    made = factorise(statistics, Grid(bits=4, block=32))
    moment_II = damped(statistics)[np.ix_(made.order_I, made.order_I)]
    unit_II = made.factor_II.astype(np.float64) + np.eye(90)
    assert (np.triu(made.factor_II) == 0).all()
    assert (np.diff(np.diag(moment_II)) <= 0).all()
    left_II = np.linalg.solve(unit_II.T, moment_II)
    diagonal_II = np.linalg.solve(unit_II.T, left_II.T)
    pivots_I = np.diag(diagonal_II)
    assert np.abs(diagonal_II - np.diag(pivots_I)).max() < 1e-5 * pivots_I.max()
    ratio_I = made.importance_I[made.order_I] / pivots_I
    assert ratio_I == pytest.approx(np.full(90, ratio_I[0]), rel=1e-5)


@ON_GRIDS
def test_each_fit_gains_on_the_one_before_it_on_tokens_that_it_never_saw(grid):
    """The squared error of the outputs, ||X (W - Q)^T||^2."""
    columns = 256
    x_TI = inputs(columns, 6000)
    statistics, held_out_TI = statistics_of(x_TI[:4000]), x_TI[4000:]
    weight_OI, errors = weights(48, columns), {}
    for name in ("rtn", "output", "gptq"):
        row = FITS[name]
        encoded = row.encode(weight_OI, grid, row.prepare(statistics, grid) if row.prepare else None)
        lost_OI = decode_all(encoded, columns).astype(np.float64) - weight_OI
        errors[name] = float(((held_out_TI @ lost_OI.T) ** 2).sum())
    assert errors["output"] <= errors["rtn"]
    assert errors["gptq"] < 0.6 * errors["output"]


def test_few_tokens_do_not_mislead_it():
    """Fewer tokens than inputs: the correlations are mostly chance, and believing them would cost."""
    columns, grid = 256, Grid(bits=4, block=32)
    x_TI = inputs(columns, 2000, hidden=200)
    weight_OI = weights(48, columns)
    statistics, errors = statistics_of(x_TI[:64]), {}
    for name in ("output", "gptq"):
        row = FITS[name]
        encoded = row.encode(weight_OI, grid, row.prepare(statistics, grid))
        lost_OI = decode_all(encoded, columns).astype(np.float64) - weight_OI
        errors[name] = float(((x_TI[64:] @ lost_OI.T) ** 2).sum())
    assert errors["gptq"] < errors["output"]


def test_the_sizes_of_channels_change_nothing_but_units():
    """Channels scaled up, as outliers are: the damping must be the same share of each."""
    columns, grid = 90, Grid(bits=8, block=None)
    x_TI = inputs(columns, 500)
    sizes_I = np.mean(x_TI**2, axis=0) ** 0.4  # larger ones grow most, so that their order stays
    plain, scaled = factorise(statistics_of(x_TI), grid), factorise(statistics_of(x_TI * sizes_I), grid)
    assert (plain.order_I == scaled.order_I).all()
    ordered_I = sizes_I[plain.order_I]
    wanted_II = plain.factor_II * ordered_I[:, None] ** -1.0 * ordered_I
    assert np.abs(scaled.factor_II - wanted_II).max() < 1e-4 * np.abs(wanted_II).max()
    ratio_I = scaled.importance_I / (plain.importance_I * sizes_I**2)
    is_free = plain.importance_I > 0.01 * np.median(plain.importance_I)  # of the floor
    is_free &= scaled.importance_I > 0.01 * np.median(scaled.importance_I)
    assert is_free.sum() > columns // 2
    assert ratio_I[is_free] == pytest.approx(np.full(is_free.sum(), ratio_I[is_free][0]), rel=1e-4)


def test_a_dead_channel_keeps_its_nearest_codes_and_moves_no_other():
    columns, grid = 96, Grid(bits=4, block=32)
    x_TI = inputs(columns, 800)
    x_TI[:, 40] = 0
    weight_OI = weights(16, columns)
    prepared = factorise(statistics_of(x_TI), grid)
    made = with_feedback(weight_OI, grid, prepared)
    lost_O = np.abs(decode_all(made, columns)[:, 40] - weight_OI[:, 40])
    scale_O = np.abs(made.scales[:, 1])
    ends = np.array([grid.lowest, grid.largest])
    is_inside = np.isin(made.codes[:, 1, 8], ends, invert=True)
    assert (lost_O[is_inside] <= scale_O[is_inside] * 0.5001).all()
    place = int(np.flatnonzero(prepared.order_I == 40)[0])
    assert (prepared.factor_II[place] == 0).all()
    assert (prepared.factor_II[:, place] == 0).all()
