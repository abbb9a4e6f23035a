"""The linear-like module classes and their storage order.

GPT-2's `Conv1D` stores a weight as [in, out], `nn.Linear` as [out, in]; outside of this table a weight is
always `weight_OI`. One row adds a new class to the walk, the plan and the exporter.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearKind:
    """The way in which one class of module stores y = x W^T + b."""

    class_name: str  # matched against every class of the module's inheritance
    is_transposed: bool = False  # stored as [in, out]


LINEARS: dict[str, LinearKind] = {
    "linear": LinearKind(class_name="torch.nn.modules.linear.Linear"),
    "conv1d": LinearKind(class_name="transformers.pytorch_utils.Conv1D", is_transposed=True),
}


def kind_of(module: nn.Module) -> str | None:
    """The module's row in LINEARS, or None for a module that is no linear."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}
    return next((kind for kind, row in LINEARS.items() if row.class_name in names), None)


def weight_OI(module: nn.Module, kind: str) -> Tensor:
    """The weight as [out, in]; a view, never a copy."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.T if LINEARS[kind].is_transposed else weight
