"""An oracle for the model map that reads no names: it watches values flow through the real modules.

A NaN put into one projection's output marks everything that the output reaches. The first operation
it reaches tells the role: the left side of a product that a softmax reads is a query, its right side a
key, the right side of the product after a softmax a value, an activation's input a gate (or the one up
projection). Norms are matched to their readers by equal tensors, masks and positions by what the
softmax is given. Nothing here looks at the families table.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from quantkit.model.experts import with_separate_experts
from quantkit.model.load import model_class

MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
BATCH_ADDS = {torch.baddbmm, torch.Tensor.baddbmm}
SOFTMAXES = {torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax}
CURVES = {
    torch.nn.functional.gelu,
    torch.nn.functional.silu,
    torch.nn.functional.relu,
    torch.relu,
    torch.tanh,
    torch.Tensor.tanh,
    torch.sigmoid,
}


@dataclass
class Event:
    """One watched operation of a forward pass, in order."""

    kind: str  # matmul, softmax, curve, linear
    name: str = ""  # the module, for a linear
    inputs: tuple[torch.Tensor, ...] = ()
    output: torch.Tensor | None = None

    def is_reached(self, side: int = 0) -> bool:
        return bool(torch.isnan(self.inputs[side]).any())


@dataclass
class Trace:
    """What one forward pass did."""

    events: list[Event] = field(default_factory=list)
    module_calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    logits: torch.Tensor | None = None


class Watch(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func in MATMULS:
            self.trace.events.append(Event("matmul", inputs=(args[0], args[1]), output=output))
        elif func in BATCH_ADDS:
            left = args[1] if len(args) > 1 else kwargs["batch1"]
            right = args[2] if len(args) > 2 else kwargs["batch2"]
            self.trace.events.append(Event("matmul", inputs=(left, right), output=output))
        elif func in SOFTMAXES:
            self.trace.events.append(Event("softmax", inputs=(args[0],), output=output))
        elif func in CURVES:
            self.trace.events.append(Event("curve", inputs=(args[0],), output=output))
        return output


def build_tiny(architecture: str, tiny: dict) -> nn.Module:
    """The real class with random float64 weights, so that no two tensors are equal by accident."""
    torch.manual_seed(0)
    made_from = model_class(architecture)
    config = made_from.config_class(**tiny)
    config._attn_implementation = "eager"
    model = made_from._from_config(config, attn_implementation="eager").double().eval()
    model = with_separate_experts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    """Linear modules, and transformers 5's routers, which give choices beside their scores."""
    return {
        name: child
        for name, child in model.named_modules()
        if isinstance(child, (nn.Linear, Conv1D, nn.Conv2d)) or type(child).__name__.endswith("TopKRouter")
    }


def run(model: nn.Module, inputs: dict, poison: tuple[str, list[int]] | None = None) -> Trace:
    """One forward pass; `poison` names a linear and the output channels that become NaN."""
    trace = Trace()
    handles = []
    linear_names = set(linears_of(model))

    def watch_linear(name: str):
        def before(module, args):
            trace.events.append(Event("linear", name=name, inputs=(args[0].detach().clone(),)))

        return before

    def record(name: str):
        def after(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            if args and torch.is_tensor(output) and isinstance(args[0], (torch.Tensor, tuple)):
                given = args[0] if torch.is_tensor(args[0]) else torch.empty(args[0])
                pair = (given.detach().clone(), output.detach().clone())
                trace.module_calls.setdefault(name, []).append(pair)

        return after

    def spoil(channels: list[int]):
        def after(module, args, output):
            if isinstance(output, tuple):
                return None
            output = output.clone()
            output[..., channels] = torch.nan
            return output

        return after

    for name, child in model.named_modules():
        if poison and name == poison[0]:
            handles.append(child.register_forward_hook(spoil(poison[1])))
        if name in linear_names:
            handles.append(child.register_forward_pre_hook(watch_linear(name)))
        if not list(child.children()):
            handles.append(child.register_forward_hook(record(name)))
    with torch.no_grad(), Watch(trace):
        outputs = model(**inputs, use_cache=False) if _takes_cache(model) else model(**inputs)
        trace.logits = outputs.logits if "logits" in outputs else outputs[0]
    for handle in handles:
        handle.remove()
    return trace


def _takes_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


@dataclass(frozen=True)
class Flow:
    """Where one projection's output went first."""

    first: str  # "left", "right", "right after softmax", "curve", "linear", "logits"
    next_linear: str  # the first linear whose input it reaches ("" when none does)


def follow(model: nn.Module, inputs: dict, name: str, channels: list[int]) -> Flow:
    """Poison these output channels of a linear and see what they reach first."""
    trace = run(model, inputs, poison=(name, channels))
    events = trace.events
    reached = [
        (index, event)
        for index, event in enumerate(events)
        if any(event.is_reached(side) for side in range(len(event.inputs)))
    ]
    next_linear = next((event.name for _, event in reached if event.kind == "linear"), "")
    if all(event.kind == "curve" for _, event in reached):  # nothing, or a cap on the logits
        return Flow("logits" if torch.isnan(trace.logits).any() else "nothing", "")
    index, event = reached[0]
    if event.kind == "matmul":
        side = 0 if event.is_reached(0) else 1
        both = event.is_reached(0) and event.is_reached(1)
        follows_softmax = any(earlier.kind == "softmax" for earlier in events[index - 1 : index])
        label = "both" if both else ("left", "right")[side]
        return Flow("right after softmax" if follows_softmax and label == "right" else label, next_linear)
    return Flow(event.kind, next_linear)


def roles_by_flow(
    model: nn.Module, inputs: dict, projections: dict[str, tuple[str, list[int]]]
) -> dict[str, str]:
    """Each projection's role, from where its output goes."""
    flows = {key: follow(model, inputs, name, channels) for key, (name, channels) in projections.items()}
    roles: dict[str, str] = {}
    module_of = {key: name for key, (name, _) in projections.items()}
    outs = {flow.next_linear for flow in flows.values() if flow.first == "right after softmax"}
    heads = {module_of[key] for key, flow in flows.items() if flow.first == "logits"}
    downs = {
        flow.next_linear
        for key, flow in flows.items()
        if flow.first == "curve"
        and flow.next_linear
        and flow.next_linear not in heads
        and module_of[key] not in outs
    }
    for key, flow in flows.items():
        name = module_of[key]
        if flow.first == "left":
            roles[key] = "attention_query"
        elif flow.first == "right":
            roles[key] = "attention_key"
        elif flow.first == "right after softmax":
            roles[key] = "attention_value"
        elif name in heads:
            roles[key] = "lm_head"
        elif name in outs:
            roles[key] = "attention_out"
        elif name in downs:
            roles[key] = "ffn_down"
        elif flow.next_linear in downs:
            partners = [
                k for k, f in flows.items() if f.next_linear == flow.next_linear and module_of[k] not in outs
            ]
            is_gated = {flows[k].first for k in partners} == {"curve", "linear"}
            roles[key] = "ffn_gate" if flow.first == "curve" and is_gated else "ffn_up"
        else:
            roles[key] = "other"
    return roles
