"""Ranges from the histogram against the values themselves: numpy's quantiles and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.quantization.calibration import running
from quantkit.quantization.calibration.histogram import least_error_range, quantile, read_bins, squared_error

pytestmark = pytest.mark.once
NUM_VALUES = 30_000


def bins_of(values: np.ndarray):
    seen = running.start(1, frozenset({"histogram"}), 0)
    running.add(seen, torch.from_numpy(values.astype(np.float32)[:, None]))
    return read_bins(seen.counts.numpy(), seen.low, seen.high)


def draw(kind: str) -> np.ndarray:
    chances = np.random.default_rng(0)
    normal = chances.normal(size=NUM_VALUES)
    values = {
        "normal": normal,
        "shifted": normal + 7,
        "heavy": np.sign(normal) * np.exp(2 * chances.normal(size=NUM_VALUES)),
        "gelu": np.where(normal > 0, normal, 0.1 * normal * np.exp(normal)),
        "outlier": np.where(np.arange(NUM_VALUES) == 5, 60.0, normal),
        "relu": np.maximum(normal, 0),
        "tiny": normal * 1e-30,
    }
    return values[kind].astype(np.float32).astype(np.float64)


KINDS = ("normal", "shifted", "heavy", "gelu", "outlier", "relu", "tiny")


def rounding_error(values: np.ndarray, low: float, high: float, bits: int) -> float:
    """The naive sum over the values."""
    scale = (high - low) / (2**bits - 1)
    zero = round(-low / scale)
    codes = np.clip(np.rint(values / scale) + zero, 0, 2**bits - 1)
    return float((((codes - zero) * scale - values) ** 2).sum())


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_number_lies_in_its_bin(value):
    bins = bins_of(np.array([value]))
    assert bins.counts_N.tolist() == [1.0]
    assert bins.below_N[0] <= value <= bins.above_N[0]
    assert bins.above_N[0] - bins.below_N[0] <= max(abs(value) * 2**-8, 1e-38)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.001, 0.01, 0.5, 0.99, 0.999])
def test_quantiles(kind, part):
    values = draw(kind)
    bins = bins_of(values)
    near = np.quantile(values, [part - 2 / NUM_VALUES, part + 2 / NUM_VALUES])
    width = 2**-8 * np.abs(near).max() + 1e-37  # zero shares its bin with the smallest numbers
    assert near[0] - width <= quantile(bins, part) <= near[1] + width


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 16])
def test_the_error_of_a_range_is_that_of_rounding_the_values(kind, bits):
    values = draw(kind)
    low, high = min(values.min(), 0), max(values.max(), 0)
    for part in (1.0, 0.6) if bits == 8 else (1.0,):
        made = squared_error(bins_of(values), low * part, high * part, bits)
        assert made == pytest.approx(rounding_error(values, low * part, high * part, bits), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_no_other_range_rounds_much_better(kind, bits):
    values = draw(kind)
    low, high = min(values.min(), 0), max(values.max(), 0)
    made = rounding_error(values, *least_error_range(bins_of(values), bits), bits)
    parts = 2.0 ** -np.linspace(0, 6, 25)
    low_parts = parts if low else [1.0]
    high_parts = parts if high else [1.0]
    best = min(rounding_error(values, low * a, high * b, bits) for a in low_parts for b in high_parts)
    assert made <= 1.03 * best
    if bits == 4 and kind in ("normal", "outlier"):
        assert made < 0.9 * rounding_error(values, low, high, bits), "cutting pays with few bits"


def test_sixteen_bits_keep_nearly_the_whole_range():
    values = draw("normal")
    low, high = least_error_range(bins_of(values), 16)
    assert rounding_error(values, low, high, 16) <= 1.01 * rounding_error(
        values, values.min(), values.max(), 16
    )
