"""Examples that a model reads: token ids [B, T], or pictures [B, C, H, W] as floats.

Calibration and measurements hand on arrays of one of the two; the type of the numbers tells them apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def are_pictures(examples: NDArray[Any]) -> bool:
    return bool(np.issubdtype(examples.dtype, np.floating))


def inputs_of(examples: NDArray[Any]) -> dict[str, Tensor]:
    """The examples under the name that transformers' models have for them."""
    if are_pictures(examples):
        return {"pixel_values": torch.from_numpy(np.ascontiguousarray(examples))}
    return {"input_ids": torch.from_numpy(np.ascontiguousarray(examples, np.int64))}
