"""What the FFNs of a model are, read off one forward pass instead of off names.

Every tensor of the pass carries which linears it comes from. A linear that reads a curve of another linear's
output is the way down of an FFN; it is gated if what it reads is a product of two linears of the same input;
the norm before it, and which of the norm's two sides the sum afterwards takes, tell the placement. Modules on
the meta device will do: no value is looked at, and the pass costs no memory. https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quantkit.model import linears
from quantkit.model.model_map import (
    Activation,
    Block,
    FeedForward,
    FfnKind,
    ModelMap,
    NormKind,
    NormPlacement,
    Residual,
    Role,
)
from quantkit.model.unknown.dataflow import LinearCall, NormCall, Origin, Pass, Watch, tensors_in
from quantkit.model.unknown.probes import CURVES, curve_of, norm_kind_of

NUM_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedFfn:
    """One FFN as a forward pass shows it."""

    up: tuple[str, ...]  # the linears whose outputs meet in the middle
    down: str
    kind: FfnKind
    activation: Activation
    hidden_features: int
    norm_kind: NormKind | None  # None: no norm stands before it
    placement: NormPlacement | None
    calls: int = 1


def observe(module: nn.Module) -> tuple[ObservedFfn, ...]:
    """Every FFN that one forward pass runs, in order; empty where the pass asks for values.

    A module without storage is copied and run on tensors that have a device and a shape and nothing else.
    """
    seen, is_bare = Pass(), any(each.device.type == "meta" for each in module.parameters())
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_bare else nullcontext()
    norms = {child: kind for child in module.modules() if (kind := norm_kind_of(child)) is not None}
    curves = _curves(module)
    made = copy.deepcopy(module) if is_bare else module
    before: Any = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch reports what a model that looks at values ran into
    try:
        with torch.no_grad(), mode:
            if is_bare:
                _give_devices(made)
            with _hooks(made, module, norms, curves, seen), Watch(seen):
                _forward(made)
    except Exception:  # code of any model, which may look at values
        return ()
    finally:
        logging.disable(before)
    return tuple(_found(seen))


def summary(found: Sequence[ObservedFfn]) -> tuple[str, ...]:
    """What was observed in words, FFNs that are alike in one line."""
    counts: Counter[str] = Counter()
    for each in found:
        ffn = FeedForward(kind=each.kind, activation=each.activation, hidden_features=each.hidden_features)
        norm = (
            f"{each.placement or 'some'} {each.norm_kind}"
            if each.norm_kind
            else "no norm with weights before it"
        )
        again = f", run {each.calls} times" if each.calls > 1 else ""
        counts[f"{each.kind} FFN {ffn.display_name} {each.hidden_features}, {norm}{again}"] += 1
    return tuple(f"a forward pass shows {number} x {text}" for text, number in counts.items())


def with_observed_ffns(model_map: ModelMap, module: nn.Module) -> ModelMap:
    """A map whose family has no row with the FFNs that a forward pass shows: for looking, not for exporting.

    Which of two linears stands before the curve is not told apart, and of a matrix that holds both only the
    way down is given its role.
    """
    roles: dict[str, tuple[Role, str]] = {}
    blocks = []
    for index, each in enumerate(observe(module)):
        name = each.down.rpartition(".")[0]
        roles[each.down] = (Role.FFN_DOWN, name)
        is_fused = each.kind is FfnKind.GATED and len(each.up) == 1
        found = () if is_fused else zip(each.up, (Role.FFN_UP, Role.FFN_GATE), strict=False)
        roles |= {up: (role, name) for up, role in found}
        blocks.append(
            Block(
                name=name,
                stack="decoder",
                index=index,
                calls=each.calls,
                attentions=(),
                ffn=FeedForward(
                    kind=each.kind, activation=each.activation, hidden_features=each.hidden_features
                ),
                norm_kind=each.norm_kind or NormKind.LAYER_NORM,
                norm_placement=each.placement or NormPlacement.PRE,
                residual=Residual.SEQUENTIAL,
            )
        )
    layers = (
        replace(layer, role=roles[layer.name][0], block=roles[layer.name][1])
        if layer.name in roles
        else layer
        for layer in model_map.layers
    )
    return replace(model_map, layers=tuple(layers), blocks=tuple(blocks))


def _give_devices(module: nn.Module) -> None:
    """A tensor of the same shape for each that has no device; the mode keeps it a shape alone."""
    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # type: ignore[assignment]


def _forward(module: nn.Module) -> None:
    ids = torch.arange(1, 1 + NUM_TOKENS, device=next(module.parameters()).device)[None]
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    if "use_cache" in inspect.signature(module.forward).parameters:
        inputs["use_cache"] = False
    module(**inputs)


def _curves(module: nn.Module) -> dict[nn.Module, Activation]:
    """The leaves that are a known non-linearity."""
    leaves = (child for child in module.modules() if not list(child.children()))
    return {leaf: curve for leaf in leaves if (curve := curve_of(leaf)) in CURVES}


@contextmanager
def _hooks(
    made: nn.Module,
    original: nn.Module,
    norms: Mapping[nn.Module, NormKind],
    curves: Mapping[nn.Module, Activation],
    seen: Pass,
) -> Iterator[None]:
    """Calls of linears, norms and activations, as modules; what each is was found out on the original."""
    with ExitStack() as stack:
        for (name, child), (_, known) in zip(made.named_modules(), original.named_modules(), strict=True):
            if linears.kind_of(child):
                after = _after_linear(name, seen)
            elif known in norms:
                after = _after_norm(norms[known], seen)
            elif known in curves:
                after = _after_curve(curves[known], seen)
            else:
                continue
            stack.callback(child.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _first(args: Sequence[Any], kwargs: Any) -> Tensor:
    found: Tensor = next(tensors_in((*args, *kwargs.values())))
    return found


def _after_linear(name: str, seen: Pass) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any, made: Tensor) -> None:
        given = _first(args, kwargs)
        number = len(seen.calls)
        seen.calls.append(LinearCall(name, given, seen.of(given)))
        seen.put(made, Origin(parts=frozenset({(number, "")}), after=frozenset({number})))

    return hook


def _after_norm(kind: NormKind, seen: Pass) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any, made: Tensor) -> None:
        origin = seen.of(_first(args, kwargs))
        seen.put(made, Origin(norm=len(seen.norms), after=origin.after))
        seen.norms.append(NormCall(kind, origin, made))

    return hook


def _after_curve(curve: Activation, seen: Pass) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any, made: Tensor) -> None:
        origin = seen.of(_first(args, kwargs))
        if origin.parts:
            seen.put(made, replace(origin, curve=curve))

    return hook


def _found(seen: Pass) -> Iterator[ObservedFfn]:
    counts: dict[str, int] = {}
    found: dict[str, ObservedFfn] = {}
    for number, call in enumerate(seen.calls):
        origin = call.origin
        ups = [seen.calls[up] for up, _ in sorted(origin.parts)]
        if origin.curve is None or origin.is_mixed or not ups or number not in seen.placements:
            continue
        counts[call.name] = counts.get(call.name, 0) + 1
        norm = next((seen.norms[up.origin.norm] for up in ups if up.origin.norm >= 0), None)
        found.setdefault(
            call.name,
            ObservedFfn(
                up=tuple(dict.fromkeys(up.name for up in ups)),
                down=call.name,
                kind=FfnKind.GATED if origin.is_gated else FfnKind.STANDARD,
                activation=origin.curve,
                hidden_features=call.given.shape[-1],
                norm_kind=norm.kind if norm else None,
                placement=seen.placements.get(number),
            ),
        )
    for name, ffn in found.items():
        yield replace(ffn, calls=counts[name])
