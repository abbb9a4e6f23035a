"""Rounding errors of weights and of outputs, beside those of plain rounding.

Errors are relative: the root of squared errors over the root of squares. Errors of the outputs y = x W^T are
means over the calibration text: with H the second moment of x, the mean square of x d is d H d^T for each
row d.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats, decode_all
from quantkit.quantization.rounding.rtn import round_to_nearest

PANEL = 256  # columns of a symmetric matrix
SAMPLED_ROWS = 64  # of a run of rows, without calibration: plain rounding is to stay fast


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoss:
    """The rounding errors of one pack."""

    name: str
    layers: tuple[str, ...]
    format: str
    weight_error: float
    plain_weight_error: float
    output_error: float | None = None  # on the calibration text; None without it
    plain_output_error: float | None = None
    plain_share: float = 0.0  # of rows, rounded to nearest
    kl_divergence: float | None = None  # of the model with this pack alone in its format


@dataclass(frozen=True, kw_only=True, slots=True)
class Squares:
    """Sums of squares: of values, of their rounding errors, and of the errors of plain rounding."""

    values: float = 0.0
    errors: float = 0.0
    plain_errors: float = 0.0

    def __add__(self, other: Squares) -> Squares:
        return Squares(**{name: getattr(self, name) + getattr(other, name) for name in Squares.__slots__})

    @property
    def error(self) -> float:
        return float(np.sqrt(self.errors / self.values)) if self.values else 0.0

    @property
    def plain_error(self) -> float:
        return float(np.sqrt(self.plain_errors / self.values)) if self.values else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Squares of weights and of outputs over some rows; outputs stay 0 without a second moment."""

    weights: Squares = Squares()
    outputs: Squares = Squares()
    num_rows: int = 0
    num_plain: int = 0  # rows that are rounded to nearest
    num_kept: int = 0  # rows with the codes of a quantized original

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{name: getattr(self, name) + getattr(other, name) for name in Sums.__slots__})


def sums_of(weight_OI: Floats, encoded: Encoded, grid: Grid, second_moment_II: Floats | None) -> Sums:
    """Sums over a run of rows; over a sample of them where nothing was calibrated."""
    is_plain, num_rows = encoded.is_plain, len(weight_OI)
    every = 1 if second_moment_II is not None else -(-len(weight_OI) // SAMPLED_ROWS)
    if every > 1:
        weight_OI = weight_OI[::every]
        zeros = None if encoded.zeros is None else encoded.zeros[::every]
        encoded = Encoded(codes=encoded.codes[::every], scales=encoded.scales[::every], zeros=zeros)
    columns = weight_OI.shape[1]
    error_OI = weight_OI - decode_all(encoded, columns)
    plain_error_OI = error_OI
    if not is_plain:
        plain_error_OI = weight_OI - decode_all(round_to_nearest(weight_OI, grid), columns)

    def squares(moment_II: Floats | None) -> Squares:
        values, errors = (every * _squared(rows_OI, moment_II) for rows_OI in (weight_OI, error_OI))
        plain_errors = errors if is_plain else every * _squared(plain_error_OI, moment_II)
        return Squares(values=values, errors=errors, plain_errors=plain_errors)

    outputs = Squares() if second_moment_II is None else squares(second_moment_II)
    num_plain = num_rows if is_plain else 0
    return Sums(weights=squares(None), outputs=outputs, num_rows=num_rows, num_plain=num_plain)


def loses_more(weight_OI: Floats, fitted: Encoded, plain: Encoded, held_out_TI: Floats) -> bool:
    """Whether the mean relative squared error of the outputs is larger than plain rounding's.

    Every token counts alike: in a sum of squares a few tokens with huge activations would decide for all.
    """
    power_T = np.square(held_out_TI @ weight_OI.T, dtype=np.float64).sum(1)
    power_T[power_T == 0] = np.inf

    def error(encoded: Encoded) -> float:
        lost_OI = weight_OI - decode_all(encoded, weight_OI.shape[1])
        lost_T = np.square(held_out_TI @ lost_OI.T, dtype=np.float64).sum(1)
        return float((lost_T / power_T).mean())

    return not error(fitted) <= error(plain)  # no number counts as more


def _squared(rows_OI: Floats, moment_II: Floats | None) -> float:
    """The sum of squared rows, or of the mean squares of their products with the inputs."""
    if moment_II is None:
        return float(np.einsum("oi,oi->", rows_OI, rows_OI, dtype=np.float64))
    total = 0.0
    for begin in range(0, rows_OI.shape[1], PANEL):  # the moment is symmetric: half of it suffices
        end = begin + PANEL
        above_IP = moment_II[:end, begin:end].copy()
        above_IP[:begin] *= 2
        products_OP = rows_OI[:, :end] @ above_IP
        total += float(np.einsum("oi,oi->", products_OP, rows_OI[:, begin:end], dtype=np.float64))
    return total
