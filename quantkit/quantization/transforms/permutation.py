"""A permutation of channels in every space that permits one.

It changes no accuracy. It hides the order of channels in a protected model, and it proves that the map knows
every writer and reader of a space. Orders come from a public seed or from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from quantkit.errors import InputError
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import BasisKind, Order, Permutation, Space, head_permutation
from quantkit.quantization.transforms.change import apply_change
from quantkit.quantization.transforms.settings import DEFAULT, TransformSettings
from quantkit.quantization.transforms.source import Changed
from quantkit.quantization.transforms.spaces import no_space, require_known, require_spaces

Orders = Callable[[str, int], Order]  # name of the order, number of places -> order


def permute(
    model_map: ModelMap,
    source: TensorSource,
    settings: TransformSettings = DEFAULT,
    *,
    spaces: Collection[str] | None = None,
    moves_heads: bool = False,
    orders: Orders | None = None,
) -> Changed:
    """Permute these spaces, or all that permit it; values within their head, or whole heads.

    `orders` gives every order in place of the seed.
    """
    by_name = {space.name: space for space in require_spaces(model_map)}
    permitting = [name for name, space in by_name.items() if _kind_for(space, moves_heads) in space.permits]
    chosen = permitting if spaces is None else spaces
    if not chosen:
        raise no_space(model_map, "no space of it permits an order of channels")
    for name in chosen:
        require_known(model_map, by_name, name)
    changes = {
        name: _order(
            by_name[name],
            orders or _seeded(settings.seed, number, by_name[name]),
            moves_heads=moves_heads,
        )
        for number, name in enumerate(chosen)
    }
    return apply_change(model_map, source, changes, unties_head=settings.unties_head)


def _kind_for(space: Space, moves_heads: bool) -> BasisKind:
    return "head_permutation" if moves_heads and space.kind == "value_heads" else "permutation"


def _seeded(seed: int, number: int, space: Space) -> Orders:
    """One generator for all orders of a space."""
    random = np.random.default_rng([seed, number, space.width])
    return lambda _, width: random.permutation(width)


def _order(space: Space, orders: Orders, *, moves_heads: bool) -> Permutation:
    if space.kind != "value_heads":
        return Permutation(order_I=checked_order(orders(space.name, space.width), space.width, space.name))
    if moves_heads:
        order_H = orders(f"{space.name}/heads", space.num_kv_heads)
        return head_permutation(checked_order(order_H, space.num_kv_heads, space.name), space.head_dim)
    parts = []
    for head in range(space.num_kv_heads):
        order_D = orders(f"{space.name}/head{head}", space.head_dim)
        parts.append(checked_order(order_D, space.head_dim, space.name) + head * space.head_dim)
    return Permutation(order_I=np.concatenate(parts))


def checked_order(order_I: Order, width: int, name: str) -> Order:
    """The order, if it names each of `width` places once; errors never show an order, which may be secret."""
    order_I = np.asarray(order_I)
    if order_I.shape != (width,):
        raise InputError(
            f"an order of {order_I.size} places, and it has {width}", where=name, allowed=f"{width} places"
        )
    if order_I.dtype.kind not in "iu" or not np.array_equal(np.sort(order_I), np.arange(width)):
        raise InputError("no order: a place is missing or named twice", where=name, allowed="each place once")
    return order_I.astype(np.int64)
