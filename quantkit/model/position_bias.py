"""Relative positions: the rows of a table, by the distance from query to key.

Raffel et al. 2020 (https://arxiv.org/abs/1910.10683). Half of the rows are for keys before their query, half
for keys after it; a decoder, which sees none of the latter, has all rows for keys before. The nearer
distances have a row each, and the rows of farther ones grow wider with the logarithm of the distance.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.model.model_map import DistanceScores, PositionBias


def bucket_of(bias: PositionBias) -> NDArray[np.int64]:
    """Rows of the table for the distances -max_distance to max_distance.

    Logarithms are torch's in float32, as in transformers: at the edge of a bucket an ulp decides.
    """
    distances = torch.arange(-bias.max_distance, bias.max_distance + 1, device="cpu")
    half = bias.num_buckets if bias.is_causal else bias.num_buckets // 2
    num_exact = half // 2
    steps = -distances.clamp(max=0) if bias.is_causal else distances.abs()
    ratio = torch.log(steps.float() / num_exact) / math.log(bias.max_distance / num_exact)
    far = num_exact + (ratio.clamp(min=0) * (half - num_exact)).long()
    rows = torch.where(steps < num_exact, steps, far.clamp(max=half - 1))
    after = torch.zeros_like(rows) if bias.is_causal else half * (distances > 0)
    return np.asarray((rows + after).numpy(), np.int64)


def row_of(scores: DistanceScores) -> NDArray[np.int64]:
    """Rows of the table for the distances -max_distance to max_distance, from key to query.

    Logarithms are torch's in float32, as in transformers.
    """
    distances = torch.arange(-scores.max_distance, scores.max_distance + 1, device="cpu")
    rows = distances
    if scores.buckets_from is not None:
        near, steps = scores.buckets_from, distances.abs().clamp(min=scores.buckets_from)
        widest = torch.log(torch.tensor((scores.max_distance - 1) / near))
        far = torch.ceil(torch.log(steps / near) / widest * (near - 1)) + near
        rows = torch.where(distances.abs() <= near, distances, (far * distances.sign()).long())
    return np.asarray((rows + scores.reach).clamp(0, 2 * scores.reach - 1).numpy(), np.int64)
