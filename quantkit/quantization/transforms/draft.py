"""One change while it is put together: edits of tensors, and what the map says afterwards.

A layer is named by its role in the map and lies wherever its checkpoint puts it: rows of a fused matrix, or
columns of one that is stored as [in, out]. Here, and nowhere else among the transforms, that is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.model.linears import LINEARS
from quantkit.model.model_map import Embedding, Layer, ModelMap, Norm, NormKind
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import Action, Doubles, Order
from quantkit.quantization.transforms.source import AddProduct, Along, Edit, Fill, TransformedTensors

ROWS_AT_ONCE = 1024


def opened(model_map: ModelMap, source: TensorSource, dtype: Any) -> TransformedTensors:
    """The source as one that can be changed; every other name of a shared tensor leads to the one in use."""
    if isinstance(source, TransformedTensors):
        return replace(source, dtype=dtype)
    same: dict[str, str] = {}
    for table in model_map.embeddings:
        holder = table.tied_to or table.name
        same |= {f"{name}.weight": f"{holder}.weight" for name in (table.name, *table.aliases)}
    for layer in model_map.layers:
        matrix, holder = layer.matrix, layer.tied_to or layer.matrix
        same |= {f"{name}.weight": f"{holder}.weight" for name in (matrix, *layer.aliases)}
        same |= {f"{name}.bias": f"{matrix}.bias" for name in layer.aliases}
    for norm in model_map.norms:
        for name in norm.aliases:
            same |= {f"{name}.weight": f"{norm.name}.weight", f"{name}.bias": f"{norm.name}.bias"}
    return TransformedTensors(base=source, same={a: b for a, b in same.items() if a != b}, dtype=dtype)


def weight_of(layer: Layer) -> str:
    """The tensor that holds the layer's rows."""
    return f"{layer.tied_to or layer.matrix}.weight"


def is_transposed(layer: Layer) -> bool:
    """Whether the layer is stored as [in, out]."""
    return LINEARS[layer.stored_as].is_transposed


def rows_of(layer: Layer) -> Order:
    """The rows of the stored [out, in] matrix that are the layer's, in its order."""
    rows = layer.rows
    starts = rows.start + rows.stride * np.arange(rows.count)
    return (starts[:, None] + np.arange(rows.length)).reshape(-1)


def row_chunks(
    tensors: TransformedTensors, layer: Layer, size: int = ROWS_AT_ONCE, *, is_exact: bool = True
) -> Iterator[NDArray[Any]]:
    """A layer's rows as [out, in], a few at a time, however it is stored; in float64, or rounded once."""
    places, name = rows_of(layer), weight_of(layer)
    read = tensors.exact if is_exact else tensors.read
    whole_IO = read(name) if is_transposed(layer) else None
    for start in range(0, len(places), size):
        wanted = places[start : start + size]
        if whole_IO is not None:
            yield np.ascontiguousarray(whole_IO[:, wanted].T)
        else:
            runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
            parts = [read(name, int(run[0]), len(run)) for run in runs]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts)


