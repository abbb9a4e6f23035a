"""The linear-like module classes and their storage order.

GPT-2's `Conv1D` stores a weight as [in, out], `nn.Linear` as [out, in]; outside of this table a weight is
always `weight_OI`. One row adds a new class to the walk, the plan and the exporter.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearKind:
    """The way in which one class of module stores y = x W^T + b."""

    classes: tuple[str, ...]  # patterns, matched against every class of the module's inheritance
    is_transposed: bool = False  # stored as [in, out]


PATCHES = "patches"
LINEARS: dict[str, LinearKind] = {
    "linear": LinearKind(classes=("torch.nn.modules.linear.Linear", "transformers.models.*TopKRouter")),
    # Stored as [out, channels, height, width], and a product only where a family's row names it.
    PATCHES: LinearKind(classes=("torch.nn.modules.conv.Conv2d",)),
    "conv1d": LinearKind(classes=("transformers.pytorch_utils.Conv1D",), is_transposed=True),
}


def kind_of(module: nn.Module) -> str | None:
    """The module's row in LINEARS, or None for a module that is no linear."""
    names = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
    return _kind_of_classes(names)


@cache
def _kind_of_classes(names: tuple[str, ...]) -> str | None:
    rows = ((kind, pattern) for kind, row in LINEARS.items() for pattern in row.classes)
    return next((kind for kind, pattern in rows if fnmatch.filter(names, pattern)), None)


def weight_OI(module: nn.Module, kind: str) -> Tensor:
    """The weight as [out, in]; a view, never a copy."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.T if LINEARS[kind].is_transposed else weight.flatten(1)


def is_product_of_patches(module: nn.Module) -> bool:
    """Whether a convolution multiplies each patch of a picture once, so that it is one product."""
    return (
        isinstance(module, nn.Conv2d)
        and module.stride == module.kernel_size
        and module.dilation == (1, 1)
        and module.groups == 1
        and module.padding in ("valid", (0, 0))
    )
