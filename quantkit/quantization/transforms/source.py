"""Transformed weights, computed when they are read, so that no changed model is ever held.

A change is a list of edits of named tensors. Scales and permutations of rows read only the requested rows,
and so does everything along columns; a rotation along rows needs the whole tensor, of which one is kept.
Edits are computed in float64 from the stored values and rounded once, however many changes were made.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import ModelMap
from quantkit.model.weights.headers import Groups
from quantkit.model.weights.tensors import GroupSource, TensorSource
from quantkit.quantization.grid import Doubles
from quantkit.quantization.transforms.basis import Action, Diagonal, Order, Permutation

CHUNK_VALUES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Along:
    """An action along one axis of a stored tensor, on some places of it or on all."""

    axis: int
    action: Action
    inverse: bool = False  # for readers
    where: Order | None = None
    offset: float = 0.0  # of a gain, which is stored without it

    def __call__(self, rows: Doubles) -> Doubles:
        return self.action.read(rows) if self.inverse else self.action.written(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """One value in the whole tensor."""

    value: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AddProduct:
    """Adds the product of a matrix and a vector: moves a norm's bias into the bias of its reader."""

    tensors: TransformedTensors  # before the change
    weight: str
    is_transposed: bool
    vector_I: Doubles

    def values(self) -> Doubles:
        """The product, a few rows at a time."""
        rows, columns = self.tensors.shape(self.weight)
        step = max(1, CHUNK_VALUES // columns)
        product = np.zeros(columns if self.is_transposed else rows)
        for start in range(0, rows, step):
            part = self.tensors.exact(self.weight, start, step)
            if self.is_transposed:
                product += self.vector_I[start : start + step] @ part
            else:
                product[start : start + step] = part @ self.vector_I
        return product


Edit = Along | Fill | AddProduct
Key = tuple[str, tuple[Edit, ...]]  # edits differ by identity, so two changes of one source differ


class _Kept:
    """A cache of vectors and of the last whole matrix, shared by all changes of one source."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.vectors: dict[Key, Doubles] = {}
        self.matrix: tuple[Key, Doubles] | None = None

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()  # a worker begins with an empty cache


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TransformedTensors:
    """A source of tensors with edits."""

    base: TensorSource
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)  # another name of a tensor -> the name of its edits
    copies: Mapping[str, str] = field(default_factory=dict)  # a new tensor -> the stored one it starts from
    added: Mapping[str, int] = field(default_factory=dict)  # new vectors of zeros
    removed: frozenset[str] = frozenset()
    dtype: Any = np.float32
    kept: _Kept = field(default_factory=_Kept)

    def _name(self, name: str) -> str:
        return self.same.get(name, name)

    def has(self, name: str) -> bool:
        name = self._name(name)
        exists = name in self.copies or name in self.added or self.base.has(name)
        return exists and name not in self.removed

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, which no edit changes."""
        name = self._name(name)
        return (self.added[name],) if name in self.added else self.base.shape(self.copies.get(name, name))

    def source_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return self.base.source_bytes()

    def read(self, name: str, start: int = 0, count: int | None = None) -> NDArray[Any]:
        """Rows after the edits, rounded once."""
        name = self._name(name)
        if not self.edits.get(name) and name not in self.copies and name not in self.added:
            return self.base.read(name, start, count).astype(self.dtype, copy=False)
        return self._values(name, start, count).astype(self.dtype)

    def groups(self, name: str, start: int = 0, count: int | None = None) -> Groups | None:
        """How untouched rows are integers."""
        name = self._name(name)
        if self.edits.get(name) or name in self.added or not isinstance(self.base, GroupSource):
            return None
        return self.base.groups(self.copies.get(name, name), start, count)

    def exact(self, name: str, start: int = 0, count: int | None = None) -> Doubles:
        """Rows after the edits, in float64."""
        return self._values(self._name(name), start, count).copy()

    def _values(self, name: str, start: int, count: int | None) -> Doubles:
        """Rows after the edits; the array may be part of the cache."""
        shape, edits = self.shape(name), self.edits.get(name, ())
        rows = shape[0] if shape else 1
        end = rows if count is None else min(start + count, rows)
        if len(shape) < 2:
            return self._vector(name, edits)[start:end]
        if any(_mixes_rows(edit) for edit in edits):
            return self._matrix(name, edits)[start:end]
        return self._rows(name, edits, np.arange(start, end))

    def _stored(self, name: str, start: int, count: int) -> Doubles:
        if name in self.added:
            return np.zeros(count)
        return self.base.read(self.copies.get(name, name), start, count).astype(np.float64)

    def _rows(self, name: str, edits: tuple[Edit, ...], places: Order) -> Doubles:
        """Single rows after edits that mix no rows."""
        if not edits:
            if not len(places):
                return np.empty((0, self.shape(name)[1]))
            cuts = np.flatnonzero(np.diff(places) != 1) + 1
            runs = np.split(places, cuts)
            return np.concatenate([self._stored(name, int(run[0]), len(run)) for run in runs])
        *before, edit = edits
        assert isinstance(edit, Along), "only vectors are filled or added to"
        if edit.axis == 1:
            return _along_columns(edit, self._rows(name, tuple(before), places))
        source, factors = _row_moves(edit, self.shape(name)[0])
        rows = self._rows(name, tuple(before), source[places])
        return rows if factors is None else rows * factors[places, None]

    def _vector(self, name: str, edits: tuple[Edit, ...]) -> Doubles:
        key = (name, edits)
        with self.kept.lock:
            if key not in self.kept.vectors:
                self.kept.vectors[key] = self._make_vector(name, edits)
            return self.kept.vectors[key]

    def _make_vector(self, name: str, edits: tuple[Edit, ...]) -> Doubles:
        values = self._stored(name, 0, (*self.shape(name), 1)[0])
        for edit in edits:
            if isinstance(edit, Fill):
                values = np.full_like(values, edit.value)
            elif isinstance(edit, AddProduct):
                values = values + edit.values()
            else:
                places = slice(None) if edit.where is None else edit.where
                values[places] = edit(values[None, places] + edit.offset)[0] - edit.offset
        return values

    def _matrix(self, name: str, edits: tuple[Edit, ...]) -> Doubles:
        key = (name, edits)
        with self.kept.lock:
            if self.kept.matrix is None or self.kept.matrix[0] != key:
                self.kept.matrix = None  # room for the next before it is made
                self.kept.matrix = (key, self._make_matrix(name, edits))
            return self.kept.matrix[1]

    def _make_matrix(self, name: str, edits: tuple[Edit, ...]) -> Doubles:
        """The whole tensor, edited in place, a slice at a time."""
        rows, columns = self.shape(name)
        values = np.empty((rows, columns))
        step = max(1, CHUNK_VALUES // columns)
        for start in range(0, rows, step):
            values[start : start + step] = self._stored(name, start, min(step, rows - start))
        for edit in edits:
            assert isinstance(edit, Along), "only vectors are filled or added to"
            if edit.axis == 1:
                for start in range(0, rows, step):
                    values[start : start + step] = _along_columns(edit, values[start : start + step])
                continue
            places = slice(None) if edit.where is None else edit.where
            width = max(1, CHUNK_VALUES // rows)
            for start in range(0, columns, width):
                part = values[places, start : start + width]
                values[places, start : start + width] = edit(np.ascontiguousarray(part.T)).T
        return values

    def with_edits(
        self,
        edits: Mapping[str, tuple[Edit, ...]],
        *,
        copies: Mapping[str, str],
        added: Mapping[str, int],
        removed: frozenset[str],
    ) -> TransformedTensors:
        """One more change on top; a new copy starts with the edits of its original."""
        merged = dict(self.edits)
        for new, old in copies.items():
            merged[new] = merged.get(old, ())
        for name, more in edits.items():
            merged[name] = (*merged.get(name, ()), *more)
        return replace(
            self,
            edits=merged,
            same={name: other for name, other in self.same.items() if name not in copies},
            copies={**self.copies, **copies},
            added={**self.added, **added},
            removed=self.removed | removed,
        )


Changed = tuple[ModelMap, TransformedTensors]  # the result of every transform


def _mixes_rows(edit: Edit) -> bool:
    return isinstance(edit, Along) and edit.axis == 0 and edit.action.mixes_channels


def _along_columns(edit: Along, rows: Doubles) -> Doubles:
    if edit.where is None:
        return edit(rows)
    rows[:, edit.where] = edit(np.ascontiguousarray(rows[:, edit.where]))
    return rows


def _row_moves(edit: Along, num_rows: int) -> tuple[Order, Doubles | None]:
    """(source of each row, factor of each row) of an edit that mixes no rows."""
    source = np.arange(num_rows)
    places = source if edit.where is None else edit.where
    if isinstance(edit.action, Permutation):
        source[places] = places[edit.action.order_I]
        return source, None
    assert isinstance(edit.action, Diagonal)
    factors = np.ones(num_rows)
    factors[places] = 1 / edit.action.factors_I if edit.inverse else edit.action.factors_I
    return source, factors
