"""The search against trying every scale that changes a code, and its negative scales in the real runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.plan.formats import Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import decode_all, to_bytes
from quantkit.quantization.rounding.mse import search
from quantkit.quantization.rounding.output_error import FLOOR, input_power
from quantkit.quantization.rounding.rtn import round_to_nearest

pytestmark = pytest.mark.once


def weights(rows, columns, seed=0):
    """Normal ones with some that are larger, on rows of very different size."""
    random = np.random.default_rng(seed)
    weight_OI = random.standard_t(4, size=(rows, columns)) * np.exp(3 * random.normal(size=(rows, 1)))
    return weight_OI.astype(np.float32)


def least_error(values, importance, grid):
    """The best that one block can be: each scale at which a code changes, moved by least squares."""
    zeros = [0] if grid.is_symmetric else range(grid.lowest, grid.largest + 1)
    signs = (1, -1) if grid.is_symmetric and grid.bits < 8 else (1,)
    limits = np.arange(0.5, grid.largest - grid.lowest + 1)
    edges = np.unique(np.abs(values[values != 0])[:, None] / limits)
    scales = np.concatenate([edges * 0.999999, edges * 1.000001, [edges.max() * 2]])
    best = np.inf
    for zero in zeros:
        for sign in signs:
            codes = np.round(values / (sign * scales[:, None])) + zero
            codes = np.clip(codes, grid.lowest, grid.largest) - zero
            power = (importance * codes**2).sum(axis=1)
            scale = (importance * values * codes).sum(axis=1) / np.where(power == 0, 1, power)
            errors = (importance * (values - scale[:, None] * codes) ** 2).sum(axis=1)
            best = min(best, errors.min())
    return best


def errors_of(made, weight_OI, importance_I, grid):
    lost = (decode_all(made, weight_OI.shape[1]).astype(np.float64) - weight_OI) ** 2 * importance_I
    padded = np.pad(lost, ((0, 0), (0, -lost.shape[1] % (grid.block or lost.shape[1]))))
    return padded.reshape(len(lost), -1, grid.block or lost.shape[1]).sum(axis=2)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["all alike", "weighted"])
@pytest.mark.parametrize(
    ("grid", "mean_excess"),
    [
        (Grid(bits=4, block=16), 0.03),
        (Grid(bits=4, block=32), 0.02),
        (Grid(bits=4, block=16, is_symmetric=False), 0.1),
        (Grid(bits=4, block=32, is_symmetric=False), 0.07),
        (Grid(bits=8, block=64), 0.1),
    ],
    ids=str,
)
def test_close_to_the_least_error_there_is(grid, mean_excess, is_weighted):
    """On average; a single block of 16 may have a narrow valley that the tried scales miss."""
    rows, columns = 8, 3 * grid.block - 5
    weight_OI = weights(rows, columns)
    random = np.random.default_rng(1)
    importance_I = np.exp(random.normal(size=columns)) if is_weighted else np.ones(columns)
    importance_I = importance_I.astype(np.float32)
    made = search(weight_OI, grid, importance_I if is_weighted else None)
    found = errors_of(made, weight_OI, importance_I, grid)
    plain = errors_of(round_to_nearest(weight_OI, grid), weight_OI, importance_I, grid)
    starts = range(0, columns, grid.block)
    least = np.array(
        [
            [
                least_error(
                    row[start : start + grid.block].astype(np.float64),
                    importance_I[start : start + grid.block].astype(np.float64),
                    grid,
                )
                for start in starts
            ]
            for row in weight_OI
        ]
    )
    assert (found >= least * (1 - 1e-5)).all(), "the oracle is no oracle"
    assert (found <= plain * (1 + 1e-5)).all()
    assert np.mean(found / least) < 1 + mean_excess
    assert np.mean(plain / least) > 1 + 1.25 * mean_excess


@pytest.mark.parametrize("grid", [Grid(bits=4, block=32), Grid(bits=8, block=None)], ids=str)
def test_equal_importance_is_none(grid):
    """Sizes of importance do not matter, and so all alike is the error of the weights."""
    weight_OI = weights(8, 96)
    alike = search(weight_OI, grid, np.full(96, 4.0, np.float32))
    ones = search(weight_OI, grid, np.ones(96, np.float32))
    assert (alike.codes == ones.codes).all()
    assert (alike.scales == ones.scales).all()
    found = errors_of(search(weight_OI, grid), weight_OI, np.ones(96), grid)
    assert errors_of(ones, weight_OI, np.ones(96), grid).sum() <= found.sum() * 1.01


def test_an_input_of_no_importance_is_clipped_for_the_others():
    weight_OI = np.random.default_rng(4).normal(size=(4, 32)).astype(np.float32)
    weight_OI[:, 5] = 40
    importance_I = np.ones(32, np.float32)
    importance_I[5] = 1e-6
    others = np.arange(32) != 5
    made = decode_all(search(weight_OI, Grid(bits=4, block=32), importance_I), 32)
    plain = decode_all(round_to_nearest(weight_OI, Grid(bits=4, block=32)), 32)
    lost, plainly = (((each - weight_OI)[:, others] ** 2).sum(axis=1) for each in (made, plain))
    assert (lost < 0.5 * plainly).all()


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_the_runtime_multiplies_with_negative_scales(block, rows):
    columns, outputs = 3 * block - 8, 37
    grid, weight_OI = Grid(bits=4, block=block), weights(outputs, columns)
    made = search(weight_OI, grid)
    assert (made.scales < 0).any()
    assert (made.scales > 0).any()
    assert (made.codes == -8).any()
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        K=columns,
        N=outputs,
        bits=4,
        block_size=block,
        accuracy_level=4,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, outputs])],
        [
            numpy_helper.from_array(to_bytes(made.codes, 4), "codes"),
            numpy_helper.from_array(made.scales, "scales"),
        ],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    x_TI = np.random.default_rng(2).normal(size=(rows, columns)).astype(np.float32)
    found = session.run(None, {"x": x_TI})[0]
    blocks = np.pad(x_TI, ((0, 0), (0, -columns % block))).reshape(rows, -1, block).astype(np.float64)
    steps = np.abs(blocks).max(axis=2, keepdims=True) / 127  # inputs as the operator rounds them
    rounded_TI = (np.round(blocks / steps) * steps).reshape(rows, -1)[:, :columns]
    wanted = rounded_TI @ decode_all(made, columns).astype(np.float64).T
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_the_power_of_inputs_is_the_diagonal_with_a_floor():
    moment_II = np.diag([4.0, 2.0, 0.0, 6.0]).astype(np.float32) + 0.5
    np.fill_diagonal(moment_II, [4.0, 2.0, 0.0, 6.0])
    power_I = input_power(InputStatistics(num_rows=9, second_moment_II=moment_II), Grid())
    assert power_I == pytest.approx([4 / 3, 2 / 3, FLOOR * 4 / 3, 2])
