"""Transforms: changes that keep a model's function and make it easier to quantize. One row each.

A row's function takes a map, a source of tensors and the settings, and returns the changed map and source;
the new source computes its edits as it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.fold import fold
from quantkit.quantization.transforms.hadamard import rotate_heads, rotate_residual
from quantkit.quantization.transforms.permutation import permute
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.smoothquant import smooth
from quantkit.quantization.transforms.source import Changed


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """A row of the table."""

    apply: Callable[[ModelMap, TensorSource, TransformSettings], Changed]
    statistic: str | None = None  # of inputs, from calibration


TRANSFORMS: dict[str, Transform] = {
    "fold": Transform(apply=fold),  # norm gains and biases into their readers; layer norms to RMS norms
    "smoothquant": Transform(apply=smooth, statistic="peak"),
    "awq": Transform(apply=partial(smooth, rule="awq"), statistic="mean_magnitude"),
    "hadamard": Transform(apply=rotate_residual),
    "head_hadamard": Transform(apply=rotate_heads),
    "permutation": Transform(apply=permute),
}
