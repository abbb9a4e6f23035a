"""The oracle of exported graphs: a quantized checkpoint in torch, with decoded weights and rounded inputs.

Every weight is the value of its integer, and the input of each pack is rounded as the runtime rounds it, so
that the exported graph and this model differ by float summation alone.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

from quantkit.model.experts import with_separate_experts
from quantkit.model.linears import weight_OI
from quantkit.model.model_map import Role, Rows
from quantkit.model.names import checkpoint_name, family_of_module, modules_by_name
from quantkit.plan.formats import Format, Grid
from quantkit.quantization.layout import Checkpoint
from quantkit.quantization.projections import rows_of
from quantkit.quantization.simulate import beside_outliers, input_hook, rounding_of


def fake_quantize(module: nn.Module, checkpoint: Checkpoint, *, rounds_inputs: bool = True) -> nn.Module:
    """Put the checkpoint's values into a torch model of the same architecture, in place."""
    with_separate_experts(module)
    described = checkpoint.description
    modules = modules_by_name(module)
    tied = {layer["tied_to"] for pack in described["packs"] for layer in pack["layers"]} - {None}
    # Rows of distances are products of weights alone: a runtime computes them once and rounds nothing.
    family = family_of_module(module)
    table = getattr(family, "distance_table", None)
    unrounded = {child.num_embeddings for name, child in modules.items() if table and name.endswith(table)}
    rounded: set[nn.Module] = set()
    scaled: set[nn.Module] = set()
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
            if layer["output_factors"] and linear not in scaled:
                scaled.add(linear)
                take_in(linear, module.get_parameter(live_name(module, layer["output_factors"])))
            if layer["input_factors"] and linear not in scaled:
                scaled.add(linear)
                factors_I = torch.from_numpy(checkpoint.read(f"{pack['name']}.input_factors"))
                linear.register_forward_pre_hook(input_hook(partial(torch.mul, factors_I)))
            if pack["grid"] and rounds_inputs and linear not in rounded:
                rounded.add(linear)
                rounding = _rounding_of_pack(checkpoint, pack)
                if isinstance(linear, nn.Conv2d):
                    linear.forward = partial(convolved, linear, rounding)
                    continue
                linear.register_forward_pre_hook(
                    input_hook(lambda x, rounding=rounding: x if x.shape[-2] in unrounded else rounding(x))
                )
    for table in described["tables"]:
        if table["grid"] and table["name"] not in tied:
            embedding = modules[table["name"]]
            with torch.no_grad():
                columns = embedding.weight.shape[1]
                values_VI = checkpoint.weight_OI(table["name"], Grid(**table["grid"]), columns)
                embedding.weight.copy_(torch.from_numpy(values_VI))
    return module


def live_name(module: nn.Module, stored: str) -> str:
    """The name of a parameter in the module, from that in checkpoints."""
    family = family_of_module(module)
    return next(path for path, _ in module.named_parameters() if checkpoint_name(path, family) == stored)


def take_in(linear: nn.Module, factors_O: nn.Parameter) -> None:
    """A scale of outputs is in the checkpoint's weight already; the module multiplies by it no more."""
    with torch.no_grad():
        if linear.bias is not None:
            linear.bias.mul_(factors_O)
        factors_O.fill_(1)


def convolved(conv: nn.Conv2d, rounding, x: torch.Tensor) -> torch.Tensor:
    """A convolution of patches with each patch rounded: a product of the patches, one by one."""
    height, width = conv.kernel_size
    rows, columns = x.shape[2] // height, x.shape[3] // width
    weight_OI = conv.weight.flatten(1)
    y = x.new_empty(len(x), len(weight_OI), rows, columns)
    for i in range(rows):
        for j in range(columns):
            patch = x[:, :, i * height : (i + 1) * height, j * width : (j + 1) * width].flatten(1)
            y[:, :, i, j] = rounding(patch[:, None])[:, 0] @ weight_OI.T
    return y if conv.bias is None else y + conv.bias[:, None, None]


def _num_groups(pack: dict) -> int:
    """Blocks of a block-diagonal weight, which are stored one above the other."""
    return int(pack["layers"][0].get("num_groups", 1))


def pack_values(checkpoint: Checkpoint, pack: dict) -> np.ndarray:
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


def _rounding_of_pack(checkpoint: Checkpoint, pack: dict):
    chosen, name, fixed = (
        Format(grid=Grid(**pack["grid"]), activations=pack["activations"]),
        pack["name"],
        None,
    )
    if chosen.is_static:
        fixed = float(checkpoint.read(f"{name}.input_scale")), int(checkpoint.read(f"{name}.input_zero"))
    rounding, groups = rounding_of(chosen, Role(pack["layers"][0]["role"]), fixed), _num_groups(pack)
    if f"{name}.outlier_columns" in checkpoint.slots:
        rounding = partial(beside_outliers, rounding, checkpoint.read(f"{name}.outlier_columns"))
    if groups == 1:
        return rounding
    return lambda x: rounding(x.reshape(*x.shape[:-1], groups, -1)).reshape(x.shape)
