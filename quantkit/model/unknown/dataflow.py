"""What a forward pass does with every tensor: which linears it comes from, and what happened to it since.

Each tensor carries an origin, and each function that the pass calls makes the origin of its result from those
of its operands. Values are never looked at, so tensors that are a device and a shape will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from quantkit.model.model_map import Activation, NormKind, NormPlacement

Part = tuple[int, str]  # the number of a linear's call, and which part of its output


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a tensor comes from, since the last linear or norm."""

    parts: frozenset[Part] = frozenset()
    curve: Activation | None = None
    is_sigmoid: bool = False
    is_gated: bool = False
    is_mixed: bool = False  # tokens were mixed on the way: attention, not an FFN
    norm: int = -1  # the number of the norm's call that gave it
    after: frozenset[int] = frozenset()  # calls of linears whose output is in it, norms looked through
    root: int = 0  # the first tensor that has these values


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call of a linear."""

    name: str
    given: Tensor
    origin: Origin  # of what it was given


@dataclass(frozen=True, slots=True)
class NormCall:
    """One call of a norm."""

    kind: NormKind
    origin: Origin  # of what it was given
    made: Tensor


_NO_OPS = (
    "view",
    "reshape",
    "contiguous",
    "to",
    "dropout",
    "flatten",
    "unsqueeze",
    "squeeze",
    "float",
    "type_as",
)
_PRODUCTS = ("mul", "__mul__", "__rmul__", "multiply", "mul_")
_SUMS = ("add", "__add__", "__radd__", "add_", "__iadd__")
_KEEPING = (
    "transpose",
    "permute",
    "clone",
    "expand",
    "repeat",
    "masked_fill",
    "type",
    "half",
    "bfloat16",
    "double",
)
_PARTING = ("chunk", "split", "__getitem__", "unbind", "narrow", "tensor_split")
_MIXING = (
    "softmax",
    "matmul",
    "__matmul__",
    "bmm",
    "scaled_dot_product_attention",
    "einsum",
    "baddbmm",
    "cumsum",
)
_CURVE_NAMES: dict[str, Activation] = {
    "relu": Activation.RELU,
    "relu_": Activation.RELU,
    "silu": Activation.SILU,
    "silu_": Activation.SILU,
    "tanh": Activation.OTHER,
    "elu": Activation.OTHER,
    "softplus": Activation.OTHER,
    "hardswish": Activation.OTHER,
    "mish": Activation.OTHER,
}


@dataclass(slots=True)
class Pass:
    """What the pass has shown so far."""

    origins: dict[int, Origin] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)  # keeps every id in use
    calls: list[LinearCall] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    # By call of a linear whose output is added to the stream.
    placements: dict[int, NormPlacement | None] = field(default_factory=dict)

    def of(self, x: Any) -> Origin:
        """The origin of anything that a function was given."""
        return self.origins.get(id(x), Origin(root=id(x))) if torch.is_tensor(x) else Origin()

    def put(self, x: Tensor, origin: Origin, *, is_same: bool = False) -> None:
        """Say where a tensor comes from; `is_same` where it has the values of another."""
        self.kept.append(x)
        self.origins[id(x)] = origin if is_same else replace(origin, root=id(x))


class Watch(TorchFunctionMode):
    """Follows every function that a forward pass calls."""

    def __init__(self, seen: Pass) -> None:
        """Into this record."""
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """Compute, then say where the result comes from."""
        kwargs = kwargs or {}
        given = [x for x in tensors_in((*args, *kwargs.values())) if x.is_floating_point()]
        before = [self.seen.of(x) for x in given]
        if func is torch.Tensor.__contains__ and isinstance(args[0], FakeTensor):
            return False  # "is any of the mask 0": there is no padding here
        made = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        known = [origin for origin in before if origin.parts or origin.norm >= 0 or origin.after]
        for number, x in enumerate(tensors_in((made,))):
            if known and x.is_floating_point():
                self._follow(name, func, kwargs, before, known, x, number)
        return made

    def _follow(
        self,
        name: str,
        func: Any,
        kwargs: Any,
        before: list[Origin],
        known: list[Origin],
        made: Tensor,
        number: int,
    ) -> None:
        joined = _join(known)
        if name in _NO_OPS and len(known) == 1:
            self.seen.put(made, known[0], is_same=True)
            return
        if name in _PARTING and len(known) == 1:
            parts = frozenset(
                (call, f"{part}/{number}:{made.storage_offset()}") for call, part in known[0].parts
            )
            self.seen.put(made, replace(known[0], parts=parts))
            return
        if name in _MIXING:
            joined = replace(joined, is_mixed=True)
        elif name == "gelu":
            is_tanh = kwargs.get("approximate") == "tanh"
            joined = replace(joined, curve=Activation.GELU_TANH if is_tanh else Activation.GELU)
        elif name in ("sigmoid", "sigmoid_"):
            joined = replace(joined, curve=Activation.OTHER, is_sigmoid=True)
        elif name in _CURVE_NAMES:
            joined = replace(joined, curve=_CURVE_NAMES[name])
        elif name in _PRODUCTS:
            joined = self._product(known[0], known[1], joined) if len(known) == 2 else joined
        elif name in _SUMS:
            if len(before) == 2:
                self._sum(before[0], before[1])
        elif joined.curve is not None and name not in _KEEPING:  # the square of a ReLU is another curve
            joined = replace(joined, curve=Activation.OTHER)
        self.seen.put(made, joined)

    def _product(self, one: Origin, other: Origin, joined: Origin) -> Origin:
        if one.parts == other.parts and one.is_sigmoid != other.is_sigmoid:  # x * sigmoid(x)
            return replace(joined, curve=Activation.SILU, is_sigmoid=False)
        has_curve = (one.curve is not None) != (other.curve is not None)
        if not has_curve or one.parts & other.parts or not one.parts or not other.parts:
            return joined
        calls = [self.seen.calls[number] for number, _ in one.parts | other.parts]
        roots = {self.seen.of(call.given).root for call in calls}
        return replace(joined, is_gated=len(roots) == 1)

    def _sum(self, one: Origin, other: Origin) -> None:
        """A residual sum: what is added to the output of a linear, its input or what a norm made of it."""
        for added, stream in ((one, other), (other, one)):
            for number in added.after - stream.after:
                call = self.seen.calls[number]
                if self.seen.placements.setdefault(number, None) or not call.origin.parts:
                    continue
                reads = {self.seen.calls[up].origin for up, _ in call.origin.parts}
                for norm in (self.seen.norms[origin.norm] for origin in reads if origin.norm >= 0):
                    if stream.root == self.seen.of(norm.made).root:
                        self.seen.placements[number] = NormPlacement.POST
                    elif stream.root == norm.origin.root:
                        is_normed = added.norm >= 0
                        placed = NormPlacement.SANDWICH if is_normed else NormPlacement.PRE
                        self.seen.placements[number] = placed


def _join(origins: Sequence[Origin]) -> Origin:
    """One origin of several operands."""
    curves = [origin.curve for origin in origins if origin.curve is not None]
    return Origin(
        parts=frozenset().union(*(origin.parts for origin in origins)),
        curve=curves[0] if curves else None,
        is_gated=any(origin.is_gated for origin in origins),
        is_mixed=any(origin.is_mixed for origin in origins),
        after=frozenset().union(*(origin.after for origin in origins)),
    )


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Every tensor among some arguments or results."""
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
