"""Rounding with feedback along inputs and along outputs: GPTQ on both sides.

In `gptq` the error E of a matrix costs E H E^T for each row alone. Here it costs tr(G E H E^T), where H is
the second moment of the inputs and G that of the gradients at the outputs, so that one row may make up for
the error of another (https://arxiv.org/abs/2505.22988). With G = (A^T + I) C (A + I) and H = (F^T + I) D (F
+ I), both A and F strictly lower triangular, that is a sum of C_r D_k [(A + I) E (F + I)^T]_rk^2 over rows
and columns: a row is rounded as GPTQ rounds it, at its weights and A_r E, what the rows before it left to
make up for.

Rows are taken some at a time, by falling power of their gradients; within such a group each is rounded by
itself, so smaller groups gain more and take longer. Scales are searched for what a group is rounded at and
not for the weights: a row that matters little may be moved far.
"""

from __future__ import annotations

import numpy as np

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats, decode_all
from quantkit.quantization.layout import Evidence
from quantkit.quantization.rounding.gptq import Feedback, factorise, with_feedback

GROUP = 16  # rows
# Of correlations between outputs; more than between inputs, since gradients are seen on fewer tokens.
DAMPING = 0.1
SCARCITY = 1.0


def factorise_rows(seen: Evidence, grid: Grid) -> Feedback | None:
    """The feedback from row to row; None where no gradient was seen."""
    if seen.gradient_OO is None:
        return None
    outputs = Evidence(num_rows=seen.num_gradients, second_moment_II=seen.gradient_OO)
    return factorise(outputs, grid, base=DAMPING, scarcity=SCARCITY)


def with_both_feedbacks(weight_OI: Floats, grid: Grid, columns: Feedback, rows: Feedback) -> Encoded:
    """Codes of a whole projection; its rows are no longer independent."""
    num_rows = len(weight_OI)
    made = Encoded(
        codes=np.empty(
            (num_rows, grid.num_blocks(weight_OI.shape[1]), grid.block or weight_OI.shape[1]), np.int8
        ),
        scales=np.empty((num_rows, grid.num_blocks(weight_OI.shape[1])), np.float32),
        zeros=None
        if grid.is_symmetric
        else np.empty((num_rows, grid.num_blocks(weight_OI.shape[1])), np.int8),
    )
    ordered_OI, lost_OI = weight_OI[rows.order_I], np.zeros_like(weight_OI)
    for start in range(0, num_rows, GROUP):
        end = min(start + GROUP, num_rows)
        here = rows.order_I[start:end]
        left_OI = rows.factor_II[start:end, :start] @ lost_OI[:start]
        encoded = with_feedback(ordered_OI[start:end] + _within(rows, start, end) @ left_OI, grid, columns)
        lost_OI[start:end] = ordered_OI[start:end] - decode_all(encoded, weight_OI.shape[1])
        made.codes[here], made.scales[here] = encoded.codes, encoded.scales
        if made.zeros is not None and encoded.zeros is not None:
            made.zeros[here] = encoded.zeros
    return made


def _within(rows: Feedback, start: int, end: int) -> Floats:
    """(A + I)^-1: from the feedback of single rows to that of a group in which all rows still move."""
    unit_GG = np.eye(end - start) + rows.factor_II[start:end, start:end]
    return np.asarray(np.linalg.inv(unit_GG), np.float32)
