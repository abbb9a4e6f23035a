"""What every fit of the table promises on every grid, whatever it minimises."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from stored import stored_scale

from quantkit.plan.formats import SCHEMES, Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import decode, decode_all, encode
from quantkit.quantization.rounding import FITS
from quantkit.recipe import Recipe

pytestmark = pytest.mark.once
GRIDS = {part.grid for scheme in SCHEMES.values() for part in (scheme.body, scheme.head)}
GRIDS |= {Grid(bits=4, block=16, is_symmetric=sign) for sign in (True, False)}
GRIDS |= {Grid(bits=8, block=32, is_symmetric=False), Grid(bits=4, block=None)}
EVERY = pytest.mark.parametrize("name", FITS)
ON_EVERY_GRID = pytest.mark.parametrize(
    "grid",
    sorted(GRIDS, key=str),
    ids=lambda grid: f"{grid.bits}bits-block{grid.block}{'' if grid.is_symmetric else '-zeros'}",
)
MEASURES = {  # what each fit promises to be no worse in than plain rounding
    "rtn": lambda moment_II: np.eye(len(moment_II)),
    "mse": lambda moment_II: np.eye(len(moment_II)),
    "output": lambda moment_II: np.diag(np.diag(moment_II)),
    "gptq": lambda moment_II: moment_II,
}


def weights(rows=12, columns=200, seed=0):
    """Correlated rows with a few outliers, as trained ones are."""
    random = np.random.default_rng(seed)
    weight_OI = random.normal(size=(rows, 8)) @ random.normal(size=(8, columns)) * 0.02
    weight_OI[random.integers(0, rows, 6), random.integers(0, columns, 6)] *= 20
    return weight_OI.astype(np.float32)


def inputs(columns, tokens=800, seed=1):
    """Correlated tokens whose channels differ in size, two of them by far."""
    random = np.random.default_rng(seed)
    hidden_TH = random.normal(size=(tokens, max(1, columns // 3)))
    x_TI = hidden_TH @ random.normal(size=(hidden_TH.shape[1], columns)) + random.normal(
        size=(tokens, columns)
    )
    sizes_I = np.exp(random.normal(size=columns))
    sizes_I[random.integers(0, columns, 2)] *= 20
    return x_TI * sizes_I


@functools.cache
def moment(columns):
    x_TI = inputs(columns)
    return x_TI.T @ x_TI / len(x_TI)


def seen(moment_II, num_rows=800):
    return InputStatistics(num_rows=num_rows, second_moment_II=np.asarray(moment_II, np.float32))


def prepared(name, columns, grid, statistics=None):
    prepare = FITS[name].prepare
    return prepare(statistics or seen(moment(columns)), grid) if prepare else None


def fitted(name, weight_OI, grid, statistics=None):
    return FITS[name].encode(weight_OI, grid, prepared(name, weight_OI.shape[1], grid, statistics))


def loss(weight_OI, made_OI, measure_II):
    lost_OI = made_OI.astype(np.float64) - weight_OI
    return float(np.einsum("oi,ij,oj->", lost_OI, measure_II, lost_OI, optimize=True))


def plainly_rounded(weight_OI, grid):
    """The largest magnitude rule, block by block in float64."""
    wanted = np.zeros(weight_OI.shape)
    size = grid.block or weight_OI.shape[1]
    steps = grid.largest if grid.is_symmetric else grid.largest - grid.lowest
    for row in range(weight_OI.shape[0]):
        for start in range(0, weight_OI.shape[1], size):
            values = weight_OI[row, start : start + size].astype(np.float64)
            low, high = min(values.min(), 0), max(values.max(), 0)
            scale = (np.abs(values).max() if grid.is_symmetric else high - low) / steps
            if grid.block:
                scale = stored_scale(np.float32(scale))
            zero = 0 if grid.is_symmetric else np.round(grid.lowest - low / scale)
            codes = np.clip(np.round(values / scale) + zero, grid.lowest, grid.largest)
            wanted[row, start : start + size] = (codes - zero) * scale
    return wanted


def check(encoded, weight_OI, grid):
    rows, count = len(weight_OI), grid.num_blocks(weight_OI.shape[1])
    assert encoded.codes.shape == (rows, count, grid.block or weight_OI.shape[1])
    assert encoded.codes.dtype == np.int8
    assert encoded.codes.min() >= grid.lowest
    assert encoded.codes.max() <= grid.largest
    assert encoded.scales.shape == (rows, count)
    assert encoded.scales.dtype == np.float32
    assert np.isfinite(encoded.scales).all()
    assert (encoded.scales != 0).all()
    if grid.bits == 8:
        assert (encoded.scales > 0).all()
    if grid.block:
        assert (encoded.scales.astype(np.float16) == encoded.scales).all()
    if grid.is_symmetric:
        assert encoded.zeros is None
        padding = encoded.codes.reshape(rows, -1)[:, weight_OI.shape[1] :]
        assert (padding == 0).all()
    else:
        assert encoded.zeros.shape == (rows, count)
        assert encoded.zeros.dtype == np.int8
        assert encoded.zeros.min() >= grid.lowest
        assert encoded.zeros.max() <= grid.largest
    assert np.isfinite(decode_all(encoded, weight_OI.shape[1])).all()


@EVERY
@ON_EVERY_GRID
@pytest.mark.filterwarnings("error")
def test_codes_and_scales_are_of_the_grid_whatever_the_weights(name, grid):
    spread = weights(3, 200)
    for weight_OI in (
        weights(),
        np.zeros((3, 200), np.float32),
        np.full((2, 40), -0.5, np.float32),
        weights(1, 1),
        weights(2, 129),
        np.abs(weights(2, 64)),
        spread * np.float32(1e-30),
        spread * np.float32(1e6 if grid.block else 1e30),  # scales of blocks are float16
    ):
        check(fitted(name, weight_OI, grid), weight_OI, grid)


def constant(x_TI):
    x_TI[:] = 3.0


def dead(x_TI):
    x_TI[:, 5::3] = 0


def twins(x_TI):
    x_TI[:, 1::2] = x_TI[:, ::2]


def few(x_TI):
    x_TI[2:] = 0


def huge(x_TI):
    x_TI *= 1e15


def tiny(x_TI):
    x_TI *= 1e-15


@EVERY
@ON_EVERY_GRID
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "change", [constant, dead, twins, few, huge, tiny], ids=lambda change: change.__name__
)
def test_inputs_that_say_little_do_no_harm(name, grid, change):
    columns = 70
    x_TI = inputs(columns)
    change(x_TI)
    moment_II = x_TI.T @ x_TI / len(x_TI)
    weight_OI = weights(6, columns)
    encoded = fitted(name, weight_OI, grid, seen(moment_II, len(x_TI)))
    check(encoded, weight_OI, grid)
    measure_II = MEASURES[name](moment_II)
    naive = loss(weight_OI, plainly_rounded(weight_OI, grid), measure_II)
    assert loss(weight_OI, decode_all(encoded, columns), measure_II) <= naive * 1.001


def zeros(moment_II):
    moment_II[:] = 0


def not_a_number(moment_II):
    moment_II[4, 4] = np.nan


def infinite(moment_II):
    moment_II[7] = moment_II[:, 7] = np.inf


def negative(moment_II):
    moment_II[:] = 1 - 2 * np.eye(len(moment_II))


def one_pair(moment_II):
    moment_II[2, 3] = moment_II[3, 2] = np.nan


def impossible(moment_II):
    """Channels that go together more than each goes with itself."""
    moment_II *= 50
    np.fill_diagonal(moment_II, 1)


@EVERY
@ON_EVERY_GRID
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "change",
    [zeros, not_a_number, infinite, negative, one_pair, impossible],
    ids=lambda change: change.__name__,
)
def test_moments_that_are_none_leave_a_plain_fit(name, grid, change):
    columns = 70
    moment_II = moment(columns).copy()
    change(moment_II)
    weight_OI = weights(6, columns)
    encoded = fitted(name, weight_OI, grid, seen(moment_II))
    check(encoded, weight_OI, grid)
    if name == "output" and change in (one_pair, impossible):  # it reads the diagonal alone
        wanted = fitted(name, weight_OI, grid, seen(np.diag(np.diag(moment_II))))
        assert (encoded.codes == wanted.codes).all()
    else:
        lost = np.linalg.norm(decode_all(encoded, columns) - weight_OI)
        assert lost <= np.linalg.norm(plainly_rounded(weight_OI, grid) - weight_OI) * 1.001


@EVERY
@ON_EVERY_GRID
def test_no_worse_than_the_largest_magnitude_rule_in_its_own_measure(name, grid):
    for seed in range(3):
        weight_OI, moment_II = weights(seed=seed), moment(200)
        measure_II = MEASURES[name](moment_II)
        naive = loss(weight_OI, plainly_rounded(weight_OI, grid), measure_II)
        made_OI = decode_all(fitted(name, weight_OI, grid, seen(moment_II)), 200)
        assert naive > 0
        assert loss(weight_OI, made_OI, measure_II) <= naive * 1.001


@EVERY
@ON_EVERY_GRID
def test_weights_that_lie_on_the_grid_are_kept(name, grid):
    random = np.random.default_rng(3)
    size = grid.block or 256
    codes = random.integers(grid.lowest, grid.largest + 1, (4, 256 // size, size)).astype(np.int8)
    codes[codes < -grid.largest] += np.int8(grid.is_symmetric)  # the code that plain rounding does not use
    codes[:, :, 0], codes[:, :, 1] = grid.largest, grid.lowest + (grid.is_symmetric and grid.bits < 8)
    zeros = None
    if not grid.is_symmetric:
        zeros = random.integers(grid.lowest, grid.largest, codes.shape[:2]).astype(np.int8)
    scales = np.ldexp(np.float32(1), random.integers(-12, 2, codes.shape[:2])).astype(np.float32)
    weight_OI = decode(codes, scales, 256, zeros)
    assert (decode_all(fitted(name, weight_OI, grid), 256) == weight_OI).all()


@EVERY
@ON_EVERY_GRID
@pytest.mark.parametrize("columns", [200, 64])
def test_rows_are_fitted_alone_so_that_any_cut_gives_the_same(name, grid, columns):
    weight_OI, shared = weights(83, columns), prepared(name, columns, grid)
    whole = FITS[name].encode(weight_OI, grid, shared)
    for start, stop in ((0, 1), (1, 6), (17, 81), (82, 83)):
        part = FITS[name].encode(weight_OI[start:stop], grid, shared)
        assert (part.scales == whole.scales[start:stop]).all()
        assert (part.codes == whole.codes[start:stop]).all()
        if whole.zeros is not None:
            assert (part.zeros == whole.zeros[start:stop]).all()


@pytest.mark.parametrize("name", sorted(set(FITS) - {"gptq"}))
@ON_EVERY_GRID
def test_codes_are_the_nearest_of_their_scales(name, grid):
    weight_OI = weights()
    made = fitted(name, weight_OI, grid)
    assert (encode(weight_OI, made.scales, grid, made.zeros) == made.codes).all()


@EVERY
@pytest.mark.parametrize("bits", [4, 8])
def test_smaller_blocks_are_more_accurate(name, bits):
    weight_OI, measure_II = weights(64, 256), MEASURES[name](moment(256))
    losses = [
        loss(weight_OI, decode_all(fitted(name, weight_OI, Grid(bits=bits, block=block)), 256), measure_II)
        for block in (16, 32, 64, 128)
    ]
    assert losses == sorted(losses)


def test_a_recipe_can_name_every_fit_and_no_other():
    schema = Recipe.model_json_schema()["properties"]["fit"]
    assert set(schema["enum"]) - {"auto"} == set(FITS)
