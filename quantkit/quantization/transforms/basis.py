"""The matrices that can stand between writers and readers of a space, each known by how it acts on rows.

A vector y becomes y M. Its writers then give `written(y) = y M`, and a weight row that is multiplied with it
becomes `read(w) = w M^-T`, so that every product stays what it was. For permutations and rotations both are
the same operation. Rotations are Kronecker products of small matrices and never built whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

SpaceKind = Literal["norm_output", "residual", "ffn_hidden", "value_heads"]


BasisKind = Literal["diagonal", "orthogonal", "permutation", "per_head_orthogonal", "head_permutation"]


BASIS_KINDS: tuple[BasisKind, ...] = get_args(BasisKind)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """A vector that some modules write and others read, between which a change of basis may be put.

    Writers absorb the matrix and readers its inverse. Of `BASIS_KINDS` each is permitted, permitted once the
    head has weights of its own, or forbidden; the latter two have their reason in `why_not`.
    """

    name: str
    kind: SpaceKind
    width: int
    writers: tuple[str, ...]  # layers, norms and embedding tables
    readers: tuple[str, ...]  # layers
    block: str | None = None
    norms: tuple[str, ...] = ()  # on the residual: norms that read it, or read it and write it back
    permits: frozenset[BasisKind] = frozenset()
    permits_untied: frozenset[BasisKind] = frozenset()  # only once a tied head is untied
    why_not: Mapping[BasisKind, str] = dataclasses.field(default_factory=dict)
    num_heads: int = 0  # of queries; those of a group read the same value head
    num_kv_heads: int = 0
    head_dim: int = 0
    aligned: tuple[str, ...] = ()  # queries and keys, which move along when whole heads do


Doubles = NDArray[np.float64]
Order = NDArray[np.int64]


class Action(Protocol):
    """Something done to rows; legend: T rows, I the width of the space, H heads, D values of a head."""

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
        """What a space must permit for it."""

    def for_queries(self, head_dim: int, group: int) -> Basis:
        """The same for what query heads read, `group` of which share one value head."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Diagonal:
    """One positive factor for each channel."""

    factors_I: Doubles

    @property
    def kind(self) -> BasisKind:
        """Scales."""
        return "diagonal"

    @property
    def width(self) -> int:
        """Channels."""
        return len(self.factors_I)

    def written(self, x_TI: Doubles) -> Doubles:
        """Scaled up."""
        return x_TI * self.factors_I

    def read(self, x_TI: Doubles) -> Doubles:
        """Scaled down."""
        return x_TI / self.factors_I

    def for_queries(self, head_dim: int, group: int) -> Diagonal:
        """Every query head gets its value head's factors."""
        heads_HD = self.factors_I.reshape(-1, head_dim)
        return Diagonal(factors_I=np.repeat(heads_HD, group, axis=0).reshape(-1))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """Channel i of the new vector is channel `order[i]` of the old one."""

    order_I: Order

    @property
    def kind(self) -> BasisKind:
        """An order of channels."""
        return "permutation"

    @property
    def width(self) -> int:
        """Channels."""
        return len(self.order_I)

    def written(self, x_TI: Doubles) -> Doubles:
        """In the new order."""
        return x_TI[..., self.order_I]

    read = written

    def for_queries(self, head_dim: int, group: int) -> Permutation:
        """Every query head gets its value head's order; an order may not leave its head."""
        order_HD = self.order_I.reshape(-1, head_dim) - head_dim * np.arange(self.width // head_dim)[:, None]
        assert ((order_HD >= 0) & (order_HD < head_dim)).all(), "a value may not move to another head"
        order_QD = np.repeat(order_HD, group, axis=0)
        return Permutation(order_I=(order_QD + head_dim * np.arange(len(order_QD))[:, None]).reshape(-1))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heads:
    """An order of whole value heads, with which their queries and keys move."""

    order_H: Order
    head_dim: int

    @property
    def kind(self) -> BasisKind:
        """An order of heads."""
        return "head_permutation"

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return len(self.order_H) * self.head_dim

    def written(self, x_TI: Doubles) -> Doubles:
        """In the new order."""
        return self.as_channels().written(x_TI)

    read = written

    def as_channels(self) -> Permutation:
        """The order of channels that it comes to."""
        order_HD = self.order_H[:, None] * self.head_dim + np.arange(self.head_dim)
        return Permutation(order_I=order_HD.reshape(-1))

    def for_queries(self, head_dim: int, group: int) -> Permutation:
        """A group of query heads moves as one."""
        return Heads(order_H=self.order_H, head_dim=head_dim * group).as_channels()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rotation:
    """Random signs and then a Kronecker product of orthogonal matrices."""

    signs_I: Doubles
    factors: tuple[Doubles, ...]

    @property
    def kind(self) -> BasisKind:
        """A rotation of the whole space."""
        return "orthogonal"

    @property
    def width(self) -> int:
        """Channels."""
        return len(self.signs_I)

    def written(self, x_TI: Doubles) -> Doubles:
        """Rotated, one small factor at a time."""
        sizes = tuple(len(factor) for factor in self.factors)
        turned = (x_TI * self.signs_I).reshape(-1, *sizes)
        for axis, factor in enumerate(self.factors, start=1):
            turned = np.moveaxis(np.moveaxis(turned, axis, -1) @ factor, -1, axis)
        return turned.reshape(x_TI.shape)

    read = written

    def for_queries(self, head_dim: int, group: int) -> Basis:
        """It mixes heads, so it has no such form."""
        raise AssertionError("a rotation of all value channels mixes heads")

    def matrix_II(self) -> Doubles:
        """The whole matrix, for looking at."""
        return self.written(np.eye(self.width))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadRotation:
    """An orthogonal matrix for each head."""

    rotations_HDD: Doubles

    @property
    def kind(self) -> BasisKind:
        """A rotation within every head."""
        return "per_head_orthogonal"

    @property
    def width(self) -> int:
        """Channels of all heads."""
        heads, head_dim, _ = self.rotations_HDD.shape
        return int(heads * head_dim)

    def written(self, x_TI: Doubles) -> Doubles:
        """Rotated head by head."""
        heads, head_dim, _ = self.rotations_HDD.shape
        x_HTD = np.moveaxis(x_TI.reshape(-1, heads, head_dim), 1, 0)
        turned: Doubles = np.moveaxis(x_HTD @ self.rotations_HDD, 0, 1).reshape(x_TI.shape)
        return turned

    read = written

    def for_queries(self, head_dim: int, group: int) -> HeadRotation:
        """Every query head gets its value head's rotation."""
        return HeadRotation(rotations_HDD=np.repeat(self.rotations_HDD, group, axis=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Centring:
    """The mean taken away, which a layer norm does and its writers can do for it; it has no inverse."""

    width: int

    def written(self, x_TI: Doubles) -> Doubles:
        """Rows whose mean is zero."""
        centred: Doubles = x_TI - x_TI.mean(axis=-1, keepdims=True)
        return centred

    def read(self, x_TI: Doubles) -> Doubles:
        """Nothing undoes it."""
        raise AssertionError("centring has no inverse")


def is_local(basis: Action) -> bool:
    """Whether a channel of the result needs one channel alone, so that rows can be had one by one."""
    return isinstance(basis, (Diagonal, Permutation, Heads))
