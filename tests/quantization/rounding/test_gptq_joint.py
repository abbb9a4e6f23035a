"""Feedback along rows and columns against GPTQ on all weights as one long row, and what it gains."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.plan.formats import Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import Encoded, decode_all
from quantkit.quantization.rounding import gptq
from quantkit.quantization.rounding import gptq_joint as both_sides
from quantkit.quantization.rounding.apply import prepared_fit
from quantkit.quantization.rounding.gptq import factorise, with_feedback
from quantkit.quantization.rounding.gptq_joint import factorise_outputs, with_both_feedbacks

pytestmark = pytest.mark.once
GRIDS = [
    Grid(bits=4, block=16),
    Grid(bits=4, block=16, is_symmetric=False),
    Grid(bits=4, block=32),
    Grid(bits=8, block=None),
]
ON_GRIDS = pytest.mark.parametrize("grid", GRIDS, ids=str)


def correlated(width, tokens, seed):
    """Tokens that a few directions explain, on channels of different size."""
    random = np.random.default_rng(seed)
    mixing_HI = random.normal(size=(max(2, width // 4), width))
    noise_TI = 0.3 * random.normal(size=(tokens, width))
    sizes_I = np.exp(0.7 * random.normal(size=width))
    return (random.normal(size=(tokens, len(mixing_HI))) @ mixing_HI + noise_TI) * sizes_I


def moment(x_TI):
    return (x_TI.T @ x_TI / len(x_TI)).astype(np.float32)


def statistics_of(rows, columns, tokens=900):
    return InputStatistics(
        num_rows=tokens,
        second_moment_II=moment(correlated(columns, tokens, 0)),
        gradient_OO=moment(correlated(rows, tokens, 1)),
        num_gradients=tokens,
    )


def weights(rows, columns):
    return (np.random.default_rng(7).normal(size=(rows, columns)) * 0.02).astype(np.float32)


def fitted(weight_OI, grid, seen):
    return with_both_feedbacks(weight_OI, grid, factorise(seen, grid), factorise_outputs(seen, grid))


def damped(moment_II, tokens, rule=gptq):
    factor = rule.DAMPING + rule.SCARCITY * len(moment_II) / tokens
    return moment_II.astype(np.float64) + factor * np.diag(np.diag(moment_II.astype(np.float64)))


def one_long_row(weight_OI, seen, grid, encoded):
    """The paper's first algorithm on vec(W), whose second moment is the Kronecker product of both."""
    rows, columns = weight_OI.shape
    across_rows = np.argsort(-np.diag(seen.gradient_OO), kind="stable")
    across_columns = np.argsort(-np.diag(seen.second_moment_II), kind="stable")
    order = (across_rows[:, None] * columns + across_columns).ravel()
    whole = np.kron(
        damped(seen.gradient_OO, seen.num_gradients, both_sides), damped(seen.second_moment_II, seen.num_rows)
    )
    upper = np.linalg.cholesky(np.linalg.inv(whole[np.ix_(order, order)])).T
    rest, codes = weight_OI.astype(np.float64).ravel()[order], np.zeros((rows, columns), int)
    for step, place in enumerate(order):
        row, column = divmod(int(place), columns)
        block = column // (grid.block or columns)
        scale = float(encoded.scales[row, block])
        zero = 0 if encoded.zeros is None else int(encoded.zeros[row, block])
        code = int(np.clip(np.round(rest[step] / scale) + zero, grid.lowest, grid.largest))
        codes[row, column] = code
        rest[step:] -= (rest[step] - (code - zero) * scale) / upper[step, step] * upper[step, step:]
    return codes


@ON_GRIDS
@pytest.mark.parametrize("shape", [(5, 16), (12, 40), (3, 70)])
def test_the_codes_are_those_of_one_long_row(grid, shape, monkeypatch):
    """Row by row; a last block that is not full, and more columns than a panel has."""
    monkeypatch.setattr(both_sides, "GROUP", 1)
    seen, weight_OI = statistics_of(*shape), weights(*shape)
    made = fitted(weight_OI, grid, seen)
    wanted = one_long_row(weight_OI, seen, grid, made)
    assert (made.codes.reshape(shape[0], -1)[:, : shape[1]] == wanted).all()


@ON_GRIDS
def test_one_group_of_all_rows_is_gptq(grid, monkeypatch):
    monkeypatch.setattr(both_sides, "GROUP", 64)
    seen, weight_OI = statistics_of(24, 72), weights(24, 72)
    made, plain = fitted(weight_OI, grid, seen), with_feedback(weight_OI, grid, factorise(seen, grid))
    assert (made.codes == plain.codes).all()
    assert (made.scales == plain.scales).all()


