"""What a grid says of its size is what its arrays take."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.plan.formats import DEFAULT_SCHEMES, SCHEMES, Grid, scheme
from quantkit.quantization.grid import encode, range_of, to_bytes

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("bits", "largest"), [(2, 1), (4, 7), (8, 127)])
def test_the_largest_code_of_each_width(bits, largest):
    assert Grid(bits=bits).largest == largest


GRIDS = [Grid(block=block) for block in (None, 16, 32, 128)]
GRIDS += [Grid(bits=4, block=block, is_symmetric=even) for block in (32, 64, 128) for even in (True, False)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 96, 128, 130])
def test_bytes_and_blocks_are_those_of_the_arrays(grid, columns):
    weight_OI = np.ones((3, columns), np.float32)
    scales, zeros = range_of(weight_OI, grid)
    stored = [to_bytes(encode(weight_OI, scales, grid, zeros), grid.bits)]
    stored.append(scales.astype(np.float16) if grid.block else scales)
    stored += [] if zeros is None else [to_bytes(zeros, grid.bits)]
    assert scales.shape == (3, grid.num_blocks(columns))
    assert grid.num_bytes(3, columns) == sum(array.nbytes for array in stored)


def test_seven_bits_are_stored_as_bytes():
    assert Grid(bits=7).num_bytes(3, 16) == Grid().num_bytes(3, 16) == 3 * 16 + 3 * 4


def test_four_bits_take_half_the_bytes_of_codes():
    rows, columns = 5, 64
    scales = rows * 2 * 2
    assert Grid(bits=4, block=32).num_bytes(rows, columns) - scales == rows * columns // 2


@pytest.mark.parametrize(
    ("grid", "lowest"),
    [(Grid(), -127), (Grid(bits=4), -8), (Grid(is_symmetric=False), -128), (Grid(bits=2), -2)],
)
def test_only_a_wide_symmetric_grid_spares_its_lowest_code(grid, lowest):
    assert grid.lowest == lowest


def test_an_unknown_scheme_is_refused_with_all_that_there_are():
    with pytest.raises(InputError) as caught:
        scheme("int4_magic")
    assert "int4_magic" in str(caught.value)
    assert all(name in str(caught.value) for name in SCHEMES)
    assert set(DEFAULT_SCHEMES.values()) <= set(SCHEMES)
    assert scheme("int8_token") is SCHEMES["int8_token"]
