"""A quantized checkpoint in torch: modules that compute with the decoded weights and rounded inputs.

For checking and not for speed: every weight is the value of its integer, and the input of each pack is
rounded as the runtime rounds it, so that the exported graph and this model differ by float summation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.model.linears import weight_OI
from quantkit.model.model_map import Role, Rows
from quantkit.plan.formats import Format, Grid
from quantkit.quantization.grid import Floats
from quantkit.quantization.layout import Checkpoint, rows_of
from quantkit.quantization.modules import named_modules

LARGEST_CODE = 127
NUM_UNSIGNED_STEPS = 255
SMALLEST_PEAK = 1e-20
Rounding = Callable[[Tensor], Tensor]


def fake_quantize(module: nn.Module, checkpoint: Checkpoint, *, rounds_inputs: bool = True) -> nn.Module:
    """Put the checkpoint's values into a torch model of the same architecture, in place."""
    described = checkpoint.description
    modules = named_modules(module, described["model_type"])
    tied = {layer["tied_to"] for pack in described["packs"] for layer in pack["layers"]} - {None}
    rounded: set[nn.Module] = set()
    for pack in described["packs"]:
        values = None if pack["table"] else torch.from_numpy(pack_values(checkpoint, pack))
        row = 0
        for layer in pack["layers"]:
            linear = modules[layer["matrix"]]
            count = layer["out_features"]
            if values is not None:
                with torch.no_grad():
                    target = weight_OI(linear, layer["stored_as"])
                    target[rows_of(Rows(**layer["rows"]))] = values[row : row + count].to(target.dtype)
            row += count
            if pack["grid"] and rounds_inputs and linear not in rounded:
                rounded.add(linear)
                linear.register_forward_pre_hook(input_hook(_rounding_of_pack(checkpoint, pack)))
    for table in described["tables"]:
        if table["grid"] and table["name"] not in tied:
            embedding: Any = modules[table["name"]]
            with torch.no_grad():
                columns = embedding.weight.shape[1]
                values_VI = checkpoint.weight_OI(table["name"], Grid(**table["grid"]), columns)
                embedding.weight.copy_(torch.from_numpy(values_VI))
    return module


def _num_groups(pack: Mapping[str, Any]) -> int:
    """Blocks of a block-diagonal weight, which are stored one above the other."""
    return int(pack["layers"][0].get("num_groups", 1))


def pack_values(checkpoint: Checkpoint, pack: Mapping[str, Any]) -> Floats:
    """The weights of a pack as [out, in], whatever grid and layout they are stored in."""
    name, groups = pack["name"], _num_groups(pack)
    columns = pack["layers"][0]["in_features"] // groups
    if pack["grid"] is None:
        stored_OI = np.ascontiguousarray(checkpoint.read(f"{name}.weight_IO").T)
    else:
        stored_OI = checkpoint.weight_OI(name, Grid(**pack["grid"]), columns)
    if groups == 1:
        return stored_OI
    weight_GZGZ = np.zeros((groups, columns, groups, columns), np.float32)
    weight_GZGZ[np.arange(groups), :, np.arange(groups)] = stored_OI.reshape(groups, columns, columns)
    return weight_GZGZ.reshape(groups * columns, groups * columns)


def input_hook(rounding: Rounding) -> Any:
    """A forward pre-hook that rounds the input of a module."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, *rest = inputs
        return (rounding(first), *rest)

    return hook


def _rounding_of_pack(checkpoint: Checkpoint, pack: Mapping[str, Any]) -> Rounding:
    chosen, name, fixed = (
        Format(grid=Grid(**pack["grid"]), activations=pack["activations"]),
        pack["name"],
        None,
    )
    if chosen.is_static:
        fixed = float(checkpoint.read(f"{name}.input_scale")), int(checkpoint.read(f"{name}.input_zero"))
    rounding, groups = rounding_of(chosen, Role(pack["layers"][0]["role"]), fixed), _num_groups(pack)
    if groups == 1:
        return rounding
    return lambda x: rounding(x.reshape(*x.shape[:-1], groups, -1)).reshape(x.shape)


def rounding_of(chosen: Format, role: Role, fixed: tuple[float, int] | None) -> Rounding:
    """The runtime's rounding of inputs for this format and role; `fixed` is a calibrated scale and zero."""
    if chosen.input_bits and fixed:
        return partial(round_static, scale=fixed[0], zero=fixed[1], bits=chosen.input_bits)
    if chosen.grid.block:
        return partial(round_blocks, block=chosen.grid.block)
    return round_tokens if chosen.scales_tokens(role) else round_tensor


def round_static(x: Tensor, *, scale: float, zero: int, bits: int) -> Tensor:
    """Unsigned integers in a calibrated range."""
    codes = ((x / scale).round() + zero).clamp(0, (1 << bits) - 1)
    return (codes - zero) * scale


def round_tokens(x: Tensor) -> Tensor:
    """As `round_tensor`, after every token was divided by its largest value."""
    peaks = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    return round_tensor(x / peaks) * peaks


def round_blocks(x: Tensor, block: int) -> Tensor:
    """Symmetric INT8 with one scale for each block of the last dimension."""
    width = x.shape[-1]
    padded = nn.functional.pad(x, (0, -width % block))
    blocks = padded.reshape(*padded.shape[:-1], -1, block)
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST_CODE
    rounded = torch.where(scales > 0, (blocks / scales).round() * scales, torch.zeros_like(blocks))
    return rounded.flatten(-2)[..., :width]


def round_tensor(x: Tensor) -> Tensor:
    """Asymmetric UINT8 with one scale for the whole tensor; zero is always on the grid."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / NUM_UNSIGNED_STEPS
    zero = (-low / scale).round().clamp(0, NUM_UNSIGNED_STEPS)
    return ((x / scale).round() + zero).clamp(0, NUM_UNSIGNED_STEPS).sub(zero) * scale