@pytest.mark.parametrize("group", [1, 5, 16])
def test_a_group_is_given_the_best_that_rows_before_it_leave(group, monkeypatch):
    """The least cost that its rows and all later ones can reach, found by solving for them."""
    monkeypatch.setattr(both_sides, "GROUP", group)
    seen, weight_OI = statistics_of(20, 32), weights(20, 32).astype(np.float64)
    rows, wanted = factorise_outputs(seen, GRIDS[0]), []

    def noting(wanted_OI, grid, _):
        wanted.append(wanted_OI.astype(np.float64))
        codes = np.zeros((len(wanted_OI), 2, 16), np.int8)  # everything is lost
        return Encoded(codes=codes, scales=np.ones((len(wanted_OI), 2), np.float32))

    monkeypatch.setattr(both_sides, "with_feedback", noting)
    with_both_feedbacks(weight_OI.astype(np.float32), GRIDS[0], factorise(seen, GRIDS[0]), rows)
    moment_OO = damped(seen.gradient_OO, seen.num_gradients, both_sides)
    for number, made_OI in enumerate(wanted):
        before, here, later = np.split(rows.order_I, [group * number, group * (number + 1)])
        free = np.linalg.inv(moment_OO[np.ix_(later, later)]) if len(later) else np.zeros((0, 0))
        left_OO = moment_OO - moment_OO[:, later] @ free @ moment_OO[later]
        best_OI = np.linalg.solve(
            left_OO[np.ix_(here, here)], left_OO[np.ix_(here, before)] @ weight_OI[before]
        )
        assert np.abs(made_OI - weight_OI[here] - best_OI).max() < 1e-4 * np.abs(weight_OI).max()


def cost(lost_OI, gradients_TO, inputs_TI):
    """tr(G E H E^T)."""
    return float((((gradients_TO @ lost_OI) @ moment(inputs_TI)) * (gradients_TO @ lost_OI)).sum())


@ON_GRIDS
def test_it_gains_on_gptq_on_tokens_that_it_never_saw(grid):
    rows, columns = 96, 128
    inputs_TI, gradients_TO = correlated(columns, 5000, 0), correlated(rows, 5000, 1)
    seen = InputStatistics(
        num_rows=3000,
        second_moment_II=moment(inputs_TI[:3000]),
        gradient_OO=moment(gradients_TO[:3000]),
        num_gradients=3000,
    )
    weight_OI = weights(rows, columns)
    errors = []
    for made in (with_feedback(weight_OI, grid, factorise(seen, grid)), fitted(weight_OI, grid, seen)):
        lost_OI = decode_all(made, columns).astype(np.float64) - weight_OI
        errors.append(cost(lost_OI, gradients_TO[3000:], inputs_TI[3000:]))
    assert errors[1] < 0.3 * errors[0]


def test_few_gradients_do_not_mislead_it():
    """Fewer tokens than outputs: correlations are mostly chance, and little may be lost by them."""
    rows, columns, grid = 128, 64, Grid(bits=4, block=32)
    inputs_TI = correlated(columns, 2000, 0)
    gradients_TO = np.random.default_rng(3).normal(size=(3000, rows))  # rows that have nothing in common
    seen = InputStatistics(
        num_rows=2000,
        second_moment_II=moment(inputs_TI),
        gradient_OO=moment(gradients_TO[:40]),
        num_gradients=40,
    )
    weight_OI = weights(rows, columns)
    errors = []
    for made in (with_feedback(weight_OI, grid, factorise(seen, grid)), fitted(weight_OI, grid, seen)):
        lost_OI = decode_all(made, columns).astype(np.float64) - weight_OI
        errors.append(cost(lost_OI, gradients_TO[40:], inputs_TI))
    assert errors[1] < 1.3 * errors[0]


@pytest.mark.parametrize("spoiled", [None, 0, np.inf])
def test_gradients_that_say_nothing_leave_rows_to_themselves(spoiled):
    seen = statistics_of(8, 32)
    bad_OO = None if spoiled is None else np.full((8, 8), spoiled, np.float32)
    fitting = prepared_fit("gptq", GRIDS[0], seen)
    assert fitting.jointly(seen) is not None
    other = InputStatistics(
        num_rows=9, second_moment_II=seen.second_moment_II, gradient_OO=bad_OO, num_gradients=9
    )
    assert fitting.jointly(other) is None


def test_an_output_that_nothing_reads_moves_no_other():
    rows, columns, grid = 24, 40, GRIDS[0]
    seen, weight_OI = statistics_of(rows, columns), weights(rows, columns)
    dead = seen.gradient_OO.copy()
    dead[5], dead[:, 5] = 0, 0
    seen = InputStatistics(
        num_rows=900, second_moment_II=seen.second_moment_II, gradient_OO=dead, num_gradients=900
    )
    made, others = fitted(weight_OI, grid, seen), np.arange(rows) != 5
    changed_OI = weight_OI.copy()
    changed_OI[5] *= -3
    assert (fitted(changed_OI, grid, seen).codes[others] == made.codes[others]).all()
