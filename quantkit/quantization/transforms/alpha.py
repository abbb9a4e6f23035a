"""The strength of smoothing of each space, by search: the least error of its readers' outputs.

The error is that of the product which the runtime will compute, ||Q(x / s) Q(W s)^T - x W^T||^2 on sampled
rows, with the rounding of inputs and weights given as callables. The search includes no smoothing at all,
which wins a tie, so that on the sample a space never gets worse.
https://arxiv.org/abs/2306.00978, section 3.2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.grid import Doubles, Floats
from quantkit.quantization.projections import row_chunks
from quantkit.quantization.transforms.basis import Diagonal, Space
from quantkit.quantization.transforms.draft import opened
from quantkit.quantization.transforms.settings import ChannelStatistics
from quantkit.quantization.transforms.smoothquant import (
    Rule,
    pooled_statistic,
    readers_of,
    smoothing_scales,
    weight_peaks,
)

GRID: tuple[float, ...] = tuple(step / 10 for step in range(11))
Round = Callable[[Floats], NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothing:
    """The strength of smoothing of one space, and the errors of its readers' outputs."""

    space: str
    transform: str
    alpha: float | None  # None: not smoothed
    error: float  # squared, over all readers and sampled tokens
    plain_error: float  # without smoothing


def search_alpha(
    model_map: ModelMap,
    source: TensorSource,
    space: Space,
    *,
    sample_TI: NDArray[Any],
    statistics: ChannelStatistics,
    round_inputs: Round,
    round_weights: Round,
    rule: Rule = "smoothquant",
    grid: Sequence[float] = GRID,
) -> Smoothing | None:
    """The best strength for one space; None where calibration has no statistics of its readers' inputs.

    `round_weights` gets rows as [out, in] and must treat each row alone.
    """
    tensors = opened(model_map, source)
    input_I = pooled_statistic(model_map, space, statistics)
    if input_I is None or len(sample_TI) == 0:
        return None
    weight_I = weight_peaks(model_map, tensors, space) if rule == "smoothquant" else None
    alphas: list[float | None] = [None, *grid]
    scales = [np.ones(space.width), *(smoothing_scales(input_I, weight_I, alpha) for alpha in grid)]
    column_scales = [_of_readers(space, scales_I) for scales_I in scales]
    # Products in float32, as in the runtime: rounding errors are far above those of float32.
    x_TI = np.asarray(sample_TI, np.float32)
    inputs = [_single(round_inputs(x_TI / _single(scales_I))) for scales_I in column_scales]
    errors = np.zeros(len(alphas))
    for layer in readers_of(model_map, space):
        for weight_OI in row_chunks(tensors.exact, layer):
            exact_TO = x_TI @ _single(weight_OI).T
            for number, scales_I in enumerate(column_scales):
                rounded_OI = _single(round_weights(_single(weight_OI * scales_I)))
                errors[number] += ((inputs[number] @ rounded_OI.T - exact_TO) ** 2).sum(dtype=np.float64)
    best = int(errors.argmin())
    return Smoothing(
        space=space.name,
        transform=rule,
        alpha=alphas[best],
        error=float(errors[best]),
        plain_error=float(errors[0]),
    )


def _single(values: NDArray[Any]) -> Floats:
    return np.asarray(values, np.float32)


def _of_readers(space: Space, scales_I: Doubles) -> Doubles:
    """The scales of the readers' columns."""
    if space.kind != "value_heads":
        return scales_I
    return Diagonal(factors_I=scales_I).for_queries(space.head_dim, space.query_group).factors_I
