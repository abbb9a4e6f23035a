"""Hidden units of an FFN that no input can ever wake, and a model without them.

"Never active on this text" is an observation; these are proofs. A unit is silent if its key is zero, since
every known curve takes zero to zero, or if a ReLU stands behind a bound below zero: a norm's output is no
longer than the root of its width (and has no mean, for LayerNorm), which by Cauchy and Schwarz bounds each
product with it. A unit is unread if its value is zero. Either kind adds exactly nothing, so that leaving it
out changes no result. FFNs as keys and values: https://arxiv.org/abs/2012.14913
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import Activation, Block, FfnKind, Layer, ModelMap, Norm, NormKind, Role, Rows
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.draft import is_transposed, rows_of, weight_of

# Letters: H hidden units, I channels that they read.
Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]
MARGIN = 1e-5  # of the sizes in a bound, by which it must be below zero


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadUnits:
    """What is proved of one block's hidden units."""

    silent_H: Flags  # their activation is zero whatever is read
    unread_H: Flags  # their value is zero

    @property
    def any_H(self) -> Flags:
        """Units that add exactly nothing."""
        both: Flags = self.silent_H | self.unread_H
        return both


def dead_units(model_map: ModelMap, tensors: TensorSource, block: Block) -> DeadUnits | None:
    """What can be proved of a block's FFN; None where it is not one way up and one way down."""
    parts = _parts(model_map, block)
    if parts is None or block.ffn is None or block.ffn.activation is Activation.OTHER:
        return None
    keys, down = parts
    silent_H = np.zeros(block.ffn.hidden_features, np.bool_)
    for layer in keys.values():
        silent_H |= _is_zero(_weight_OI(tensors, layer), _bias(tensors, layer))
    if block.ffn.activation is Activation.RELU:
        curved = keys[Role.FFN_GATE if block.ffn.kind is FfnKind.GATED else Role.FFN_UP]
        silent_H |= _never_fires(model_map, tensors, curved)
    unread_H = np.all(_weight_OI(tensors, down) == 0, axis=0)
    return DeadUnits(silent_H=silent_H, unread_H=np.asarray(unread_H))


def _parts(model_map: ModelMap, block: Block) -> tuple[dict[Role, Layer], Layer] | None:
    members = [layer for layer in model_map.layers if layer.block == block.name]
    keys = [layer for layer in members if layer.role in (Role.FFN_GATE, Role.FFN_UP)]
    downs = [layer for layer in members if layer.role is Role.FFN_DOWN]
    roles = {layer.role: layer for layer in keys}
    is_plain = len(downs) == 1 and len(roles) == len(keys) and Role.FFN_UP in roles
    return (roles, downs[0]) if is_plain else None


def _weight_OI(tensors: TensorSource, layer: Layer) -> Doubles:
    """A projection's own rows, whatever is fused with it and whichever way round it is stored."""
    stored = np.asarray(tensors.read(weight_of(layer)), np.float64)
    stored_OI = stored.T if is_transposed(layer) else stored
    return stored_OI[rows_of(layer)] if layer.is_fused else stored_OI


def _bias(tensors: TensorSource, layer: Layer) -> Doubles:
    if not layer.has_bias:
        return np.zeros(layer.out_features)
    return np.asarray(tensors.read(f"{layer.matrix}.bias"), np.float64)[rows_of(layer)]


def _is_zero(weight_HI: Doubles, bias_H: Doubles) -> Flags:
    zero_H: Flags = ~weight_HI.any(1) & (bias_H == 0)
    return zero_H


def _never_fires(model_map: ModelMap, tensors: TensorSource, layer: Layer) -> Flags:
    """Units whose input to a ReLU stays below zero for everything that the norms before it can give."""
    norms = [norm for norm in model_map.norms if layer.matrix in norm.feeds]
    weight_HI, bias_H = _weight_OI(tensors, layer), _bias(tensors, layer)
    bounds = [_bound(model_map, tensors, norm, weight_HI, bias_H) for norm in norms]
    if not bounds or any(norm.features != layer.in_features for norm in norms):
        return np.zeros(layer.out_features, np.bool_)
    below: Flags = np.all(bounds, axis=0)
    return below


