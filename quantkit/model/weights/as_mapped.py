"""Weights as the map describes them.

A convolution of patches is stored as [out, channels, height, width] and read as [out, in]. A parameter that
scales the outputs of a projection (the layer scale of https://arxiv.org/abs/2103.17239) is multiplied into
its rows and bias, and read as ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quantkit.model.linears import PATCHES
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import Floats, TensorSource


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensors:
    """Tensors of a checkpoint, some of them in another form."""

    stored: TensorSource
    patches: frozenset[str]  # weights of convolutions
    factors: Mapping[str, str]  # weight or bias -> the parameter that scales its rows

    def has(self, name: str) -> bool:
        return self.stored.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.stored.shape(name)
        return (shape[0], math.prod(shape[1:])) if name in self.patches else shape

    def source_bytes(self) -> int:
        return self.stored.source_bytes()

    def read(self, name: str, start: int = 0, count: int | None = None) -> Floats:
        values = self.stored.read(name, start, count)
        if name in self.patches:
            return values.reshape(len(values), -1)
        if name in self.factors.values():
            return np.ones_like(values)
        if name not in self.factors:
            return values
        factors_O = self.stored.read(self.factors[name], start, len(values))
        scaled: Floats = values * factors_O.reshape(-1, *[1] * (values.ndim - 1))
        return scaled


def as_mapped(tensors: TensorSource, model_map: ModelMap) -> TensorSource:
    """The tensors in the form that the map describes."""
    patches = frozenset(f"{layer.matrix}.weight" for layer in model_map.layers if layer.stored_as == PATCHES)
    factors = {
        f"{layer.matrix}.{part}": layer.output_factors
        for layer in model_map.layers
        for part in ("weight", "bias")
        if layer.output_factors
    }
    if not patches and not factors:
        return tensors
    return MappedTensors(stored=tensors, patches=patches, factors=factors)
