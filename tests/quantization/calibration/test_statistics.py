"""Running statistics against their definitions, on inputs that are hard to add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calibrating import ALL, check, relative
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.quantization.calibration import running
from quantkit.quantization.calibration.statistics import InputStatistics

pytestmark = pytest.mark.once


def statistics_of(parts, wants=ALL, seed=0) -> InputStatistics:
    seen = running.start(parts[0].shape[-1], frozenset(wants), seed)
    for part in parts:
        running.add(seen, torch.from_numpy(part))
    arrays, values = running.finish(seen)
    return InputStatistics(**arrays, **values)


@settings(max_examples=20)
@given(
    num_rows=st.integers(1, 1500),
    width=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 1500), max_size=4),
    seed=st.integers(0, 2**31),
)
def test_any_cut_of_the_rows_gives_the_definition(num_rows, width, cuts, seed):
    chances = np.random.default_rng(seed)
    x = (chances.normal(size=(num_rows, width)) * np.exp(chances.normal(size=width))).astype(np.float32)
    parts = [part for part in np.split(x, sorted(min(cut, num_rows) for cut in cuts)) if len(part)]
    check(statistics_of(parts), x.astype(np.float64), tolerance=2e-6)


def test_a_width_of_several_panels():
    x = np.random.default_rng(0).normal(size=(700, 2 * running.PANEL + 77)).astype(np.float32)
    made = statistics_of([x], {"second_moment"})
    wanted = x.T.astype(np.float64) @ x / len(x)
    assert relative(made.second_moment_II, wanted) < 1e-6
    assert (made.second_moment_II == made.second_moment_II.T).all()


def test_a_million_tokens_lose_nothing():
    """In a float32 sum the small channel, or the last half of the rows, would vanish."""
    chances = np.random.default_rng(0)
    x = np.stack(
        [
            np.full(1_000_000, 0.1),
            1000 + chances.normal(size=1_000_000),
            1e-3 * chances.normal(size=1_000_000),
            np.zeros(1_000_000),
        ],
        1,
    ).astype(np.float32)
    made = statistics_of([x], {"second_moment", "mean", "mean_magnitude"})
    exact = x.astype(np.float64)
    wanted = exact.T @ exact / len(x)
    root = np.sqrt(np.diag(wanted))
    # Each entry beside the two channels that it is the product of, so that a small channel counts as much.
    live = np.outer(root, root) > 0
    assert (np.abs(made.second_moment_II - wanted)[live] / np.outer(root, root)[live]).max() < 1e-6
    assert np.abs(made.mean_I - exact.mean(0)).max() / 1000 < 1e-6
    assert relative(made.mean_magnitude_I, np.abs(exact).mean(0)) < 1e-6
    assert not made.second_moment_II[3].any()


def test_only_what_is_asked_for_is_there():
    x = np.ones((3, 2), np.float32)
    fields = {
        "second_moment": {"second_moment_II"},
        "peak": {"peak_I"},
        "mean": {"mean_I"},
        "mean_magnitude": {"mean_magnitude_I"},
        "range": {"low", "high"},
        "sample": {"sample_TI"},
    }
    for want, names in fields.items():
        made = statistics_of([x], {want})
        present = {name for name in InputStatistics.__dataclass_fields__ if getattr(made, name) is not None}
        assert present == names | {"num_rows", "num_gradients"}, "counts are always there"
    assert statistics_of([x], {"histogram"}).quantiles["99.9"] == (1.0, 1.0)


def test_constant_and_dead_inputs():
    made = statistics_of([np.zeros((600, 5), np.float32)])
    assert (made.low, made.high) == (0.0, 0.0)
    assert set(made.quantiles.values()) == {(0.0, 0.0)}
    assert not made.second_moment_II.any()
    made = statistics_of([np.full((600, 5), -2.5, np.float32)])
    assert made.quantiles["99.9"] == (-2.5, -2.5)
    assert made.quantiles["mse8"][1] == 0.0
    assert -2.55 < made.quantiles["mse8"][0] < -2.45
    assert (made.second_moment_II == 6.25).all()


def test_the_sample_is_the_same_for_any_batches_and_fair():
    x = np.arange(20_000, dtype=np.float32)[:, None]
    whole, cut = statistics_of([x], {"sample"}), statistics_of(np.split(x, [7, 9000, 9100]), {"sample"})
    assert (whole.sample_TI == cut.sample_TI).all()
    assert len(np.unique(whole.sample_TI)) == running.SAMPLE_ROWS
    assert (statistics_of([x], {"sample"}, seed=1).sample_TI != whole.sample_TI).any()
    drawn = np.concatenate([statistics_of([x], {"sample"}, seed=seed).sample_TI[:, 0] for seed in range(40)])
    in_tenths = np.histogram(drawn, bins=10, range=(0, 20_000))[0]
    expected = len(drawn) / 10
    assert np.abs(in_tenths - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_are_counted(bad):
    x = torch.ones(4, 3)
    assert running.num_nonfinite(x) == 0
    x[2, 1] = bad
    assert running.num_nonfinite(x) == 1
    assert running.num_nonfinite(torch.zeros(0, 3)) == 0
