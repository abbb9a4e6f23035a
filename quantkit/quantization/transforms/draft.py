"""A change being put together: edits of stored tensors, and the changed map.

The map names a layer by its role; the checkpoint stores it as rows of a fused matrix, or as columns of one
that is [in, out]. Among the transforms only this file knows about storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.model.model_map import Layer, ModelMap, Norm, NormKind
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.grid import Doubles
from quantkit.quantization.projections import is_transposed, rows_of, weight_name
from quantkit.quantization.transforms.basis import Action
from quantkit.quantization.transforms.source import AddProduct, Along, Changed, Edit, Fill, TransformedTensors


def opened(model_map: ModelMap, source: TensorSource, dtype: Any = np.float32) -> TransformedTensors:
    """The source as one that can be changed; all names of a shared tensor lead to the one in use."""
    if isinstance(source, TransformedTensors):
        return source
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


class Draft:
    """A change in the making; `finish` returns the changed map and tensors."""

    def __init__(self, model_map: ModelMap, source: TensorSource) -> None:
        self.map = model_map
        self.tensors = opened(model_map, source)
        self.edits: dict[str, list[Edit]] = defaultdict(list)
        self.copies: dict[str, str] = {}
        self.added: dict[str, int] = {}
        self.removed: set[str] = set()

    def layers(self, names: Collection[str]) -> list[Layer]:
        return [layer for layer in self.map.layers if layer.name in names]

    def finish(self) -> Changed:
        tensors = self.tensors.with_edits(
            {name: tuple(edits) for name, edits in self.edits.items()},
            copies=self.copies,
            added=self.added,
            removed=frozenset(self.removed),
        )
        return self.map, tensors

    def write(self, names: Collection[str], action: Action) -> None:
        """Apply the action to the output of these layers, tables and norms."""
        for layer in self.layers(names):
            where = rows_of(layer.rows) if layer.is_fused else None
            axis = 1 if is_transposed(layer) else 0
            self.edits[weight_name(layer)].append(Along(axis=axis, action=action, where=where))
            if layer.has_bias:
                self.edits[f"{layer.matrix}.bias"].append(Along(axis=0, action=action, where=where))
        for table in self.map.embeddings:
            if table.name in names and table.tied_to is None:
                self.edits[f"{table.name}.weight"].append(Along(axis=1, action=action))
        for norm in self.map.norms:
            if norm.name in names and norm.num_parameters:
                gain = Along(axis=0, action=action, offset=self.map.norm_gain_offset)
                self.edits[f"{norm.name}.weight"].append(gain)
                if norm.num_parameters > norm.features:
                    self.edits[f"{norm.name}.bias"].append(Along(axis=0, action=action))

    def read(self, names: Collection[str], action: Action, *, inverse: bool = True) -> None:
        """Apply the action to the input of these layers.

        A matrix that several of them share is changed once. A tied head reads a table that is written.
        """
        for sharing in self._matrices(names):
            first = sharing[0]
            assert all(layer.name in names for layer in sharing), f"{first.matrix}: not all rows read this"
            if not first.tied_to:
                axis = 0 if is_transposed(first) else 1
                self.edits[weight_name(first)].append(Along(axis=axis, action=action, inverse=inverse))

    def _matrices(self, names: Collection[str]) -> list[list[Layer]]:
        """The projections of each matrix that holds one of these layers."""
        matrices = dict.fromkeys(layer.matrix for layer in self.layers(names))
        return [[layer for layer in self.map.layers if layer.matrix == matrix] for matrix in matrices]

    def add_input_factors(self, names: Collection[str]) -> None:
        """Multiply the input that these layers share by a vector, which starts as ones."""
        layers = self.layers(names)
        if layers[0].input_factors:
            return
        vector, width = f"{layers[0].matrix}.input_factors", layers[0].in_features
        self.added[vector] = width
        self.edits[vector].append(Fill(value=1.0))
        self._replace_layers({layer.name: replace(layer, input_factors=vector) for layer in layers})
        self.map = replace(self.map, num_parameters=self.map.num_parameters + width)

    def write_input_factors(self, names: Collection[str], action: Action) -> None:
        """Apply the action to the factors of these layers' inputs, where they have any."""
        for vector in dict.fromkeys(layer.input_factors for layer in self.layers(names)):
            if vector:
                self.edits[vector].append(Along(axis=0, action=action))

    def set_norm(self, norm: Norm, *, as_rms: bool) -> None:
        """Remove a norm's gain and bias, and its centring if its writers do that."""
        self.edits[f"{norm.name}.weight"].append(Fill(value=1.0 - self.map.norm_gain_offset))
        if norm.num_parameters > norm.features:
            if as_rms:
                self.removed.add(f"{norm.name}.bias")
            else:
                self.edits[f"{norm.name}.bias"].append(Fill(value=0.0))
        if as_rms:
            changed = replace(norm, kind=NormKind.RMS_NORM, num_parameters=norm.features)
            norms = tuple(changed if old.name == norm.name else old for old in self.map.norms)
            saved = norm.num_parameters - norm.features
            self.map = replace(self.map, norms=norms, num_parameters=self.map.num_parameters - saved)

    def add_to_bias(self, names: Collection[str], vector_I: Doubles) -> None:
        """Add the product of each matrix and a norm's bias to the matrix's bias, or give it one."""
        for sharing in self._matrices(names):
            layer, name = sharing[0], f"{sharing[0].matrix}.bias"
            product = AddProduct(
                tensors=self.tensors,
                weight=weight_name(layer),
                is_transposed=is_transposed(layer),
                vector_I=vector_I,
            )
            self.edits[name].append(product)
            if not layer.has_bias:
                self.added[name] = sum(part.out_features for part in sharing)
                self._replace_layers({part.name: replace(part, has_bias=True) for part in sharing})
                self.map = replace(self.map, num_parameters=self.map.num_parameters + self.added[name])

    def untie_head(self) -> None:
        """Give a head that shares the token table weights of its own."""
        for layer in self.map.layers:
            if layer.tied_to:
                self.copies[f"{layer.matrix}.weight"] = f"{layer.tied_to}.weight"
                self._replace_layers({layer.name: replace(layer, tied_to=None)})
                self.map = replace(self.map, num_parameters=self.map.num_parameters + layer.num_weights)
        self.map = replace(self.map, has_tied_head=False)

    def _replace_layers(self, changed: dict[str, Layer]) -> None:
        layers = tuple(changed.get(layer.name, layer) for layer in self.map.layers)
        self.map = replace(self.map, layers=layers)
