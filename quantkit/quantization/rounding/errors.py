"""What rounding takes from a matrix, and from what it gives: the fit that was used beside plain rounding.

The error of the weights is relative to their size. The error of the outputs is the same for y = x W^T on
what calibration saw: with H the second moment of x, the mean square of x d is d H d^T for each row d.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats, decode_all
from quantkit.quantization.rounding.rtn import round_to_nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoss:
    """What rounding took from one matrix product."""

    name: str
    layers: tuple[str, ...]
    format: str
    weight_error: float  # relative, root of sums of squares
    plain_weight_error: float  # the same with plain rounding
    output_error: float | None = None  # on what calibration saw; None without it
    plain_output_error: float | None = None
    kl_divergence: float | None = None  # of the model with this alone in its format


SAMPLED_ROWS = 64  # of a run of rows, where nothing was calibrated: the plain path is to stay fast


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums of squares over rows; those of outputs are 0 where no second moment is known."""

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
        """Root of lost over all, of the weights."""
        return _share(self.lost, self.weights)

    @property
    def plain_weight_error(self) -> float:
        """The same had they been rounded plainly."""
        return _share(self.lost_plainly, self.weights)

    @property
    def output_error(self) -> float | None:
        """Root of lost over all, of the outputs."""
        return _share(self.outputs_lost, self.outputs) if self.outputs else None

    @property
    def plain_output_error(self) -> float | None:
        """The same had the weights been rounded plainly."""
        return _share(self.outputs_lost_plainly, self.outputs) if self.outputs else None


def _share(part: float, whole: float) -> float:
    return float(np.sqrt(part / whole)) if whole else 0.0


def sums_of(
    weight_OI: Floats, encoded: Encoded, grid: Grid, second_moment_II: Floats | None, *, is_plain: bool
) -> Sums:
    """Of a run of rows; of a few of them where nothing was calibrated."""
    every = 1 if second_moment_II is not None else -(-len(weight_OI) // SAMPLED_ROWS)
    if every > 1:
        weight_OI = weight_OI[::every]
        zeros = None if encoded.zeros is None else encoded.zeros[::every]
        encoded = Encoded(codes=encoded.codes[::every], scales=encoded.scales[::every], zeros=zeros)
    columns = weight_OI.shape[1]
    lost_OI = weight_OI - decode_all(encoded, columns)
    plain_OI = lost_OI if is_plain else weight_OI - decode_all(round_to_nearest(weight_OI, grid), columns)
    parts = (weight_OI, lost_OI, plain_OI)
    sums = [every * _squared(part) for part in parts]
    if second_moment_II is None:
        return Sums(weights=sums[0], lost=sums[1], lost_plainly=sums[2])
    seen = [_seen(weight_OI, second_moment_II), _seen(lost_OI, second_moment_II)]
    seen.append(seen[1] if is_plain else _seen(plain_OI, second_moment_II))
    return Sums(
        weights=sums[0],
        lost=sums[1],
        lost_plainly=sums[2],
        outputs=seen[0],
        outputs_lost=seen[1],
        outputs_lost_plainly=seen[2],
    )


def _squared(rows_OI: NDArray[np.float32]) -> float:
    return float(np.einsum("oi,oi->", rows_OI, rows_OI, dtype=np.float64))


def _seen(rows_OI: Floats, second_moment_II: Floats) -> float:
    return float(np.einsum("oi,oi->", rows_OI @ second_moment_II, rows_OI, dtype=np.float64))