class Draft:
    """A change in the making; `finish` gives the pair that a transform returns."""

    def __init__(self, model_map: ModelMap, source: TensorSource, dtype: Any) -> None:
        """Nothing is changed yet."""
        self.map = model_map
        self.tensors = opened(model_map, source, dtype)
        self.edits: dict[str, list[Edit]] = defaultdict(list)
        self.copies: dict[str, str] = {}
        self.added: dict[str, int] = {}
        self.removed: set[str] = set()

    def layers(self, names: Collection[str]) -> list[Layer]:
        """Layers by name."""
        return [layer for layer in self.map.layers if layer.name in names]

    def finish(self) -> tuple[ModelMap, TransformedTensors]:
        """The changed map, and the weights that change as they are read."""
        tensors = self.tensors.with_edits(
            {name: tuple(edits) for name, edits in self.edits.items()},
            copies=self.copies,
            added=self.added,
            removed=frozenset(self.removed),
        )
        return self.map, tensors

    def write(self, layer: Layer, action: Action) -> None:
        """A layer gives what the action makes of its output."""
        where = None if not layer.is_fused else rows_of(layer)
        axis = 1 if is_transposed(layer) else 0
        self.edits[weight_of(layer)].append(Along(axis=axis, action=action, where=where))
        if layer.has_bias:
            self.edits[f"{layer.matrix}.bias"].append(Along(axis=0, action=action, where=where))

    def read(self, layers: Collection[Layer], action: Action, *, inverse: bool = True) -> None:
        """Layers read what the action made; matrices that they share are changed once."""
        for matrix in dict.fromkeys(layer.matrix for layer in layers):
            sharing = [layer for layer in self.map.layers if layer.matrix == matrix]
            assert all(layer in layers for layer in sharing), f"{matrix}: not all of its rows read this"
            axis = 0 if is_transposed(sharing[0]) else 1
            edit = Along(axis=axis, action=action, inverse=inverse)
            self.edits[weight_of(sharing[0])].append(edit)

    def write_table(self, table: Embedding, action: Action) -> None:
        """A table gives what the action makes of its rows."""
        if table.tied_to is None:
            self.edits[f"{table.name}.weight"].append(Along(axis=1, action=action))

    def write_norm(self, norm: Norm, action: Action) -> None:
        """A norm gives what the action makes of its output, gain and bias alike."""
        offset = self.map.norm_gain_offset
        self.edits[f"{norm.name}.weight"].append(Along(axis=0, action=action, offset=offset))
        if norm.num_parameters > norm.features:
            self.edits[f"{norm.name}.bias"].append(Along(axis=0, action=action))

    def set_norm(self, norm: Norm, *, as_rms: bool) -> None:
        """A norm without gain or bias, and without centring if its writers do that."""
        self.edits[f"{norm.name}.weight"].append(Fill(value=1.0 - self.map.norm_gain_offset))
        if norm.num_parameters > norm.features:
            if as_rms:
                self.removed.add(f"{norm.name}.bias")
            else:
                self.edits[f"{norm.name}.bias"].append(Fill(value=0.0))
        if as_rms:
            changed = replace(norm, kind=NormKind.RMS_NORM, num_parameters=norm.features)
            norms = tuple(changed if each.name == norm.name else each for each in self.map.norms)
            saved = norm.num_parameters - norm.features
            self.map = replace(self.map, norms=norms, num_parameters=self.map.num_parameters - saved)

    def add_to_bias(self, layers: Collection[Layer], vector_I: Doubles) -> None:
        """What a norm's bias gives through each matrix, which gets a bias if it had none."""
        for matrix in dict.fromkeys(layer.matrix for layer in layers):
            layer = next(each for each in self.map.layers if each.matrix == matrix)
            name = f"{matrix}.bias"
            product = AddProduct(
                tensors=self.tensors,
                weight=weight_of(layer),
                is_transposed=is_transposed(layer),
                vector_I=vector_I,
            )
            self.edits[name].append(product)
            if not layer.has_bias:
                sharing = [each for each in self.map.layers if each.matrix == matrix]
                self.added[name] = sum(each.out_features for each in sharing)
                self._replace_layers({each.name: replace(each, has_bias=True) for each in sharing})
                self.map = replace(self.map, num_parameters=self.map.num_parameters + self.added[name])

    def untie_head(self) -> None:
        """Weights of its own for a head that shared the token table."""
        for layer in self.map.layers:
            if layer.tied_to:
                self.copies[f"{layer.matrix}.weight"] = f"{layer.tied_to}.weight"
                self._replace_layers({layer.name: replace(layer, tied_to=None)})
                self.map = replace(self.map, num_parameters=self.map.num_parameters + layer.num_weights)
        self.map = replace(self.map, has_tied_head=False)

    def _replace_layers(self, changed: dict[str, Layer]) -> None:
        layers = tuple(changed.get(layer.name, layer) for layer in self.map.layers)
        self.map = replace(self.map, layers=layers)
