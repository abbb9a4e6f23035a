"""Changes of basis between the writers and readers of a space, each defined by its action on rows.

A vector y becomes y M. Its writers then give `written(y) = y M`, and a weight row that is multiplied with it
becomes `read(w) = w M^-T`, so that every product stays as it was. For permutations and rotations the two
operations are equal. Rotations are Kronecker products of small matrices and never built whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from quantkit.quantization.grid import Doubles

# Letters: T rows, I channels of the space, H heads, D channels of a head.
SpaceKind = Literal["norm_output", "attention_input", "ffn_input", "residual", "ffn_hidden", "value_heads"]
BasisKind = Literal["diagonal", "orthogonal", "permutation", "per_head_orthogonal", "head_permutation"]
INPUTS: tuple[SpaceKind, ...] = ("attention_input", "ffn_input")  # multiplied by factors of their own
BASIS_KINDS: tuple[BasisKind, ...] = get_args(BasisKind)
Order = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """A vector that some modules write and others read, between which a change of basis may be put.

    Writers absorb the matrix and readers its inverse. An input without writers is multiplied by factors.
    """

    name: str
    kind: SpaceKind
    width: int
    writers: tuple[str, ...]  # layers, norms and embedding tables
    readers: tuple[str, ...]  # layers
    forbidden: Mapping[BasisKind, str]  # kinds that change the model's function, each with the reason
    block: str | None = None
    norms: tuple[str, ...] = ()  # on the residual: norms that read it, or read it and write it back
    permits_untied: frozenset[BasisKind] = frozenset()  # forbidden only while the head is tied
    num_heads: int = 0  # query heads, which share value heads in groups
    num_kv_heads: int = 0
    head_dim: int = 0
    aligned: tuple[str, ...] = ()  # queries and keys, which move along when whole heads do

    @property
    def permits(self) -> frozenset[BasisKind]:
        return frozenset(BASIS_KINDS) - self.forbidden.keys()

    def allows(self, kind: BasisKind, *, unties_head: bool) -> bool:
        return kind in self.permits or (unties_head and kind in self.permits_untied)

    @property
    def query_group(self) -> int:
        """Query heads that share one value head."""
        return self.num_heads // self.num_kv_heads


def forbidden(default: str, **reasons: str | None) -> dict[BasisKind, str]:
    """Reasons against each kind of change, `default` where none is given; a reason of None permits it."""
    all_reasons = {kind: reasons.get(kind, default) for kind in BASIS_KINDS}
    return {kind: reason for kind, reason in all_reasons.items() if reason is not None}


class Action(Protocol):
    """A linear map of rows."""

    mixes_channels: ClassVar[bool]  # a channel of the result needs more than one channel

    @property
    def width(self) -> int:
        """Rows and columns of M."""

    def written(self, x_TI: Doubles) -> Doubles:
        """Rows times M."""

    def read(self, x_TI: Doubles) -> Doubles:
        """Rows times the transposed inverse of M."""


class Basis(Action, Protocol):
    """An invertible matrix M that can be put between writers and readers."""

    @property
    def kind(self) -> BasisKind:
        """The kind that a space must permit."""

    def for_queries(self, head_dim: int, group: int) -> Basis:
        """The basis of the query heads' outputs, where `group` query heads share one value head."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Diagonal:
    """One positive factor for each channel."""

    mixes_channels: ClassVar[bool] = False
    kind: ClassVar[BasisKind] = "diagonal"
    factors_I: Doubles

    @property
    def width(self) -> int:
        return len(self.factors_I)

    def written(self, x_TI: Doubles) -> Doubles:
        return x_TI * self.factors_I

    def read(self, x_TI: Doubles) -> Doubles:
        return x_TI / self.factors_I

    def for_queries(self, head_dim: int, group: int) -> Diagonal:
        heads_HD = self.factors_I.reshape(-1, head_dim)
        return Diagonal(factors_I=np.repeat(heads_HD, group, axis=0).reshape(-1))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """Channel i of the new vector is channel `order[i]` of the old one."""

    mixes_channels: ClassVar[bool] = False
    order_I: Order
    moves_heads: bool = False  # whole value heads, with which their queries and keys move

    @property
    def kind(self) -> BasisKind:
        return "head_permutation" if self.moves_heads else "permutation"

    @property
    def width(self) -> int:
        return len(self.order_I)

    def written(self, x_TI: Doubles) -> Doubles:
        return x_TI[..., self.order_I]

    read = written

    def for_queries(self, head_dim: int, group: int) -> Permutation:
        """Every query head gets its value head's order; a group of query heads moves as one."""
        head_HD, channel_HD = np.divmod(self.order_I.reshape(-1, head_dim), head_dim)
        stays = head_HD == np.arange(len(head_HD))[:, None]
        assert self.moves_heads or stays.all(), "a value may not move to another head"
        query_HGD = head_HD[:, None] * group + np.arange(group)[:, None]
        order_I = (query_HGD * head_dim + channel_HD[:, None]).reshape(-1)
        return Permutation(order_I=order_I, moves_heads=self.moves_heads)


def head_permutation(order_H: Order, head_dim: int) -> Permutation:
    """An order of whole value heads."""
    order_HD = order_H[:, None] * head_dim + np.arange(head_dim)
    return Permutation(order_I=order_HD.reshape(-1), moves_heads=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rotation:
    """Random signs and then a Kronecker product of orthogonal matrices."""

    mixes_channels: ClassVar[bool] = True
    kind: ClassVar[BasisKind] = "orthogonal"
    signs_I: Doubles
    factors: tuple[Doubles, ...]

    @property
    def width(self) -> int:
        return len(self.signs_I)

    def written(self, x_TI: Doubles) -> Doubles:
        """Rotated, one small factor at a time."""
        sizes = tuple(len(factor) for factor in self.factors)
        rotated = (x_TI * self.signs_I).reshape(-1, *sizes)
        for axis, factor in enumerate(self.factors, start=1):
            rotated = np.moveaxis(np.moveaxis(rotated, axis, -1) @ factor, -1, axis)
        return rotated.reshape(x_TI.shape)

    read = written

    def for_queries(self, head_dim: int, group: int) -> Basis:
        raise AssertionError("a rotation of all value channels mixes heads")

    def matrix_II(self) -> Doubles:
        return self.written(np.eye(self.width))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadRotation:
    """An orthogonal matrix for each head."""

    mixes_channels: ClassVar[bool] = True
    kind: ClassVar[BasisKind] = "per_head_orthogonal"
    rotations_HDD: Doubles

    @property
    def width(self) -> int:
        heads, head_dim, _ = self.rotations_HDD.shape
        return int(heads * head_dim)

    def written(self, x_TI: Doubles) -> Doubles:
        heads, head_dim, _ = self.rotations_HDD.shape
        x_HTD = np.moveaxis(x_TI.reshape(-1, heads, head_dim), 1, 0)
        rotated: Doubles = np.moveaxis(x_HTD @ self.rotations_HDD, 0, 1).reshape(x_TI.shape)
        return rotated

    read = written

    def for_queries(self, head_dim: int, group: int) -> HeadRotation:
        return HeadRotation(rotations_HDD=np.repeat(self.rotations_HDD, group, axis=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Centring:
    """Subtracts the mean, as a layer norm does and its writers can do for it; it has no inverse."""

    mixes_channels: ClassVar[bool] = True
    width: int

    def written(self, x_TI: Doubles) -> Doubles:
        centred: Doubles = x_TI - x_TI.mean(axis=-1, keepdims=True)
        return centred

    def read(self, x_TI: Doubles) -> Doubles:
        raise AssertionError("centring has no inverse")
