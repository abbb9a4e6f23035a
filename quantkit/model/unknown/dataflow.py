"""Data flow of a forward pass: the linears that each tensor was computed from, and the operations since.

Each tensor has an origin; each torch function of the pass combines the origins of its operands into the
origin of its result. Values are never read, so fake tensors with a device and a shape are enough.
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

Part = tuple[int, str]  # index of a linear's call, and the part of its output


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The linears and norms that a tensor was computed from, and the operations since."""

    parts: frozenset[Part] = frozenset()
    curve: Activation | None = None
    is_sigmoid: bool = False
    is_gated: bool = False
    is_mixed: bool = False  # tokens were mixed since: attention, not an FFN
    norm: int = -1  # the index of the norm call that computed it
    after: frozenset[int] = frozenset()  # linear calls that contributed, across norms
    root: int = 0  # id of the first tensor with these values
    addends: frozenset[int] = frozenset()  # roots of the two tensors that it is the sum of


@dataclass(frozen=True, slots=True)
class LinearCall:
    name: str
    input: Tensor
    origin: Origin  # of the input


@dataclass(frozen=True, slots=True)
class NormCall:
    kind: NormKind
    origin: Origin  # of the input
    output: Tensor


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
class ForwardPass:
    origins: dict[int, Origin] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)  # keeps every id in use
    calls: list[LinearCall] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    # By call of a linear whose output is added to the stream.
    placements: dict[int, NormPlacement | None] = field(default_factory=dict)

    def of(self, x: Any) -> Origin:
        """The origin of an argument."""
        return self.origins.get(id(x), Origin(root=id(x))) if torch.is_tensor(x) else Origin()

    def put(self, x: Tensor, origin: Origin, *, is_same: bool = False) -> None:
        """Record a tensor's origin; `is_same` where it has the values of an earlier tensor."""
        self.kept.append(x)
        self.origins[id(x)] = origin if is_same else replace(origin, root=id(x))

    def record_linear(self, name: str, x: Tensor, output: Tensor) -> None:
        index = len(self.calls)
        self.calls.append(LinearCall(name, x, self.of(x)))
        self.put(output, Origin(parts=frozenset({(index, "")}), after=frozenset({index})))

    def record_norm(self, kind: NormKind, x: Tensor, output: Tensor) -> None:
        origin = self.of(x)
        self.put(output, Origin(norm=len(self.norms), after=origin.after))
        self.norms.append(NormCall(kind, origin, output))

    def record_activation(self, curve: Activation, x: Tensor, output: Tensor) -> None:
        origin = self.of(x)
        if origin.parts:
            self.put(output, replace(origin, curve=curve))


class Watch(TorchFunctionMode):
    """Follows every torch function of a forward pass."""

    def __init__(self, flow: ForwardPass) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        operands = [x for x in tensors_in((*args, *kwargs.values())) if x.is_floating_point()]
        before = [self.flow.of(x) for x in operands]
        if func is torch.Tensor.__contains__ and isinstance(args[0], FakeTensor):
            return False  # "is any of the mask 0": there is no padding here
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        traced = [origin for origin in before if origin.parts or origin.norm >= 0 or origin.after]
        for number, x in enumerate(tensors_in((result,))):
            if traced and x.is_floating_point():
                self._follow(name, func, kwargs, before, traced, x, number)
        return result

    def _follow(
        self,
        name: str,
        func: Any,
        kwargs: Any,
        before: list[Origin],
        traced: list[Origin],
        result: Tensor,
        number: int,
    ) -> None:
        joined = _join(traced)
        if name in _NO_OPS and len(traced) == 1:
            self.flow.put(result, traced[0], is_same=True)
            return
        if name in _PARTING and len(traced) == 1:
            parts = frozenset(
                (call, f"{part}/{number}:{result.storage_offset()}") for call, part in traced[0].parts
            )
            self.flow.put(result, replace(traced[0], parts=parts))
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
            joined = self._product(traced[0], traced[1], joined) if len(traced) == 2 else joined
        elif name in _SUMS:
            if len(before) == 2:
                self._sum(before[0], before[1])
                joined = replace(joined, addends=frozenset({before[0].root, before[1].root}))
        elif joined.curve is not None and name not in _KEEPING:  # the square of a ReLU is another curve
            joined = replace(joined, curve=Activation.OTHER)
        self.flow.put(result, joined)

    def _product(self, one: Origin, other: Origin, joined: Origin) -> Origin:
        if one.parts == other.parts and one.is_sigmoid != other.is_sigmoid:  # x * sigmoid(x)
            return replace(joined, curve=Activation.SILU, is_sigmoid=False)
        has_curve = (one.curve is not None) != (other.curve is not None)
        if not has_curve or one.parts & other.parts or not one.parts or not other.parts:
            return joined
        calls = [self.flow.calls[number] for number, _ in one.parts | other.parts]
        roots = {self.flow.of(call.input).root for call in calls}
        return replace(joined, is_gated=len(roots) == 1)

    def _sum(self, one: Origin, other: Origin) -> None:
        """A residual sum of a linear's output, or of its norm, with the stream before or behind the norm."""
        for added, stream in ((one, other), (other, one)):
            for number in added.after - stream.after:
                call = self.flow.calls[number]
                if self.flow.placements.setdefault(number, None) or not call.origin.parts:
                    continue
                reads = {self.flow.calls[up].origin for up, _ in call.origin.parts}
                if added.norm >= 0 and stream.root in {origin.root for origin in reads}:
                    self.flow.placements[number] = NormPlacement.OUTPUT
                for norm in (self.flow.norms[origin.norm] for origin in reads if origin.norm >= 0):
                    if stream.root == self.flow.of(norm.output).root:
                        self.flow.placements[number] = NormPlacement.POST
                    elif norm.origin.root in (stream.root, *stream.addends):
                        is_normed = added.norm >= 0
                        placed = NormPlacement.SANDWICH if is_normed else NormPlacement.PRE
                        self.flow.placements[number] = placed


def _join(origins: Sequence[Origin]) -> Origin:
    curves = [origin.curve for origin in origins if origin.curve is not None]
    return Origin(
        parts=frozenset().union(*(origin.parts for origin in origins)),
        curve=curves[0] if curves else None,
        is_gated=any(origin.is_gated for origin in origins),
        is_mixed=any(origin.is_mixed for origin in origins),
        after=frozenset().union(*(origin.after for origin in origins)),
    )


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
