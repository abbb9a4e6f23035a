"""The linear-like modules that quantkit knows, and how each stores its weight.

This table is the only place that tells [in, out] from [out, in]: GPT-2's `Conv1D` stores the transpose of
what `nn.Linear` stores. Everywhere else a weight is `weight_OI`. One row makes a new kind known to the walk,
the plan and the exporter.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearKind:
    """How one class of module stores y = x W^T + b."""

    class_names: tuple[str, ...]  # matched against every class of the module's inheritance
    weight: str = "weight"
    bias: str = "bias"
    is_transposed: bool = False  # stored as [in, out]


LINEARS: dict[str, LinearKind] = {
    "linear": LinearKind(class_names=("torch.nn.modules.linear.Linear",)),
    "conv1d": LinearKind(class_names=("transformers.pytorch_utils.Conv1D",), is_transposed=True),
}


def kind_of(module: nn.Module) -> str | None:
    """The row that this module belongs to, or None when it is no linear."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}
    return next((kind for kind, row in LINEARS.items() if names.intersection(row.class_names)), None)


def shape_OI(module: nn.Module, kind: str) -> tuple[int, int]:
    """(out_features, in_features), whatever way round the module stores them."""
    rows, columns = getattr(module, LINEARS[kind].weight).shape
    return (columns, rows) if LINEARS[kind].is_transposed else (rows, columns)


def weight_OI(module: nn.Module, kind: str) -> Tensor:
    """The weight as [out, in]; a view, never a copy."""
    weight: Tensor = getattr(module, LINEARS[kind].weight)
    return weight.T if LINEARS[kind].is_transposed else weight


def has_bias(module: nn.Module, kind: str) -> bool:
    """Whether the module adds a bias."""
    return getattr(module, LINEARS[kind].bias, None) is not None
