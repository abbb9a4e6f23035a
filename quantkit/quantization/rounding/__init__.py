"""Fits: how weights are put on a grid. One line of the table each, and one file.

A fit works on any run of a matrix's rows; what all rows share, such as the factor of the inputs' second
moment, is prepared once for a matrix. One that joins rows, where it is known how outputs go together, is
given all of a projection's rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.plan.formats import Grid
from quantkit.quantization.grid import Encoded, Floats
from quantkit.quantization.layout import Evidence
from quantkit.quantization.rounding.gptq import factorise, with_feedback
from quantkit.quantization.rounding.gptq_joint import factorise_rows, with_both_feedbacks
from quantkit.quantization.rounding.mse import least_weight_error
from quantkit.quantization.rounding.output_error import input_power, least_output_error
from quantkit.quantization.rounding.rtn import round_to_nearest

Fit = Callable[[Floats, Grid, Any], Encoded]  # weight_OI, grid, what was prepared -> codes and scales
Prepare = Callable[[Evidence, Grid], Any]
Join = Callable[[Floats, Grid, Any, Any], Encoded]  # the same, and what was prepared of the outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """A row of the table."""

    fit: Fit
    description: str
    prepare: Prepare | None = None  # once for a matrix, from what calibration saw of its input
    wants: frozenset[str] = frozenset()  # statistics, as calibration names them
    prepare_rows: Prepare | None = None  # once for a projection, from what calibration saw of its outputs
    join: Join | None = None  # all rows at once, with that


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": Quantizer(fit=round_to_nearest, description="round to nearest: a block's largest value is exact"),
    "mse": Quantizer(
        fit=least_weight_error, description="scales searched for the least error of the weights"
    ),
    "output": Quantizer(
        fit=least_output_error,
        description="scales searched for the least error of the outputs, by the power of each input",
        prepare=input_power,
        wants=frozenset({"second_moment"}),
    ),
    "gptq": Quantizer(
        fit=with_feedback,
        description="searched scales, then column by column, each making up for the errors before it",
        prepare=factorise,
        wants=frozenset({"second_moment"}),
        prepare_rows=factorise_rows,
        join=with_both_feedbacks,
    ),
}
PLAIN = "rtn"  # for what calibration never reached, and for tables
