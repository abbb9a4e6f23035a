"""Opens the weights of a source: from its folder, from the Hub, or seeded random ones.

A checkpoint stores a shared tensor once, under any of its names, so every name is an alias of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from quantkit.errors import InputError
from quantkit.model.families import family_of
from quantkit.model.load import DEMO_NAME, Source, build_on_meta, hub_is_reachable
from quantkit.model.model_map import ModelMap
from quantkit.model.names import checkpoint_name
from quantkit.model.weights.tensors import RandomTensors, TensorSource, open_tensors

WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.txt", "tokenizer.model", "*.jinja"]


def with_weights(source: Source, *, random_weights: bool) -> Source:
    """The source with a folder of weights, fetched from the Hub where it has none."""
    if random_weights or source.folder is not None:
        return source
    return dataclasses.replace(source, folder=_fetch(source.name))


def _fetch(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        offline = not hub_is_reachable(constants.ENDPOINT)
        return Path(snapshot_download(name, allow_patterns=WEIGHT_PATTERNS, local_files_only=offline))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise InputError(
            f"its weights are not here, and the Hub gave none ({type(error).__name__})",
            where=name,
            allowed=f"a local folder with safetensors, '{DEMO_NAME}', or a Hub name",
            next_step=(
                f"'hf download {name} --local-dir FOLDER' where there is a network, then give that folder; "
                "or pass --random-weights to measure size and speed alone"
            ),
        ) from error


def open_weights(source: Source, model_map: ModelMap, *, random_weights: bool, seed: int = 0) -> TensorSource:
    """The tensors of a source; no weight is read yet."""
    family = family_of(model_map.model_type)
    tensors = {
        checkpoint_name(name, family): tensor
        for name, tensor in build_on_meta(source).state_dict(keep_vars=True).items()
    }
    if random_weights:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return RandomTensors(
            shapes=shapes,
            seed=seed,
            gain_offset=model_map.norm_gain_offset,
            num_values=model_map.num_parameters,
        )
    assert source.folder is not None
    return open_tensors(source.folder, aliases=_aliases(tensors))


def _aliases(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, tuple[str, ...]]:
    """Name -> the other names of the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    return {
        name: tuple(other for other in names if other != name)
        for names in groups.values()
        if len(names) > 1
        for name in names
    }
