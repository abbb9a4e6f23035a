"""Scales between what writes a vector and what reads it: large channels shrink, their weights grow.

One coarse grid then wastes less on either side. SmoothQuant balances the largest magnitude of a channel
against that of the weights which multiply it; AWQ looks at mean magnitudes alone and so protects the weights
that matter most. The same scales go between a norm and its readers, up and down, value and output projection.
https://arxiv.org/abs/2211.10438, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.model_map import Layer, ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import Basis, Diagonal, Doubles, Space
from quantkit.quantization.transforms.change import apply_change
from quantkit.quantization.transforms.draft import opened, row_chunks
from quantkit.quantization.transforms.source import TransformedTensors
from quantkit.quantization.transforms.spaces import require_spaces

Rule = Literal["smoothquant", "awq"]
Statistics = Mapping[str, NDArray[Any]]  # matrix -> one value for each channel of its input
DEFAULT_ALPHA = 0.5
VALUES_AT_ONCE, MAX_THREADS = 1 << 20, 8  # of a matrix that is looked through
LARGEST_SCALE = 1e3  # of a channel beside the geometric mean: beyond it float32 and INT8 gain nothing more


def smooth(
    model_map: ModelMap,
    source: TensorSource,
    *,
    statistics: Statistics | None = None,
    unties_head: bool = False,
    dtype: Any = np.float32,
    alpha: float | Mapping[str, float | None] = DEFAULT_ALPHA,
    rule: Rule = "smoothquant",
    spaces: Collection[str] | None = None,
    **_: object,
) -> tuple[ModelMap, TransformedTensors]:
    """Scale these spaces, or all that permit it and whose readers' input was seen.

    `statistics` holds peaks for "smoothquant" and mean magnitudes for "awq". With a mapping for `alpha`, a
    space that it lacks or gives None stays as it is.
    """
    known = {space.name: space for space in require_spaces(model_map)}
    chosen = list(spaces) if spaces is not None else smoothable(model_map, unties_head=unties_head)
    given, tensors = statistics or {}, opened(model_map, source, dtype)
    changes: dict[str, Basis] = {}
    for name in chosen:
        strength = alpha.get(name) if isinstance(alpha, Mapping) else alpha
        if strength is None:
            continue
        space = known.get(name)
        seen_I = pooled_statistic(model_map, space, given) if space else None
        if space is None:
            changes[name] = Diagonal(factors_I=np.ones(0))  # refused by name
        elif seen_I is not None:
            weight_I = weight_peaks(model_map, tensors, space) if rule == "smoothquant" else None
            scales_I = smoothing_scales(seen_I, weight_I, strength)
            changes[name] = Diagonal(factors_I=1 / scales_I)
    left_alone = isinstance(alpha, Mapping) and not any(alpha.get(name) is not None for name in chosen)
    if not changes and not left_alone:
        raise InputError(
            "no space of it can be smoothed with these statistics",
            where=model_map.name,
            allowed=", ".join(smoothable(model_map, unties_head=unties_head)) or "none permits scales",
            next_step="calibrate the matrices that read these spaces, or choose another transform",
        )
    return apply_change(model_map, tensors, changes, unties_head=unties_head, dtype=dtype)


def smooth_for_weights(
    model_map: ModelMap,
    source: TensorSource,
    **options: Any,
) -> tuple[ModelMap, TransformedTensors]:
    """The same by AWQ's rule."""
    return smooth(model_map, source, **{**options, "rule": "awq"})


def smoothable(model_map: ModelMap, *, unties_head: bool = False) -> list[str]:
    """Names of the spaces that scales may be put into."""
    return [
        space.name
        for space in require_spaces(model_map)
        if "diagonal" in space.permits or (unties_head and "diagonal" in space.permits_untied)
    ]


def smoothing_scales(seen_I: Doubles, weight_I: Doubles | None, alpha: float) -> Doubles:
    """What each channel is divided by: seen^alpha / weight^(1 - alpha), or seen^alpha without weights.

    Geometric mean one. A channel that is dead, on either side, is left alone.
    """
    weights_I = np.ones_like(seen_I) if weight_I is None else weight_I
    alive = np.isfinite(seen_I) & np.isfinite(weights_I) & (seen_I > 0) & (weights_I > 0)
    scales_I = np.ones(len(seen_I))
    if not alive.any():
        return scales_I
    logs = alpha * np.log(seen_I[alive])
    if weight_I is not None:
        logs -= (1 - alpha) * np.log(weights_I[alive])
    limit = np.log(LARGEST_SCALE)
    scales_I[alive] = np.exp(np.clip(logs - logs.mean(), -limit, limit))
    return scales_I


def readers_of(model_map: ModelMap, space: Space) -> list[Layer]:
    """The layers that read a space."""
    return [layer for layer in model_map.layers if layer.name in space.readers]


def pooled_statistic(model_map: ModelMap, space: Space, statistics: Statistics) -> Doubles | None:
    """The largest of a channel's values over all readers that were seen; None when none was."""
    matrices = dict.fromkeys(layer.matrix for layer in readers_of(model_map, space))
    seen = [np.asarray(statistics[name], np.float64) for name in matrices if name in statistics]
    return over_groups(np.max(seen, axis=0), space) if seen else None


def over_groups(values_I: Doubles, space: Space) -> Doubles:
    """Of the query heads that read one value head, the largest."""
    if space.kind != "value_heads" or space.num_heads == space.num_kv_heads:
        return values_I
    values_HGD = values_I.reshape(space.num_kv_heads, -1, space.head_dim)
    pooled: Doubles = values_HGD.max(axis=1).reshape(-1)
    return pooled


def weight_peaks(model_map: ModelMap, tensors: TransformedTensors, space: Space) -> Doubles:
    """The largest magnitude of each column over all readers, several of which are read at once."""
    readers = readers_of(model_map, space)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        peaks_RI = list(pool.map(lambda layer: _column_peaks(tensors, layer), readers))
    return over_groups(np.max(peaks_RI, axis=0), space)


def _column_peaks(tensors: TransformedTensors, layer: Layer) -> Doubles:
    """Of one layer, as many rows at a time as the caches hold."""
    peaks_I = np.zeros(layer.in_features)
    size = max(1, VALUES_AT_ONCE // layer.in_features)
    for rows_OI in row_chunks(tensors, layer, size, is_exact=False):
        peaks_I = np.maximum(peaks_I, np.maximum(rows_OI.max(axis=0), -rows_OI.min(axis=0)))
    return peaks_I
