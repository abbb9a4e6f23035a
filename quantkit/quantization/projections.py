"""Weights and biases of a projection, however the checkpoint stores it.

A projection is rows of a stored matrix, or columns of one that is stored as [in, out]; the rows of query, key
and value may alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.model.linears import LINEARS
from quantkit.model.model_map import Layer, Norm, Rows
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.layout import run_starts

ROWS_AT_ONCE = 1024
Read = Callable[..., NDArray[Any]]  # name, first row, number of rows -> rows


def weight_name(layer: Layer) -> str:
    """The checkpoint's tensor that holds the projection."""
    return f"{layer.tied_to or layer.matrix}.weight"


def gain_of(source: TensorSource, norm: Norm, offset: float) -> NDArray[np.float32]:
    """The whole gain of a norm; ones where it has no weights."""
    if not norm.num_parameters:
        return np.ones(norm.features, np.float32)
    gain_I: NDArray[np.float32] = source.read(f"{norm.name}.weight").reshape(-1) + np.float32(offset)
    return gain_I


def is_transposed(layer: Layer) -> bool:
    """Whether the layer is stored as [in, out]."""
    return LINEARS[layer.stored_as].is_transposed


def runs_of(layer: Layer, step: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of every run of the projection's rows in the stored matrix, cut to `step`."""
    for first in run_starts(layer.rows):
        for start in range(first, first + layer.rows.length, step):
            yield start, min(step, first + layer.rows.length - start)


def rows_of(rows: Rows) -> NDArray[np.int64]:
    """Indices of a projection's rows in its stored matrix [out, in], in the projection's order."""
    return (np.array(run_starts(rows))[:, None] + np.arange(rows.length)).reshape(-1)


def weight_of(tensors: TensorSource, layer: Layer) -> NDArray[np.float32]:
    """The weight [O, I] of a projection."""
    stored = tensors.read(weight_name(layer))
    stored_OI = stored.T if is_transposed(layer) else stored
    return stored_OI[rows_of(layer.rows)] if layer.is_fused else stored_OI


def bias_of(tensors: TensorSource, layer: Layer) -> NDArray[np.float32]:
    """The bias [O] of a projection; zeros where it has none."""
    if not layer.has_bias:
        return np.zeros(layer.out_features, np.float32)
    return tensors.read(f"{layer.matrix}.bias")[rows_of(layer.rows)]


def row_chunks(read: Read, layer: Layer, size: int = ROWS_AT_ONCE) -> Iterator[NDArray[Any]]:
    """The weight [O, I] of a projection, some rows at a time."""
    rows, name = rows_of(layer.rows), weight_name(layer)
    whole_IO = read(name) if is_transposed(layer) else None
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        if whole_IO is not None:
            yield np.ascontiguousarray(whole_IO[:, chunk].T)
        else:
            runs = np.split(chunk, np.flatnonzero(np.diff(chunk) != 1) + 1)
            parts = [read(name, int(run[0]), len(run)) for run in runs]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts)
