"""Fits: how weights are put on a grid. One line of the table each, and one file.

A fit works on any run of a matrix's rows, since rows never depend on each other; what all rows share, such
as the factor of the inputs' second moment, is prepared once for a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.grid import Encoded, Floats
from quantkit.quantizers.rtn import round_to_nearest
from quantkit.schemes import Grid
from quantkit.tensor_records import Evidence

Fit = Callable[[Floats, Grid, Any], Encoded]  # weight_OI, grid, what was prepared -> codes and scales
Prepare = Callable[[Evidence, Grid], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """A row of the table."""

    fit: Fit
    description: str
    prepare: Prepare | None = None  # once for a matrix, from what calibration saw of its input
    wants: frozenset[str] = frozenset()  # statistics, as calibration names them


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": Quantizer(fit=round_to_nearest, description="round to nearest: a block's largest value is exact"),
}
PLAIN = "rtn"  # for what calibration never reached, and for tables
