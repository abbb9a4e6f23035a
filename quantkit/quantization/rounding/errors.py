"""Rounding errors of weights and of outputs, beside those of plain rounding.

Errors are relative: the root of squared errors over the root of squares. Errors of the outputs y = x W^T are
means over the calibration text: with H the second moment of x, the mean square of x d is d H d^T for each
row d.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats, decode_all
from quantkit.quantization.rounding.rtn import round_to_nearest


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
    kl_divergence: float | None = None  # of the model with this pack alone in its format


SAMPLED_ROWS = 64  # of a run of rows, without calibration: plain rounding is to stay fast


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums of squares over rows; sums of outputs are 0 where no second moment is known."""

    weights: float = 0.0
    lost: float = 0.0
    lost_plainly: float = 0.0
    outputs: float = 0.0
    outputs_lost: float = 0.0
    outputs_lost_plainly: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{name: getattr(self, name) + getattr(other, name) for name in Sums.__slots__})

    @property
    def weight_error(self) -> float:
        return _share(self.lost, self.weights)

    @property
    def plain_weight_error(self) -> float:
        return _share(self.lost_plainly, self.weights)

    @property
    def output_error(self) -> float | None:
        return _share(self.outputs_lost, self.outputs) if self.outputs else None

    @property
    def plain_output_error(self) -> float | None:
        return _share(self.outputs_lost_plainly, self.outputs) if self.outputs else None


def _share(part: float, whole: float) -> float:
    return float(np.sqrt(part / whole)) if whole else 0.0


def sums_of(
    weight_OI: Floats, encoded: Encoded, grid: Grid, second_moment_II: Floats | None, *, is_plain: bool
) -> Sums:
    """Sums over a run of rows; over a sample of them where nothing was calibrated."""
    every = 1 if second_moment_II is not None else -(-len(weight_OI) // SAMPLED_ROWS)
    if every > 1:
        weight_OI = weight_OI[::every]
        zeros = None if encoded.zeros is None else encoded.zeros[::every]
        encoded = Encoded(codes=encoded.codes[::every], scales=encoded.scales[::every], zeros=zeros)
    columns = weight_OI.shape[1]
    lost_OI = weight_OI - decode_all(encoded, columns)
    plain_OI = lost_OI if is_plain else weight_OI - decode_all(round_to_nearest(weight_OI, grid), columns)
    weights = Sums(
        weights=every * _squared(weight_OI),
        lost=every * _squared(lost_OI),
        lost_plainly=every * _squared(plain_OI),
    )
    if second_moment_II is None:
        return weights
    outputs_lost = _squared_outputs(lost_OI, second_moment_II)
    return replace(
        weights,
        outputs=_squared_outputs(weight_OI, second_moment_II),
        outputs_lost=outputs_lost,
        outputs_lost_plainly=outputs_lost if is_plain else _squared_outputs(plain_OI, second_moment_II),
    )


def _squared(rows_OI: NDArray[np.float32]) -> float:
    return float(np.einsum("oi,oi->", rows_OI, rows_OI, dtype=np.float64))


def _squared_outputs(rows_OI: Floats, second_moment_II: Floats) -> float:
    return float(np.einsum("oi,oi->", rows_OI @ second_moment_II, rows_OI, dtype=np.float64))
