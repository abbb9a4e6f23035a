"""Dead hidden units of an FFN: units that add exactly nothing, whatever the input.

"Never active on this text" is an observation; these are proofs. A unit is silent if its key is zero, since
every known activation maps zero to zero, or if its input to a ReLU has a bound below zero: a norm's output is
no longer than the root of its width (and has no mean, for LayerNorm), which by Cauchy and Schwarz bounds each
product with it. A unit is unread if its value is zero. FFNs as keys and values:
https://arxiv.org/abs/2012.14913
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import Activation, Block, FfnKind, Layer, ModelMap, Norm, NormKind, Role
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.grid import Doubles
from quantkit.quantization.projections import bias_of, gain_of, weight_of

# Letters: H hidden units, I channels that they read.
Flags = NDArray[np.bool_]
MARGIN = 1e-5  # of the sizes in a bound, by which it must be below zero


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadUnits:
    """The dead hidden units of one block."""

    silent_H: Flags  # their activation is zero whatever is read
    unread_H: Flags  # their value is zero

    @property
    def any_H(self) -> Flags:
        dead_H: Flags = self.silent_H | self.unread_H
        return dead_H


def dead_units(model_map: ModelMap, tensors: TensorSource, block: Block) -> DeadUnits | None:
    """The dead units of a block; None where its FFN is not one up and one down projection."""
    parts = _parts(model_map, block)
    if parts is None or block.ffn is None or block.ffn.activation is Activation.OTHER:
        return None
    keys, down = parts
    silent_H = np.zeros(block.ffn.hidden_features, np.bool_)
    for layer in keys.values():
        silent_H |= _is_zero(weight_of(tensors, layer), bias_of(tensors, layer))
    if block.ffn.activation in (Activation.RELU, Activation.RELU_SQUARED):
        curved = keys[Role.FFN_GATE if block.ffn.kind is FfnKind.GATED else Role.FFN_UP]
        silent_H |= _never_fires(model_map, tensors, curved)
    unread_H = np.all(weight_of(tensors, down) == 0, axis=0)
    return DeadUnits(silent_H=silent_H, unread_H=np.asarray(unread_H))


def _parts(model_map: ModelMap, block: Block) -> tuple[dict[Role, Layer], Layer] | None:
    members = [layer for layer in model_map.layers if layer.block == block.name]
    keys = [layer for layer in members if layer.role in (Role.FFN_GATE, Role.FFN_UP)]
    downs = [layer for layer in members if layer.role is Role.FFN_DOWN]
    roles = {layer.role: layer for layer in keys}
    is_plain = len(downs) == 1 and len(roles) == len(keys) and Role.FFN_UP in roles
    return (roles, downs[0]) if is_plain else None


def _is_zero(weight_HI: NDArray[np.float32], bias_H: NDArray[np.float32]) -> Flags:
    zero_H: Flags = ~weight_HI.any(1) & (bias_H == 0)
    return zero_H


def _never_fires(model_map: ModelMap, tensors: TensorSource, layer: Layer) -> Flags:
    """Units whose input to a ReLU stays below zero for everything that the norms before it can give."""
    norms = [norm for norm in model_map.norms if layer.matrix in norm.feeds]
    weight_HI = weight_of(tensors, layer).astype(np.float64)
    bias_H = bias_of(tensors, layer).astype(np.float64)
    bounds = [_bound(model_map, tensors, norm, weight_HI, bias_H) for norm in norms]
    if not bounds or any(norm.features != layer.in_features for norm in norms):
        return np.zeros(layer.out_features, np.bool_)
    below: Flags = np.all(bounds, axis=0)
    return below


def _bound(
    model_map: ModelMap, tensors: TensorSource, norm: Norm, weight_HI: Doubles, bias_H: Doubles
) -> Flags:
    gain_I = gain_of(tensors, norm, model_map.norm_gain_offset).astype(np.float64)
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
