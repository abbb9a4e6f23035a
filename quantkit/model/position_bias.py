"""Relative position bias: the rows of its table, by the distance from query to key.

Raffel et al. 2020 (https://arxiv.org/abs/1910.10683). Half of the rows are for keys before their query, half
for keys after it. In each half, the nearer distances have a row each, and the rows of farther ones grow
wider with the logarithm of the distance.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.model.model_map import PositionBias


def bucket_of(bias: PositionBias) -> NDArray[np.int64]:
    """Rows of the table for the distances -max_distance to max_distance.

    Logarithms are torch's in float32, as in transformers: at the edge of a bucket an ulp decides.
    """
    distances = torch.arange(-bias.max_distance, bias.max_distance + 1, device="cpu")
    half = bias.num_buckets // 2
    num_exact = half // 2
    steps = distances.abs()
    ratio = torch.log(steps.float() / num_exact) / math.log(bias.max_distance / num_exact)
    far = num_exact + (ratio.clamp(min=0) * (half - num_exact)).long()
    rows = torch.where(steps < num_exact, steps, far.clamp(max=half - 1))
    return np.asarray((rows + half * (distances > 0)).numpy(), np.int64)
