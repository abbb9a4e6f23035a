"""Integer grids against plain Python loops in float64, on shapes and values that hypothesis looks for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from stored import stored_scale

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import blocks_of, decode, encode, from_bytes, range_of, to_bytes

pytestmark = pytest.mark.once
EPS = float(np.finfo(np.float32).eps)
TINY = 127 * 2.0**-149  # below the normal floats a scale is a whole number of the smallest float
GRIDS = st.builds(Grid, block=st.sampled_from([None, 1, 3, 16, 32]))
# Up to 2^126: at the largest float itself, 127 times the rounded scale may not be a float any more.
VALUES = st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True) | st.floats(-3, 3, width=32)
MATRICES = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=VALUES, fill=st.just(0.0)
)
LARGEST = 2.0**18  # of weights in blocks, whose scales are float16
fast = settings(max_examples=80)


def naive_scale(values, grid):
    peak = max(abs(float(value)) for value in values)
    scale = float(np.float32(peak / 127)) or 1.0
    return stored_scale(scale) if grid.block else scale


def within(weight_OI, grid):
    return np.clip(weight_OI, -LARGEST, LARGEST) if grid.block else weight_OI


def quantize(weight_OI, grid):
    scales, zeros = range_of(weight_OI, grid)
    assert zeros is None
    return encode(weight_OI, scales, grid), scales


def blocks_in(weight_OI, grid):
    """(row, block, the block's own values), without any reshaping."""
    columns = weight_OI.shape[1]
    size = grid.block or columns
    for row, values in enumerate(weight_OI):
        for number, start in enumerate(range(0, columns, size)):
            yield row, number, values[start : start + size]


@fast
@given(weight_OI=MATRICES, grid=GRIDS)
def test_codes_and_scales_are_those_of_a_plain_loop(weight_OI, grid):
    weight_OI = within(weight_OI, grid)
    codes, scales = quantize(weight_OI, grid)
    assert codes.dtype == np.int8
    assert scales.dtype == np.float32
    for row, number, values in blocks_in(weight_OI, grid):
        expected = naive_scale(values, grid)
        scale = float(scales[row, number])
        assert scale == pytest.approx(expected, rel=EPS, abs=2.0**-149)
        for place, value in enumerate(values):
            exact = float(value) / scale
            wanted = min(127, max(-127, round(exact)))  # Python rounds ties to even too
            near_a_tie = abs(abs(exact - math.floor(exact)) - 0.5) < 1e-4
            assert codes[row, number, place] == wanted or near_a_tie


@fast
@given(weight_OI=MATRICES, grid=GRIDS)
def test_every_value_comes_back_within_half_a_step(weight_OI, grid):
    weight_OI = within(weight_OI, grid)
    codes, scales = quantize(weight_OI, grid)
    made = decode(codes, scales, weight_OI.shape[1])
    assert made.shape == weight_OI.shape
    assert made.dtype == np.float32
    steps = np.repeat(scales, grid.block or weight_OI.shape[1], axis=1)[:, : weight_OI.shape[1]]
    error = np.abs(made.astype(np.float64) - weight_OI)
    assert (error <= steps.astype(np.float64) / 2 + 2 * EPS * np.abs(weight_OI) + TINY).all()
    assert codes.min() >= -127, "-128 is no code"


@fast
@given(weight_OI=MATRICES, grid=GRIDS)
def test_the_largest_of_each_block_is_exact(weight_OI, grid):
    weight_OI = within(weight_OI, grid)
    codes, scales = quantize(weight_OI, grid)
    loss, least = (2.0**-10, 127 * 2.0**-14) if grid.block else (EPS, 127 * TINY)
    for row, number, values in blocks_in(weight_OI, grid):
        peak = max(values, key=lambda value: abs(float(value)))
        place = list(values).index(peak)
        if abs(float(peak)) > least:
            assert codes[row, number, place] == (127 if peak > 0 else -127)
            assert 127 * float(scales[row, number]) == pytest.approx(abs(float(peak)), rel=loss)


@fast
@given(codes=arrays.arrays(np.int8, arrays.array_shapes(min_dims=3, max_dims=3, max_side=9)))
def test_bytes_and_back(codes):
    stored = to_bytes(codes)
    assert stored.dtype == np.uint8
    assert (stored.astype(int) == codes.astype(int) + 128).all()
    assert (from_bytes(stored) == codes).all()
    assert (from_bytes(stored[:, ::2]) == codes[:, ::2]).all(), "also of a view"


@fast
@given(
    codes=arrays.arrays(np.int8, (3, 4, 16), elements=st.integers(-127, 127)),
    exponents=arrays.arrays(np.int32, (3, 4), elements=st.integers(-24, 15)),
)
def test_values_on_the_grid_come_back_as_they_were(codes, exponents):
    codes[:, :, 5] = 127  # the largest code is used, so that the scale is found again
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
    weight_OI = decode(codes, scales, 64)
    again, found = quantize(weight_OI, Grid(block=16))
    assert (found == scales).all()
    assert (again == codes).all()
    assert (decode(again, found, 64) == weight_OI).all()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 63])
