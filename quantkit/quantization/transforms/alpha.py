"""How strongly to smooth each space, by trying: the strength with the smallest error of its readers' outputs.

The error is that of the product which the runtime will compute, ||Q(x / s) Q(W s)^T - x W^T||^2 on sampled
rows, with the rounding of inputs and weights given as callables. No smoothing at all is tried too and wins a
tie, so that on the sample a space is never made worse. https://arxiv.org/abs/2306.00978, section 3.2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import Diagonal, Doubles, Space
from quantkit.quantization.transforms.draft import opened, row_chunks
from quantkit.quantization.transforms.smoothquant import (
    Rule,
    Statistics,
    pooled_statistic,
    readers_of,
    smoothing_scales,
    weight_peaks,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothing:
    """How strongly one space was smoothed, and what its readers' outputs lose with and without."""

    space: str
    transform: str
    alpha: float | None  # None: it stayed as it was
    error: float  # squared, on sampled tokens
    plain_error: float


GRID: tuple[float, ...] = tuple(step / 10 for step in range(11))
Floats = NDArray[np.float32]
Round = Callable[[Floats], NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the search found for one space."""

    space: str
    alpha: float | None  # None: leave it as it is
    error: float  # squared, over all readers and sampled rows
    plain_error: float  # of the same without smoothing
    errors: tuple[tuple[float, float], ...]  # every strength tried with its error


def search_alpha(
    model_map: ModelMap,
    source: TensorSource,
    space: Space,
    *,
    sample_TI: NDArray[Any],
    statistics: Statistics,
    round_inputs: Round,
    round_weights: Round,
    rule: Rule = "smoothquant",
    grid: Sequence[float] = GRID,
) -> Choice | None:
    """The best strength for one space; None when calibration never saw what its readers read.

    `round_weights` is given rows as [out, in] and must treat each row alone.
    """
    tensors = opened(model_map, source, np.float32)
    seen_I = pooled_statistic(model_map, space, statistics)
    if seen_I is None or len(sample_TI) == 0:
        return None
    weight_I = weight_peaks(model_map, tensors, space) if rule == "smoothquant" else None
    tried: list[float | None] = [None, *grid]
    scales = [np.ones(space.width)]
    scales += [smoothing_scales(seen_I, weight_I, alpha) for alpha in grid]
    wide = [_for_readers(space, scales_I) for scales_I in scales]
    # Products in float32, as the runtime has them: what rounding costs is far above what they lose.
    x_TI = np.asarray(sample_TI, np.float32)
    inputs = [_single(round_inputs(x_TI / _single(scales_I))) for scales_I in wide]
    errors = np.zeros(len(tried))
    for layer in readers_of(model_map, space):
        for weight_OI in row_chunks(tensors, layer):
            wanted_TO = x_TI @ _single(weight_OI).T
            for place, scales_I in enumerate(wide):
                rounded_OI = _single(round_weights(_single(weight_OI * scales_I)))
                errors[place] += ((inputs[place] @ rounded_OI.T - wanted_TO) ** 2).sum(dtype=np.float64)
    best = int(errors.argmin())
    return Choice(
        space=space.name,
        alpha=tried[best],
        error=float(errors[best]),
        plain_error=float(errors[0]),
        errors=tuple(zip(grid, map(float, errors[1:]), strict=True)),
    )


def _single(values: NDArray[Any]) -> Floats:
    return np.asarray(values, np.float32)


def _for_readers(space: Space, scales_I: Doubles) -> Doubles:
    """The scales as the readers' columns have them."""
    if space.kind != "value_heads":
        return scales_I
    group = space.num_heads // space.num_kv_heads
    return Diagonal(factors_I=scales_I).for_queries(space.head_dim, group).factors_I
