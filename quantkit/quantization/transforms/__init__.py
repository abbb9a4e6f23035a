"""Changes that leave what a model computes as it is and make it easier to quantize: one row each.

A row's function takes a map and a source of tensors and returns the changed pair; the new source computes its
changes as it is read. All take `unties_head` and `dtype`; `seed`, `statistics` and more as each says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.model.model_map import ModelMap
from quantkit.quantization.transforms.basis import BasisKind
from quantkit.quantization.transforms.fold import fold
from quantkit.quantization.transforms.hadamard import rotate_heads, rotate_residual
from quantkit.quantization.transforms.permutation import permute
from quantkit.quantization.transforms.smoothquant import smooth, smooth_for_weights
from quantkit.quantization.transforms.source import TransformedTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """One row."""

    apply: Callable[..., tuple[ModelMap, TransformedTensors]]
    kind: BasisKind
    description: str
    needs: tuple[str, ...] = ()  # calibration statistics of what readers read


TRANSFORMS: dict[str, Transform] = {
    "fold": Transform(
        apply=fold,
        kind="diagonal",
        description="norm gains and biases go into what reads them; layer norms become RMS norms",
    ),
    "smoothquant": Transform(
        apply=smooth,
        kind="diagonal",
        description="channel scales that balance input peaks against weight peaks",
        needs=("peak",),
    ),
    "awq": Transform(
        apply=smooth_for_weights,
        kind="diagonal",
        description="channel scales from mean input magnitudes, for weights alone",
        needs=("mean_magnitude",),
    ),
    "hadamard": Transform(
        apply=rotate_residual,
        kind="orthogonal",
        description="a randomised Hadamard rotation of the residual stream",
    ),
    "head_hadamard": Transform(
        apply=rotate_heads,
        kind="per_head_orthogonal",
        description="a randomised Hadamard rotation of every head's values",
    ),
    "permutation": Transform(
        apply=permute,
        kind="permutation",
        description="a seeded random order of channels wherever one is permitted",
    ),
}