def _bound(
    model_map: ModelMap, tensors: TensorSource, norm: Norm, weight_HI: Doubles, bias_H: Doubles
) -> Flags:
    gain_I = model_map.norm_gain_offset + np.asarray(tensors.read(f"{norm.name}.weight"), np.float64)
    shift = f"{norm.name}.bias"
    scaled_HI = weight_HI * gain_I
    if norm.kind is NormKind.LAYER_NORM:
        scaled_HI = scaled_HI - scaled_HI.mean(1, keepdims=True)
    reach_H = np.sqrt(norm.features) * np.linalg.norm(scaled_HI, axis=1)
    rest_H = bias_H.copy()
    if norm.kind is NormKind.LAYER_NORM and tensors.has(shift):
        rest_H += weight_HI @ np.asarray(tensors.read(shift), np.float64)
    below: Flags = reach_H + rest_H < -MARGIN * (reach_H + np.abs(rest_H))
    return below


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunedTensors:
    """Another source of tensors without some of their rows or columns."""

    source: TensorSource
    kept: Mapping[str, tuple[int, NDArray[np.int64]]]  # tensor -> (axis, what is left of it)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that is left."""
        shape = list(self.source.shape(name))
        if name in self.kept:
            axis, kept = self.kept[name]
            shape[axis] = len(kept)
        return tuple(shape)

    def has(self, name: str) -> bool:
        """Whether it is there."""
        return self.source.has(name)

    def read(self, name: str, start: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """Rows of what is left, as float32."""
        if name not in self.kept:
            return self.source.read(name, start, count)
        axis, kept = self.kept[name]
        if axis == 1:
            return np.ascontiguousarray(self.source.read(name, start, count)[:, kept])
        wanted = kept[start:] if count is None else kept[start : start + count]
        if not len(wanted):
            return self.source.read(name, 0, 0)
        first, last = int(wanted[0]), int(wanted[-1])
        return np.ascontiguousarray(self.source.read(name, first, last - first + 1)[wanted - first])

    def source_bytes(self) -> int:
        """Bytes of the tensors as they were."""
        return self.source.source_bytes()


def prune_dead(model_map: ModelMap, tensors: TensorSource) -> tuple[ModelMap, TensorSource]:
    """The model without units that are proved to add nothing.

    Fused matrices stay as they are, and so do FFNs whose hidden units a latent reads too.
    """
    kept: dict[str, tuple[int, NDArray[np.int64]]] = {}
    layers = {layer.name: layer for layer in model_map.layers}
    blocks = []
    for block in model_map.blocks:
        parts, found = _parts(model_map, block), dead_units(model_map, tensors, block)
        if parts is None or found is None or not found.any_H.any():
            blocks.append(block)
            continue
        keys, down = parts
        alive = np.flatnonzero(~found.any_H)
        alive = alive if len(alive) else np.array([0])  # a matrix of no rows is none
        latents = [
            each for each in model_map.layers if each.block == block.name and each.role is Role.FFN_LATENT
        ]
        if latents or any(layer.is_fused for layer in (*keys.values(), down)):
            blocks.append(block)
            continue
        for layer in keys.values():
            kept[weight_of(layer)] = (1 if is_transposed(layer) else 0, alive)
            kept |= {f"{layer.matrix}.bias": (0, alive)} if layer.has_bias else {}
            rows = Rows(start=0, length=len(alive), stride=len(alive))
            layers[layer.name] = replace(layer, out_features=len(alive), rows=rows)
        kept[weight_of(down)] = (0 if is_transposed(down) else 1, alive)
        layers[down.name] = replace(down, in_features=len(alive))
        assert block.ffn is not None
        blocks.append(replace(block, ffn=replace(block.ffn, hidden_features=len(alive))))
    lost = sum(
        before.num_new_parameters - layers[before.name].num_new_parameters for before in model_map.layers
    )
    pruned = replace(
        model_map,
        layers=tuple(layers.values()),
        blocks=tuple(blocks),
        num_parameters=model_map.num_parameters - lost,
    )
    return pruned, PrunedTensors(source=tensors, kept=kept)
