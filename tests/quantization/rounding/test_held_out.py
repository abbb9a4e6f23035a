"""Fits against plain rounding on tokens that calibration left out, and on tokens that nothing has read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from layers import one_layer

from quantkit.plan.formats import Grid, in_blocks
from quantkit.quantization.calibration import running
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import decode_all
from quantkit.quantization.layout import Contents, Pack
from quantkit.quantization.rounding.apply import prepared_fit, quantized_parts
from quantkit.quantization.rounding.rtn import round_to_nearest

pytestmark = pytest.mark.once
GRID = Grid(bits=4, block=32)
INPUTS, OUTPUTS = 96, 64
NAMES = frozenset({"second_moment", "held_out"})


def statistics_of(x_TI):
    sums = running.start(x_TI.shape[1], NAMES, 0)
    running.add(sums, torch.from_numpy(x_TI))
    arrays, values = running.finish(sums)
    return InputStatistics(**arrays, **values)


def tokens(seed, count, directions=8):
    """Tokens along a few directions of their own."""
    random = np.random.default_rng(seed)
    x_TI = random.normal(size=(count, directions)) @ random.normal(size=(directions, INPUTS))
    return (x_TI + 0.05 * random.normal(size=(count, INPUTS))).astype(np.float32)


def weight():
    return (np.random.default_rng(9).normal(size=(OUTPUTS, INPUTS)) * 0.1).astype(np.float32)


def mean_error(weight_OI, encoded, x_TI):
    """Mean over tokens of the relative squared error, in float64."""
    x_TI, weight_OI = x_TI.astype(np.float64), weight_OI.astype(np.float64)
    lost_TO = x_TI @ (weight_OI - decode_all(encoded, INPUTS)).T
    return ((lost_TO**2).sum(1) / ((x_TI @ weight_OI.T) ** 2).sum(1)).mean()


@pytest.mark.parametrize("count", [1, 3, 256, 5000])
def test_held_out_rows_and_the_second_moment_share_no_row(count):
    x_TI = tokens(0, count)
    statistics = statistics_of(x_TI)
    held_TI = statistics.held_out_TI
    assert len(held_TI) <= 256
    left = {row.tobytes() for row in x_TI} - {row.tobytes() for row in held_TI}
    rows_TI = np.array([row for row in x_TI if row.tobytes() in left] or [*x_TI], np.float64)
    np.testing.assert_allclose(
        statistics.second_moment_II, rows_TI.T @ rows_TI / len(rows_TI), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("gradients", [False, True])
def test_a_fit_that_loses_more_on_held_out_tokens_gives_way(gradients):
    weight_OI, calibrated = weight(), statistics_of(tokens(0, 2000))
    if gradients:
        moment_OO = np.cov(np.random.default_rng(3).normal(size=(OUTPUTS, 500))).astype(np.float32)
        calibrated = replace(calibrated, gradient_OO=moment_OO, num_gradients=500)

    def encoded(statistics):
        prepared = prepared_fit("gptq", GRID, statistics)
        return (prepared.jointly(statistics) or prepared.encode)(weight_OI)

    plain = round_to_nearest(weight_OI, GRID)
    kept, given_way = encoded(calibrated), encoded(replace(calibrated, held_out_TI=tokens(7, 200)))
    assert not kept.is_plain
    assert mean_error(weight_OI, kept, calibrated.held_out_TI) < mean_error(
        weight_OI, plain, calibrated.held_out_TI
    )
    assert given_way.is_plain
    assert (given_way.codes == plain.codes).all()


def test_the_rows_that_give_way_are_counted():
    layer = one_layer(OUTPUTS, INPUTS)
    pack = Pack(name="w", layers=(layer,), format=in_blocks(32, bits=4))
    calibrated = statistics_of(tokens(0, 2000))
    shares = []
    for held_out_TI in (calibrated.held_out_TI, tokens(7, 200)):
        losses, statistics = {}, replace(calibrated, held_out_TI=held_out_TI)
        parts = quantized_parts(
            Contents(packs=(pack,), tables=(), norms=(), norm_biases=frozenset()),
            type("Source", (), {"read": lambda self, name, start=0, count=None: weight()[start:][:count]})(),
            fit="gptq",
            statistics=lambda _, statistics=statistics: statistics,
            losses=losses,
        )
        assert len(list(parts)) == 2
        shares.append(losses["w"].num_plain / losses["w"].num_rows)
    assert shares == [0, 1]


@pytest.mark.parametrize("case", ["loud channel", "loud tokens", "few tokens"])
def test_hostile_activations_lose_no_more_than_plain_rounding(case):
    random, weight_OI = np.random.default_rng(4), weight()
    x_TI = random.normal(size=(20_000, INPUTS)).astype(np.float32)
    if case == "loud channel":
        x_TI[:, 5] = 1e4
    if case == "loud tokens":  # they outweigh all others in the second moment
        x_TI[::97] = 1e4 * tokens(1, len(x_TI[::97]), directions=1)
    seen_TI, unseen_TI = x_TI[:256], x_TI[256:]
    if case != "few tokens":
        seen_TI, unseen_TI = x_TI[:10_000], x_TI[10_000:]
    prepared = prepared_fit("gptq", GRID, statistics_of(seen_TI))
    plain = mean_error(weight_OI, round_to_nearest(weight_OI, GRID), unseen_TI)
    assert mean_error(weight_OI, prepared.encode(weight_OI), unseen_TI) <= 1.02 * plain
