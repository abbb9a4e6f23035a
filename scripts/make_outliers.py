#!/usr/bin/env python3
"""The same function with outlier channels: a model to show what they do to rounding, and what mends it.

    .venv/bin/python scripts/make_outliers.py MODEL FOLDER [--channels 4] [--factor 40]

A few channels of every norm's output are scaled up, and the columns that read them down: large models grow
such channels by themselves (https://arxiv.org/abs/2208.07339). Not a logit changes but by rounding.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights, with_weights
from quantkit.quantization.transforms.basis import Diagonal
from quantkit.quantization.transforms.change import apply_change
from quantkit.quantization.transforms.spaces import spaces_of


def make_outliers(model: str, folder: Path, *, channels: int = 4, factor: float = 40.0, seed: int = 0) -> int:
    """Write the changed checkpoint; how many spaces were changed."""
    source = with_weights(open_source(model), random_weights=False)
    assert source.folder is not None
    model_map = inspect_source(source)
    weights = open_weights(source, model_map, random_weights=False)
    chances = np.random.default_rng(seed)
    changes = {}
    for space in spaces_of(model_map):
        if space.kind == "norm_output" and "diagonal" in space.permits:
            factors_I = np.ones(space.width)
            factors_I[chances.choice(space.width, channels, replace=False)] = factor
            changes[space.name] = Diagonal(factors_I=factors_I)
    _, changed = apply_change(model_map, weights, changes)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(changed.read(name)) for name in weights.stored}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for path in source.folder.iterdir():
        if path.suffix in (".json", ".txt", ".model", ".jinja") and "safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    return len(changes)


def main() -> int:
    """Read the arguments and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--factor", type=float, default=40.0)
    arguments = parser.parse_args()
    count = make_outliers(
        arguments.model, arguments.folder, channels=arguments.channels, factor=arguments.factor
    )
    print(f"{count} norm outputs changed; {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
