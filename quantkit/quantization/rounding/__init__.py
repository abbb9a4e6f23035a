"""Fits: methods that put weights on their grid. A line of the table and a file each.

A fit encodes any run of a matrix's rows; what all rows share, such as the factor of the inputs' second
moment, is prepared once for a matrix. A fit that encodes rows jointly, where second moments of gradients are
known, gets all of a projection's rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.plan.formats import Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import Encoded, Floats
from quantkit.quantization.rounding.gptq import factorise, with_feedback
from quantkit.quantization.rounding.gptq_joint import factorise_outputs, with_both_feedbacks
from quantkit.quantization.rounding.mse import search
from quantkit.quantization.rounding.output_error import input_power
from quantkit.quantization.rounding.rtn import round_to_nearest

Prepare = Callable[[InputStatistics, Grid], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A row of the table."""

    encode: Callable[[Floats, Grid, Any], Encoded]  # weight_OI, grid, prepared inputs
    statistics: frozenset[str] = frozenset()  # of inputs, as calibration names them
    prepare: Prepare | None = None  # once for a matrix
    prepare_outputs: Prepare | None = None  # once for a projection
    encode_jointly: Callable[[Floats, Grid, Any, Any], Encoded] | None = None  # ..., prepared outputs


FITS: dict[str, Fit] = {
    "rtn": Fit(encode=round_to_nearest),
    "mse": Fit(encode=search),
    "output": Fit(
        encode=search,
        statistics=frozenset({"second_moment"}),
        prepare=input_power,
    ),
    "gptq": Fit(
        encode=with_feedback,
        statistics=frozenset({"second_moment"}),
        prepare=factorise,
        prepare_outputs=factorise_outputs,
        encode_jointly=with_both_feedbacks,
    ),
}
PLAIN = "rtn"  # for matrices that calibration never reached, and for tables
