"""A seeded random order of channels in every space that permits one: the plainest change of basis.

It makes nothing more accurate. It hides which channel is which, and it proves that the map knows every writer
and reader of a space.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.model.spaces import require_spaces
from quantkit.model.tensors import TensorSource
from quantkit.records import ModelMap, Space
from quantkit.transforms.basis import Basis, Heads, Permutation
from quantkit.transforms.change import apply_change
from quantkit.transforms.source import TransformedTensors


def permute(
    model_map: ModelMap,
    source: TensorSource,
    *,
    unties_head: bool = False,
    dtype: Any = np.float32,  # noqa: ANN401 - a numpy type
    seed: int = 0,
    spaces: Collection[str] | None = None,
    moves_heads: bool = False,
    **_: object,
) -> tuple[ModelMap, TransformedTensors]:
    """Permute these spaces, or all that permit it; values within their head, or whole heads."""
    known = {space.name: space for space in require_spaces(model_map)}
    chosen = (
        spaces if spaces is not None else [name for name, space in known.items() if _can(space, moves_heads)]
    )
    if not chosen:
        raise InputError(
            "no space of it permits an order of channels",
            where=model_map.name,
            next_step="choose another transform for this model",
        )
    changes = {
        name: _order(known[name], seed, number, moves_heads=moves_heads)
        for number, name in enumerate(chosen)
        if name in known
    }
    unknown = {name: Permutation(order_I=np.arange(0)) for name in chosen if name not in known}
    return apply_change(model_map, source, {**changes, **unknown}, unties_head=unties_head, dtype=dtype)


def _can(space: Space, moves_heads: bool) -> bool:
    return (
        "head_permutation" if moves_heads and space.kind == "value_heads" else "permutation"
    ) in space.permits


def _order(space: Space, *seed: int, moves_heads: bool) -> Basis:
    random = np.random.default_rng([*seed, space.width])
    if space.kind != "value_heads":
        return Permutation(order_I=random.permutation(space.width))
    if moves_heads:
        return Heads(order_H=random.permutation(space.num_kv_heads), head_dim=space.head_dim)
    heads = range(space.num_kv_heads)
    orders = [random.permutation(space.head_dim) + head * space.head_dim for head in heads]
    return Permutation(order_I=np.concatenate(orders))
