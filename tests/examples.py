"""Random inputs of tiny models: token ids, or pictures where a model reads these."""

from __future__ import annotations

import numpy as np


def reads_pictures(model) -> bool:
    return model.main_input_name == "pixel_values"


def pictures_of(config, count: int, *, seed: int = 0, dtype=np.float32) -> np.ndarray:
    """Pictures of the size that the config names, [N, C, H, W]."""
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    shape = (count, config.num_channels, height, width)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def examples_of(model, count: int, length: int, *, seed: int = 0, dtype=np.float32) -> np.ndarray:
    """Token ids [N, length] below 60 that are no special ones, or pictures."""
    if reads_pictures(model):
        return pictures_of(model.config, count, seed=seed, dtype=dtype)
    return np.random.default_rng(seed).integers(5, 60, (count, length))
