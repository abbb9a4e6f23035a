"""A map in which the latent projections run, so that an export has them as outputs beside the logits.

Whether a weight still is block-diagonal, as it started, is read from the weight itself, layer by layer: a
single value off the diagonal and it is dense.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quantkit.errors import InputError
from quantkit.model.inspect import training_only_note
from quantkit.model.model_map import Layer, ModelMap, Role
from quantkit.model.weights.tensors import TensorSource


def keep_latents(model_map: ModelMap, weights: TensorSource) -> ModelMap:
    """The map with its latent projections among those that inference runs."""
    latents = [layer for layer in model_map.layers if layer.role is Role.FFN_LATENT]
    if not latents:
        raise InputError(
            "it has no latent projection to keep",
            where=model_map.name,
            allowed="a model with wsFFN (model type 'ws_ffn')",
            next_step="leave --keep-latent out",
        )
    kept = {
        layer.name: replace(layer, calls=1, num_groups=num_groups_of(layer, weights)) for layer in latents
    }
    heads, diagonal = latents[0].num_heads, sum(layer.num_groups > 1 for layer in kept.values())
    left = ", since their weights have left the diagonal" if heads > 1 else ""
    parts = {f"{diagonal} block-diagonal, with {heads} times fewer weights": diagonal}
    parts[f"{len(kept) - diagonal} dense{left}"] = len(kept) - diagonal
    words = " and ".join(part for part, number in parts.items() if number)
    latent_note = f"latents of {heads} heads are kept as outputs: {words}"
    zeros = sum(layer.num_weights for layer in latents) - sum(layer.num_weights for layer in kept.values())
    others = tuple(note for note in model_map.notes if note != training_only_note(latents))
    return replace(
        model_map,
        num_parameters=model_map.num_parameters - zeros,
        layers=tuple(kept.get(layer.name, layer) for layer in model_map.layers),
        notes=(*others, latent_note),
    )


def num_groups_of(layer: Layer, weights: TensorSource) -> int:
    """The number of heads if the weight is block-diagonal over them, else 1."""
    width = layer.in_features // layer.num_heads
    for start in range(0, layer.in_features, width):
        rows = weights.read(f"{layer.matrix}.weight", start, width)
        if np.count_nonzero(rows) != np.count_nonzero(rows[:, start : start + width]):
            return 1
    return layer.num_heads
