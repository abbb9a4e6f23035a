"""An order of channels in every space that permits one: the plainest change of basis.

It makes nothing more accurate. It hides which channel is which, and it proves that the map knows every writer
and reader of a space. Orders come from a seed, to be made again by anyone, or from whoever hands them in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import Basis, Heads, Order, Permutation, Space
from quantkit.quantization.transforms.change import apply_change
from quantkit.quantization.transforms.source import TransformedTensors
from quantkit.quantization.transforms.spaces import require_spaces

Orders = Callable[[str, int], Order]  # what is put in order, and how many there are


def permute(
    model_map: ModelMap,
    source: TensorSource,
    *,
    unties_head: bool = False,
    dtype: Any = np.float32,
    seed: int = 0,
    spaces: Collection[str] | None = None,
    moves_heads: bool = False,
    orders: Orders | None = None,
    **_: object,
) -> tuple[ModelMap, TransformedTensors]:
    """Permute these spaces, or all that permit it; values within their head, or whole heads.

    `orders` names every order itself, and then no seed is used.
    """
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
        name: _order(known[name], orders or _seeded(seed, number, known[name]), moves_heads=moves_heads)
        for number, name in enumerate(chosen)
        if name in known
    }
    unknown = {name: Permutation(order_I=np.arange(0)) for name in chosen if name not in known}
    return apply_change(model_map, source, {**changes, **unknown}, unties_head=unties_head, dtype=dtype)


def _can(space: Space, moves_heads: bool) -> bool:
    return (
        "head_permutation" if moves_heads and space.kind == "value_heads" else "permutation"
    ) in space.permits


def _seeded(seed: int, number: int, space: Space) -> Orders:
    """One generator for all orders of a space."""
    random = np.random.default_rng([seed, number, space.width])
    return lambda _, width: random.permutation(width)


def _order(space: Space, orders: Orders, *, moves_heads: bool) -> Basis:
    if space.kind != "value_heads":
        return Permutation(order_I=checked_order(orders(space.name, space.width), space.width, space.name))
    if moves_heads:
        order_H = orders(f"{space.name}/heads", space.num_kv_heads)
        return Heads(order_H=checked_order(order_H, space.num_kv_heads, space.name), head_dim=space.head_dim)
    parts = []
    for head in range(space.num_kv_heads):
        order_D = orders(f"{space.name}/head{head}", space.head_dim)
        parts.append(checked_order(order_D, space.head_dim, space.name) + head * space.head_dim)
    return Permutation(order_I=np.concatenate(parts))


def checked_order(order_I: Order, width: int, name: str) -> Order:
    """The order, if it names each of `width` places once; what it names is never told."""
    given = np.asarray(order_I)
    if given.shape != (width,):
        raise InputError(
            f"an order of {given.size} places, and it has {width}", where=name, allowed=f"{width} places"
        )
    if given.dtype.kind not in "iu" or not np.array_equal(np.sort(given), np.arange(width)):
        raise InputError("no order: a place is missing or named twice", where=name, allowed="each place once")
    return given.astype(np.int64)
