"""Per-channel scales between the writers and readers of a space: large channels shrink, their weights grow.

SmoothQuant balances the largest magnitude of a channel against the largest weight that multiplies it; AWQ
uses mean magnitudes alone and so protects the weights of strong channels. Scales go between a norm and its
readers, between up and down projection, and between value and output projection. The output of a post-norm
is the residual too, so in front of its readers the scales are multiplied in.
https://arxiv.org/abs/2211.10438, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from quantkit.errors import InputError
from quantkit.model.model_map import Layer, ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.grid import Doubles
from quantkit.quantization.projections import row_chunks
from quantkit.quantization.transforms.basis import INPUTS, Basis, Diagonal, Space
from quantkit.quantization.transforms.change import apply_change
from quantkit.quantization.transforms.draft import Draft, opened
from quantkit.quantization.transforms.settings import ChannelStatistics, TransformSettings
from quantkit.quantization.transforms.source import Changed, TransformedTensors
from quantkit.quantization.transforms.spaces import require_known, require_spaces

Rule = Literal["smoothquant", "awq"]
VALUES_AT_ONCE, MAX_THREADS = 1 << 20, 8  # of a matrix whose peaks are found
LARGEST_SCALE = 1e3  # over the geometric mean: beyond it float32 and INT8 gain nothing more


def smooth(
    model_map: ModelMap,
    source: TensorSource,
    settings: TransformSettings,
    rule: Rule = "smoothquant",
) -> Changed:
    """Scale all spaces that permit it and whose readers have statistics.

    The statistics are peaks for "smoothquant" and mean magnitudes for "awq".
    """
    alpha, unties_head = settings.alpha, settings.unties_head
    spaces = {space.name: space for space in require_spaces(model_map)}
    permitting = smoothable(model_map, unties_head=unties_head)
    strengths = alpha if isinstance(alpha, Mapping) else dict.fromkeys(permitting, alpha)
    tensors = opened(model_map, source)
    changes: dict[str, Basis] = {}
    for name, strength in strengths.items():
        space = require_known(model_map, spaces, name)
        input_I = pooled_statistic(model_map, space, settings.statistics)
        if strength is not None and input_I is not None:
            weight_I = weight_peaks(model_map, tensors, space) if rule == "smoothquant" else None
            changes[name] = Diagonal(factors_I=1 / smoothing_scales(input_I, weight_I, strength))
    is_left_alone = isinstance(alpha, Mapping) and all(strength is None for strength in alpha.values())
    if not changes and not is_left_alone:
        raise InputError(
            "no space of it can be smoothed with these statistics",
            where=model_map.name,
            allowed=", ".join(permitting) or "none permits scales",
            next_step="calibrate the matrices that read these spaces, or choose another transform",
        )
    return apply_change(model_map, tensors, changes, unties_head=unties_head)


def smoothable(model_map: ModelMap, *, unties_head: bool = False) -> list[str]:
    """Names of the spaces that permit scales."""
    return [
        space.name for space in require_spaces(model_map) if space.allows("diagonal", unties_head=unties_head)
    ]


def smoothed_map(model_map: ModelMap, source: TensorSource) -> ModelMap:
    """The map as smoothing leaves it; no weight is read."""
    draft = Draft(model_map, source)
    for space in require_spaces(model_map):
        if space.kind in INPUTS and "diagonal" in space.permits:
            draft.add_input_factors(space.readers)
    return draft.map


def smoothing_scales(input_I: Doubles, weight_I: Doubles | None, alpha: float) -> Doubles:
    """The divisor of each channel: input^alpha / weight^(1 - alpha), or input^alpha without weights.

    Their geometric mean is one. The divisor of a channel with zero or infinite statistics is one.
    """
    weights_I = np.ones_like(input_I) if weight_I is None else weight_I
    alive = np.isfinite(input_I) & np.isfinite(weights_I) & (input_I > 0) & (weights_I > 0)
    scales_I = np.ones(len(input_I))
    if not alive.any():
        return scales_I
    logs = alpha * np.log(input_I[alive])
    if weight_I is not None:
        logs -= (1 - alpha) * np.log(weights_I[alive])
    limit = np.log(LARGEST_SCALE)
    scales_I[alive] = np.exp(np.clip(logs - logs.mean(), -limit, limit))
    return scales_I


def readers_of(model_map: ModelMap, space: Space) -> list[Layer]:
    return [layer for layer in model_map.layers if layer.name in space.readers]


def pooled_statistic(model_map: ModelMap, space: Space, statistics: ChannelStatistics) -> Doubles | None:
    """The largest value of each channel over all readers with statistics; None without any."""
    matrices = dict.fromkeys(layer.matrix for layer in readers_of(model_map, space))
    values = [np.asarray(statistics[name], np.float64) for name in matrices if name in statistics]
    return _over_groups(np.max(values, axis=0), space) if values else None


def _over_groups(values_I: Doubles, space: Space) -> Doubles:
    """The largest value over the query heads that share a value head."""
    if space.kind != "value_heads" or space.num_heads == space.num_kv_heads:
        return values_I
    values_HGD = values_I.reshape(space.num_kv_heads, -1, space.head_dim)
    pooled: Doubles = values_HGD.max(axis=1).reshape(-1)
    return pooled


def weight_peaks(model_map: ModelMap, tensors: TransformedTensors, space: Space) -> Doubles:
    """The largest magnitude of each column over all readers, which are read in parallel."""
    readers = readers_of(model_map, space)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        peaks_RI = list(pool.map(lambda layer: _column_peaks(tensors, layer), readers))
    return _over_groups(np.max(peaks_RI, axis=0), space)


def _column_peaks(tensors: TransformedTensors, layer: Layer) -> Doubles:
    """Of one layer, as many rows at a time as the processor's caches hold."""
    peaks_I = np.zeros(layer.in_features)
    size = max(1, VALUES_AT_ONCE // layer.in_features)
    for rows_OI in row_chunks(tensors.read, layer, size):
        peaks_I = np.maximum(peaks_I, np.maximum(rows_OI.max(axis=0), -rows_OI.min(axis=0)))
    return peaks_I