def test_the_padding_is_zero_and_cut_off_again(columns):
    grid = Grid(block=32)
    weight_OI = np.random.default_rng(columns).normal(size=(3, columns)).astype(np.float32)
    blocks = blocks_of(weight_OI, grid)
    assert blocks.shape == (3, math.ceil(columns / 32), 32)
    assert (blocks.reshape(3, -1)[:, columns:] == 0).all()
    codes, scales = quantize(weight_OI, grid)
    assert (codes.reshape(3, -1)[:, columns:] == 0).all()
    assert decode(codes, scales, columns).shape == (3, columns)


def test_zeros_stay_zeros_and_no_scale_is_zero():
    weight_OI = np.zeros((2, 40), np.float32)
    codes, scales = quantize(weight_OI, Grid(block=32))
    assert (codes == 0).all()
    assert (scales > 0).all()
    assert (decode(codes, scales, 40) == 0).all()


def test_subnormal_weights_give_finite_codes():
    weight_OI = (np.arange(-32, 32) * np.float32(2.0**-149)).reshape(1, -1).astype(np.float32)
    codes, scales = quantize(weight_OI, Grid(block=64))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    assert np.abs(decode(codes, scales, 64) - weight_OI).max() <= TINY


def test_an_outlier_spoils_its_own_block_alone():
    weight_OI = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    spoilt_OI = weight_OI.copy()
    spoilt_OI[2, 40] = 1e6
    grid = Grid(block=32)
    made = decode(*quantize(weight_OI, grid), 128)
    spoilt = decode(*quantize(spoilt_OI, grid), 128)
    changed = np.argwhere(made != spoilt)
    assert {(row, column // 32) for row, column in changed} == {(2, 1)}
    assert (spoilt[2, 32:40] == 0).all(), "what stands beside it is lost"
    per_row = decode(*quantize(spoilt_OI, Grid()), 128)
    assert (per_row[2] != 0).sum() == 1, "with one scale a row, the whole row is"


def test_rows_do_not_depend_on_the_rows_beside_them():
    weight_OI = np.random.default_rng(1).normal(size=(9, 70)).astype(np.float32)
    grid = Grid(block=32)
    codes, scales = quantize(weight_OI, grid)
    for row in range(9):
        alone, scale = quantize(weight_OI[row : row + 1], grid)
        assert (alone[0] == codes[row]).all()
        assert (scale[0] == scales[row]).all()


def test_the_matrix_is_left_as_it_was():
    weight_OI = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    before = weight_OI.copy()
    quantize(weight_OI, Grid(block=32))
    assert (weight_OI == before).all()


NIBBLES = st.builds(
    Grid, bits=st.just(4), block=st.sampled_from([None, 2, 16, 32]), is_symmetric=st.booleans()
)


@fast
@given(weight_OI=MATRICES, grid=NIBBLES)
def test_four_bits_come_back_within_a_step(weight_OI, grid):
    """Half a step, and half a step more where the zero point itself had to be rounded."""
    weight_OI = within(weight_OI, grid)
    scales, zeros = range_of(weight_OI, grid)
    codes = encode(weight_OI, scales, grid, zeros)
    assert codes.min() >= -8
    assert codes.max() <= 7
    made = decode(codes, scales, weight_OI.shape[1], zeros).astype(np.float64)
    for row, number, values in blocks_in(weight_OI, grid):
        step = float(scales[row, number])
        start = number * (grid.block or weight_OI.shape[1])
        error = np.abs(made[row, start : start + len(values)] - values)
        allowed = step * (0.5 if grid.is_symmetric else 1.0)
        assert (error <= allowed * (1 + 1e-5) + 4 * EPS * np.abs(values) + TINY).all()


@fast
@given(weight_OI=MATRICES, block=st.sampled_from([None, 16, 32]))
def test_zero_is_always_on_the_grid(weight_OI, block):
    weight_OI[:, ::3] = 0
    for grid in (Grid(bits=4, block=block, is_symmetric=False), Grid(block=block, is_symmetric=False)):
        scales, zeros = range_of(weight_OI, grid)
        made = decode(encode(weight_OI, scales, grid, zeros), scales, weight_OI.shape[1], zeros)
        assert (made[:, ::3] == 0).all()


@fast
@given(
    codes=arrays.arrays(
        np.int8, arrays.array_shapes(min_dims=2, max_dims=3, max_side=9), elements=st.integers(-8, 7)
    )
)
def test_two_codes_share_a_byte_the_first_in_the_lower_half(codes):
    stored = to_bytes(codes, 4)
    assert stored.shape == (*codes.shape[:-1], -(-codes.shape[-1] // 2))
    assert (from_bytes(stored, 4, codes.shape[-1]) == codes).all()
    for place in np.ndindex(*codes.shape):
        byte = int(stored[(*place[:-1], place[-1] // 2)])
        assert (byte >> 4 * (place[-1] % 2)) & 15 == codes[place] + 8
    if codes.shape[-1] % 2:
        assert (stored[..., -1] >> 4 == 8).all(), "filled up with the code for zero"
