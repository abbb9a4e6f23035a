"""Rounding with feedback along inputs and along outputs: GPTQ on both sides.

In `gptq` the error E of a matrix costs E H E^T for each row alone. Here it costs tr(G E H E^T), where H is
the second moment of the inputs and G that of the gradients at the outputs, so that one row may compensate
the error of another (https://arxiv.org/abs/2505.22988). With G = (A^T + I) C (A + I) and H = (F^T + I) D (F
+ I), both A and F strictly lower triangular, that is a sum of C_r D_k [(A + I) E (F + I)^T]_rk^2 over rows
and columns: row r is rounded as GPTQ rounds it, at W_r + A_r E, where E holds the errors of the rows before.

Rows are rounded in groups, by falling power of their gradients; the rows of a group do not compensate each
other, so smaller groups gain more and take longer. Scales are searched for W_r + A_r E and not for the
weights: a row of little importance may move far.
"""

from __future__ import annotations

import numpy as np

from quantkit.plan.formats import Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import Encoded, Floats, decode_all
from quantkit.quantization.rounding.gptq import Feedback, factorise, with_feedback

GROUP = 16  # rows
# Of correlations between outputs; more than between inputs, since gradients come from fewer tokens.
DAMPING = 0.1
SCARCITY = 1.0


def factorise_outputs(statistics: InputStatistics, grid: Grid) -> Feedback | None:
    """The feedback from row to row; None where there are no gradients."""
    if statistics.gradient_OO is None:
        return None
    outputs = InputStatistics(num_rows=statistics.num_gradients, second_moment_II=statistics.gradient_OO)
    return factorise(outputs, grid, base=DAMPING, scarcity=SCARCITY)


def with_both_feedbacks(weight_OI: Floats, grid: Grid, columns: Feedback, rows: Feedback) -> Encoded:
    """Codes of a whole projection; its rows are no longer independent."""
    num_rows, num_columns = weight_OI.shape
    num_blocks = grid.num_blocks(num_columns)
    codes = np.empty((num_rows, num_blocks, grid.block or num_columns), np.int8)
    scales = np.empty((num_rows, num_blocks), np.float32)
    zeros = None if grid.is_symmetric else np.empty((num_rows, num_blocks), np.int8)
    ordered_OI, lost_OI = weight_OI[rows.order_I], np.zeros_like(weight_OI)
    for start in range(0, num_rows, GROUP):
        end = min(start + GROUP, num_rows)
        here = rows.order_I[start:end]
        fed_OI = rows.factor_II[start:end, :start] @ lost_OI[:start]
        encoded = with_feedback(ordered_OI[start:end] + _within(rows, start, end) @ fed_OI, grid, columns)
        lost_OI[start:end] = ordered_OI[start:end] - decode_all(encoded, num_columns)
        codes[here], scales[here] = encoded.codes, encoded.scales
        if zeros is not None and encoded.zeros is not None:
            zeros[here] = encoded.zeros
    return Encoded(codes=codes, scales=scales, zeros=zeros)


def _within(rows: Feedback, start: int, end: int) -> Floats:
    """(A + I)^-1 of a group: turns feedback to single rows into feedback to rows that all still move."""
    unit_GG = np.eye(end - start) + rows.factor_II[start:end, start:end]
    return np.asarray(np.linalg.inv(unit_GG), np.float32)
