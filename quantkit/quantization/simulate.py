"""A quantized checkpoint back in torch, as modules that compute with the values its codes stand for.

For checking and not for speed: every weight is what the integers mean, and the input of each product is
rounded as the runtime rounds it, so that the exported graph and this model differ by float summation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.model.model_map import Role, Rows
from quantkit.plan.formats import Format, Grid
from quantkit.quantization.layout import Checkpoint

LARGEST_CODE = 127
NUM_UNSIGNED_STEPS = 255
SMALLEST_PEAK = 1e-20


def fake_quantize(module: nn.Module, checkpoint: Checkpoint, *, rounds_inputs: bool = True) -> nn.Module:
    """Put the checkpoint's values into a torch model of the same architecture, in place."""
    from quantkit.model.linears import weight_OI
    from quantkit.model.names import modules_by_name

    described = checkpoint.description
    parents: dict[str, Any] = dict(modules_by_name(module))
    tied = {layer["tied_to"] for pack in described["packs"] for layer in pack["layers"]} - {None}
    for pack in described["packs"]:
        values = None if pack["table"] else torch.from_numpy(pack_values(checkpoint, pack))
        done = 0
        for layer in pack["layers"]:
            linear = parents[layer["matrix"]]
            count = layer["out_features"]
            if values is not None:
                with torch.no_grad():
                    target = weight_OI(linear, layer["stored_as"])
                    target[rows_of(Rows(**layer["rows"]))] = values[done : done + count].to(target.dtype)
            done += count
            if pack["grid"] and rounds_inputs and not hasattr(linear, "_rounds_inputs"):
                linear._rounds_inputs = True
                linear.register_forward_pre_hook(hook_of(_rounding(checkpoint, pack)))
    for table in described["tables"]:
        if table["grid"] and table["name"] not in tied:
            embedding: Any = parents[table["name"]]
            with torch.no_grad():
                values_VI = checkpoint.weight_OI(
                    table["name"], Grid(**table["grid"]), embedding.weight.shape[1]
                )
                embedding.weight.copy_(torch.from_numpy(values_VI))
    return module


def _groups(layer: Mapping[str, Any]) -> int:
    """Blocks of a block-diagonal weight, which are stored one above the other."""
    return int(layer.get("num_groups", 1))


def pack_values(checkpoint: Checkpoint, pack: Mapping[str, Any]) -> NDArray[np.float32]:
    """The weights of a pack as [out, in], whatever grid and layout they are stored in."""
    groups = _groups(pack["layers"][0])
    columns = pack["layers"][0]["in_features"] // groups
    if groups > 1:
        rows_GZZ = _stored_values(checkpoint, pack, columns).reshape(groups, columns, columns)
        weight_GZGZ = np.zeros((groups, columns, groups, columns), np.float32)
        weight_GZGZ[np.arange(groups), :, np.arange(groups)] = rows_GZZ
        return weight_GZGZ.reshape(groups * columns, groups * columns)
    return _stored_values(checkpoint, pack, columns)


def _stored_values(checkpoint: Checkpoint, pack: Mapping[str, Any], columns: int) -> NDArray[np.float32]:
    name = pack["name"]
    if pack["grid"] is None:
        return np.ascontiguousarray(checkpoint.read(f"{name}.weight_IO").T)
    return checkpoint.weight_OI(name, Grid(**pack["grid"]), columns)


def rows_of(rows: Rows) -> Tensor:
    """The indices of a projection's rows in the matrix that stores it."""
    starts = [rows.start + part * rows.stride for part in range(rows.count)]
    return torch.cat([torch.arange(start, start + rows.length) for start in starts])


def hook_of(rounding: Callable[[Tensor], Tensor]) -> Any:
    """A hook that changes what a module reads."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, *rest = inputs
        return (rounding(first), *rest)

    return hook


def _rounding(checkpoint: Checkpoint, pack: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """How the runtime rounds what the pack reads."""
    chosen, name, fixed = (
        Format(grid=Grid(**pack["grid"]), activations=pack["activations"]),
        pack["name"],
        None,
    )
    if chosen.is_static:
        fixed = float(checkpoint.read(f"{name}.input_scale")), int(checkpoint.read(f"{name}.input_zero"))
    rounding, groups = rounding_of(chosen, Role(pack["layers"][0]["role"]), fixed), _groups(pack["layers"][0])
    if groups == 1:
        return rounding
    return lambda x: rounding(x.reshape(*x.shape[:-1], groups, -1)).reshape(x.shape)


def rounding_of(chosen: Format, role: Role, fixed: tuple[float, int] | None) -> Callable[[Tensor], Tensor]:
    """How the runtime rounds what a projection of this format and role reads; `fixed` is scale and zero."""
    if chosen.input_bits and fixed:
        return partial(round_static, scale=fixed[0], zero=fixed[1], bits=chosen.input_bits)
    if chosen.grid.block:
        return partial(round_blocks, block=chosen.grid.block)
    return round_tokens if chosen.scales_tokens(role) else round_tensor


def round_static(x: Tensor, *, scale: float, zero: int, bits: int) -> Tensor:
    """Unsigned integers in a range that was fixed before."""
    codes = ((x / scale).round() + zero).clamp(0, (1 << bits) - 1)
    return (codes - zero) * scale


def round_tokens(x: Tensor) -> Tensor:
    """As a tensor, after every token was divided by its largest value."""
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
    """Asymmetric UINT8 with one scale for the whole tensor, zero always representable."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / NUM_UNSIGNED_STEPS
    zero = (-low / scale).round().clamp(0, NUM_UNSIGNED_STEPS)
    return ((x / scale).round() + zero).clamp(0, NUM_UNSIGNED_STEPS).sub(zero) * scale
