"""The FFNs of a model, read off one forward pass instead of off names.

Every tensor of the pass has the linears that it was computed from. A linear that reads an activation of
another linear's output is a down projection. The FFN is gated if that input is a product of two linears of
the same input. The norm before it, and the side of the norm that the residual sum adds to, give the
placement. Modules on the meta device are enough: no value is read, and the pass needs no memory.
https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
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
from quantkit.model.unknown.dataflow import ForwardPass, Watch, tensors_in
from quantkit.model.unknown.probes import CURVES, curve_of, norm_kind_of

NUM_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedFfn:
    up: tuple[str, ...]  # the linears whose outputs meet in the middle
    down: str
    kind: FfnKind
    activation: Activation
    hidden_features: int
    norm_kind: NormKind | None  # None: no norm stands before it or on its output
    placement: NormPlacement | None
    calls: int = 1

    @property
    def shape(self) -> FeedForward:
        return FeedForward(kind=self.kind, activation=self.activation, hidden_features=self.hidden_features)


def observe(module: nn.Module) -> tuple[ObservedFfn, ...]:
    """Every FFN of one forward pass, in order; empty where the model's code reads values.

    A module without storage is copied and run on fake tensors.
    """
    flow, is_bare = ForwardPass(), any(parameter.device.type == "meta" for parameter in module.parameters())
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_bare else nullcontext()
    norms = {child: kind for child in module.modules() if (kind := norm_kind_of(child)) is not None}
    curves = _curves(module)
    model = copy.deepcopy(module) if is_bare else module
    before: Any = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs the failure of a model that reads values
    try:
        with torch.no_grad(), mode:
            if is_bare:
                _give_devices(model)
            with _hooks(model, module, norms, curves, flow), Watch(flow):
                _forward(model)
    except Exception:  # code of any model, which may read values
        return ()
    finally:
        logging.disable(before)
    return tuple(_ffns_in(flow))


def summary(ffns: Sequence[ObservedFfn]) -> tuple[str, ...]:
    """Lines of a report, one for all equal FFNs."""
    counts: Counter[str] = Counter()
    for ffn in ffns:
        norm = (
            f"{ffn.placement or 'some'} {ffn.norm_kind}"
            if ffn.norm_kind
            else "no norm with weights before it"
        )
        again = f", run {ffn.calls} times" if ffn.calls > 1 else ""
        counts[f"{ffn.kind} FFN {ffn.shape.display_name} {ffn.hidden_features}, {norm}{again}"] += 1
    return tuple(f"a forward pass shows {number} x {text}" for text, number in counts.items())


def with_observed_ffns(model_map: ModelMap, module: nn.Module) -> ModelMap:
    """A map without a family row, with the FFNs that a forward pass shows: for inspection, not for export.

    Gate and up projection are not distinguished; where one matrix holds both, only the down projection gets
    its role.
    """
    roles: dict[str, tuple[Role, str]] = {}
    blocks = []
    for index, ffn in enumerate(observe(module)):
        name = ffn.down.rpartition(".")[0]
        roles[ffn.down] = (Role.FFN_DOWN, name)
        is_fused = ffn.kind is FfnKind.GATED and len(ffn.up) == 1
        inputs = () if is_fused else zip(ffn.up, (Role.FFN_UP, Role.FFN_GATE), strict=False)
        roles |= {up: (role, name) for up, role in inputs}
        blocks.append(
            Block(
                name=name,
                stack="decoder",
                index=index,
                calls=ffn.calls,
                attentions=(),
                ffn=ffn.shape,
                norm_kind=ffn.norm_kind or NormKind.LAYER_NORM,
                norm_placement=ffn.placement or NormPlacement.PRE,
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
    """Replace meta tensors by fake CPU tensors of the same shape."""
    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # type: ignore[assignment]


def _forward(module: nn.Module) -> None:
    device, config = next(module.parameters()).device, getattr(module, "config", None)
    size: Any = getattr(config, "image_size", None)
    if getattr(module, "main_input_name", "") == "pixel_values" and size:
        sides = (size, size) if isinstance(size, int) else size
        module(pixel_values=torch.ones(1, int(getattr(config, "num_channels", 3)), *sides, device=device))
        return
    ids = torch.arange(1, 1 + NUM_TOKENS, device=device)[None]
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    if "use_cache" in inspect.signature(module.forward).parameters:
        inputs["use_cache"] = False
    module(**inputs)


def _curves(module: nn.Module) -> dict[nn.Module, Activation]:
    leaves = (child for child in module.modules() if not list(child.children()))
    return {leaf: curve for leaf in leaves if (curve := curve_of(leaf)) in CURVES}


@contextmanager
def _hooks(
    model: nn.Module,
    original: nn.Module,
    norms: Mapping[nn.Module, NormKind],
    curves: Mapping[nn.Module, Activation],
    flow: ForwardPass,
) -> Iterator[None]:
    """Record the calls of linears, norms and activations, whose kinds were read off the original module."""
    with ExitStack() as stack:
        for (name, child), (_, source) in zip(model.named_modules(), original.named_modules(), strict=True):
            record: Callable[[Tensor, Tensor], None]
            if linears.kind_of(child) not in (None, linears.PATCHES):
                record = partial(flow.record_linear, name)
            elif source in norms:
                record = partial(flow.record_norm, norms[source])
            elif source in curves:
                record = partial(flow.record_activation, curves[source])
            else:
                continue
            stack.callback(child.register_forward_hook(_hook(record), with_kwargs=True).remove)
        yield


def _hook(record: Callable[[Tensor, Tensor], None]) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        record(next(tensors_in((*args, *kwargs.values()))), output)

    return hook


def _ffns_in(flow: ForwardPass) -> Iterator[ObservedFfn]:
    counts: dict[str, int] = {}
    ffns: dict[str, ObservedFfn] = {}
    for number, call in enumerate(flow.calls):
        origin = call.origin
        ups = [flow.calls[up] for up, _ in sorted(origin.parts)]
        if origin.curve is None or origin.is_mixed or not ups or number not in flow.placements:
            continue
        counts[call.name] = counts.get(call.name, 0) + 1
        norm = next((flow.norms[up.origin.norm] for up in ups if up.origin.norm >= 0), None)
        if flow.placements[number] is NormPlacement.OUTPUT:
            norm = next(norm for norm in flow.norms if (number, "") in norm.origin.parts)
        ffns.setdefault(
            call.name,
            ObservedFfn(
                up=tuple(dict.fromkeys(up.name for up in ups)),
                down=call.name,
                kind=FfnKind.GATED if origin.is_gated else FfnKind.STANDARD,
                activation=origin.curve,
                hidden_features=call.input.shape[-1],
                norm_kind=norm.kind if norm else None,
                placement=flow.placements.get(number),
            ),
        )
    for name, ffn in ffns.items():
        yield replace(ffn, calls=counts[name])
