"""Experts of a mixture as modules of their own, where transformers fuses those of a block in 3-D tensors.

Checkpoints of the Hub hold a matrix for each projection of each expert, and so did transformers 4. With one
module a projection, experts are mapped, observed and rounded like any other layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.families import family_of
from quantkit.model.families.schema import Family
from quantkit.model.model_map import Role
from quantkit.model.names import checkpoint_name, family_of_module
from quantkit.model.weights.headers import StoredTensor
from quantkit.model.weights.tensors import stored_bytes

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # [experts, 2 * inner, hidden] and [experts, hidden, inner]
PARTS = (Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN)


class Expert(nn.Module):
    """down(activation(gate(x)) * up(x)); the projections have the names of the family's checkpoints."""

    def __init__(self, names: Mapping[Role, str], weights: Sequence[Tensor], activation: nn.Module) -> None:
        super().__init__()
        self.names = names
        for role, weight_OI in zip(PARTS, weights, strict=True):
            out_features, in_features = weight_OI.shape
            linear = nn.Linear(in_features, out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(weight_OI, requires_grad=weight_OI.requires_grad)
            self.add_module(names[role], linear)
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(self.names[role]) for role in PARTS)
        output: Tensor = down(self.act_fn(gate(x)) * up(x))
        return output


class Experts(nn.ModuleList):
    """Letters: T tokens, H features, K experts of each token."""

    def forward(self, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sum_TH = torch.zeros_like(x_TH)
        for number, expert in enumerate(self):
            tokens, places = torch.where(chosen_TK == number)
            if len(tokens):
                weighted = expert(x_TH[tokens]) * weights_TK[tokens, places, None]
                sum_TH.index_add_(0, tokens, weighted.to(x_TH.dtype))
        return sum_TH


def expert_names(family: Family | None) -> Mapping[Role, str]:
    """The names of an expert's projections in the family's checkpoints; empty without experts."""
    rows = family.stacks[0].projections.items() if family else ()
    return {roles[0]: path.partition("experts.*.")[2] for path, roles in rows if "experts.*." in path}


def with_separate_experts(module: nn.Module) -> nn.Module:
    """The model, its fused experts replaced by one module each, whose weights are views of the fused ones."""
    names = expert_names(family_of_module(module))
    for parent in list(module.modules()) if names else ():
        fused: Any = getattr(parent, "experts", None)
        if not isinstance(fused, nn.ModuleList) and hasattr(fused, GATE_UP):
            parent.experts = Experts(
                Expert(names, (*gate_up.chunk(2), down), fused.act_fn)
                for gate_up, down in zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True)
            )
    return module


def copy_with_separate_experts(module: nn.Module) -> nn.Module:
    """A copy that shares all weights with the module, which stays as it is."""
    shared = (*module.parameters(), *module.buffers())
    return with_separate_experts(copy.deepcopy(module, {id(tensor): tensor for tensor in shared}))


def split_experts(stored: Mapping[str, StoredTensor], model_type: str) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, a fused one of all experts as one tensor a projection in the same file."""
    family = family_of(model_type)
    names, split = expert_names(family), {}
    for name, tensor in stored.items():
        base, _, kind = name.rpartition(".")
        is_fused = base.endswith(".experts") and kind in (GATE_UP, DOWN) and len(tensor.shape) == 3
        if not (names and is_fused and tensor.scale is None):
            split[name] = tensor
            continue
        roles = PARTS[:2] if kind == GATE_UP else PARTS[2:]
        num_experts, rows, columns = tensor.shape
        shape = (rows // len(roles), columns)
        part_bytes = stored_bytes(replace(tensor, shape=shape))
        for part in range(num_experts * len(roles)):
            number, role = divmod(part, len(roles))
            own = f"{checkpoint_name(base, family)}.{number}.{names[roles[role]]}.weight"
            split[own] = replace(tensor, shape=shape, offset=tensor.offset + part * part_bytes)
    return split
