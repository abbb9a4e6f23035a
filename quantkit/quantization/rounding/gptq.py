"""Rounding column by column, each compensating the errors of the columns before it (GPTQ).

The squared error of the outputs, E H E^T with E = W - Q and the inputs' second moment H, splits by the
factor H = (F^T + I) D (F + I), F strictly lower triangular, into a sum over columns of D_k (E_k + F_k E)^2.
So column k is rounded at W_k + F_k E, where E holds the errors of the columns before it. That is GPTQ
(Frantar et al. 2022, https://arxiv.org/abs/2210.17323) in the form of QuIP (https://arxiv.org/abs/2307.13304),
which needs one factorisation and no inverse; both give the same codes.

Columns go in falling order of their input's power, since the first can be compensated best. Scales are
searched before, for blocks of the original order, with the importance D: the cost of an error once all later
columns have compensated it. Damping is proportional to each channel's own power (it is added to the matrix of
correlations), so that a few outlier channels do not drown the others, and grows where tokens are few.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.plan.formats import Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import Encoded, Floats
from quantkit.quantization.rounding.mse import search, transposed_blocks
from quantkit.quantization.rounding.output_error import floored

DAMPING = 0.01  # added to correlations of 1
SCARCITY = 0.1  # added damping, times inputs over tokens: few tokens show false correlations
TRIES = 4  # each with ten times the damping
FLOOR = 1e-8  # of the mean power: the least power of a channel
PANEL = 64  # columns between two products of matrices
FACTOR_PANEL = 256
ROW_MULTIPLE = 64  # products of matrices give a row the same bits wherever it lies, if rows come in these


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """The factors F and D of the second moment, shared by all rows of a matrix."""

    order_I: NDArray[np.intp]  # columns as they are rounded
    factor_II: Floats  # F, in that order
    importance_I: Floats  # D, in the original order


def factorise(
    statistics: InputStatistics, grid: Grid, *, base: float = DAMPING, scarcity: float = SCARCITY
) -> Feedback | None:
    """The feedback of a matrix; None where its inputs are all zeros or not finite."""
    moment_II = statistics.second_moment_II
    assert moment_II is not None
    power_I = np.diagonal(moment_II).astype(np.float64)
    mean = power_I.mean()
    if not np.isfinite(mean) or mean <= 0:
        return None
    root_I = np.sqrt(np.maximum(power_I, FLOOR * mean))
    rising_I = np.argsort(power_I, kind="stable")  # the factor is found from the last column to the first
    damping = base + scarcity * len(power_I) / max(statistics.num_rows, 1)
    for _ in range(TRIES):
        lower_II = _correlations(moment_II, root_I, rising_I)
        diagonal = np.einsum("ii->i", lower_II)
        diagonal[:] = 1 + damping
        if _cholesky(lower_II):
            return _feedback(lower_II, root_I, rising_I)
        damping *= 10
    return None


def _correlations(
    moment_II: Floats, root_I: NDArray[np.float64], order_I: NDArray[np.intp]
) -> NDArray[np.float64]:
    correlations_II = np.empty(moment_II.shape, np.float64)
    for start in range(0, len(order_I), FACTOR_PANEL):  # a few rows at a time, to save memory
        rows = order_I[start : start + FACTOR_PANEL]
        correlations_II[start : start + FACTOR_PANEL] = moment_II[rows][:, order_I] / root_I[rows, None]
    correlations_II /= root_I[order_I]
    return correlations_II


def _cholesky(matrix_II: NDArray[np.float64]) -> bool:
    """The lower factor in place of the lower half; False where there is none.

    In place, because for wide matrices numpy's own copies would be the peak of memory.
    """
    size = len(matrix_II)
    for start in range(0, size, FACTOR_PANEL):
        end = min(start + FACTOR_PANEL, size)
        try:
            corner = np.linalg.cholesky(matrix_II[start:end, start:end])
        except np.linalg.LinAlgError:
            return False
        matrix_II[start:end, start:end] = corner
        matrix_II[end:, start:end] @= np.linalg.inv(corner).T
        for first in range(end, size, FACTOR_PANEL):
            last = min(first + FACTOR_PANEL, size)
            matrix_II[first:, first:last] -= matrix_II[first:, start:end] @ matrix_II[first:last, start:end].T
    return bool(np.isfinite(np.diagonal(matrix_II)).all())


def _feedback(
    lower_II: NDArray[np.float64], root_I: NDArray[np.float64], rising_I: NDArray[np.intp]
) -> Feedback:
    pivots_I = np.diagonal(lower_II).copy()
    sizes_I = root_I[rising_I]
    size = len(rising_I)
    factor_II = np.zeros((size, size), np.float32)
    for start in range(0, size, FACTOR_PANEL):
        part = slice(start, start + FACTOR_PANEL)
        columns = np.tril(lower_II[:, part], -1 - start) * sizes_I[:, None] / (pivots_I[part] * sizes_I[part])
        factor_II[size - 1 - np.arange(size)[part]] = columns.T[:, ::-1]
    importance_I = np.empty(size, np.float64)
    importance_I[rising_I] = (pivots_I * sizes_I) ** 2
    return Feedback(
        order_I=rising_I[::-1].copy(),
        factor_II=factor_II,
        importance_I=floored(importance_I / importance_I.mean()),
    )


def with_feedback(weight_OI: Floats, grid: Grid, prepared: Feedback | None) -> Encoded:
    """Codes rounded with feedback, on scales searched with the importance D."""
    if prepared is None:
        return search(weight_OI, grid)
    encoded = search(weight_OI, grid, prepared.importance_I)
    rows, columns = weight_OI.shape
    width = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    weight_IO = np.zeros((columns, width), np.float32)
    weight_IO[:, :rows] = weight_OI[:, prepared.order_I].T
    scales_GO = transposed_blocks(encoded.scales, width, filler=1)
    zeros_GO = None
    if encoded.zeros is not None:
        zeros_GO = transposed_blocks(encoded.zeros.astype(np.float32), width, filler=1)
    codes_IO = _fed_back(weight_IO, prepared, grid, scales_GO, zeros_GO)
    codes = encoded.codes.reshape(rows, -1)  # the padding's codes stay
    codes[:, prepared.order_I] = codes_IO[:, :rows].T
    return Encoded(codes=codes.reshape(encoded.codes.shape), scales=encoded.scales, zeros=encoded.zeros)


def _fed_back(
    weight_IO: Floats, prepared: Feedback, grid: Grid, scales_GO: Floats, zeros_GO: Floats | None
) -> NDArray[np.int8]:
    """Codes [I, O] of weights whose columns are in the order of the feedback."""
    columns, width = weight_IO.shape
    block_of_I = prepared.order_I // (grid.block or columns)
    factor_II = prepared.factor_II
    lowest, largest = np.float32(grid.lowest), np.float32(grid.largest)
    lost_IO = np.empty_like(weight_IO)
    codes_IO = np.empty(weight_IO.shape, np.int8)
    step = np.empty((PANEL, width), np.float32)
    value = np.empty(width, np.float32)
    for start in range(0, columns, PANEL):
        end = min(start + PANEL, columns)
        target = factor_II[start:end, :start] @ lost_IO[:start]
        target += weight_IO[start:end]
        for column in range(start, end):
            block = block_of_I[column]
            np.divide(target[column - start], scales_GO[block], out=value)
            np.rint(value, out=value)
            if zeros_GO is not None:
                value += zeros_GO[block]
            np.maximum(value, lowest, out=value)  # np.clip takes longer than all else here for few rows
            np.minimum(value, largest, out=value)
            codes_IO[column] = value
            if zeros_GO is not None:
                value -= zeros_GO[block]
            value *= scales_GO[block]
            np.subtract(weight_IO[column], value, out=lost_IO[column])
            if column + 1 < end:
                later = step[: end - column - 1]
                np.multiply(factor_II[column + 1 : end, column, None], lost_IO[column], out=later)
                target[column + 1 - start :] += later
    return codes_IO
