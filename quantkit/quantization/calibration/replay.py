"""Parts of a model's forward pass by themselves: before the blocks, one block, and after the blocks.

A block is called again with hidden states of other windows and the arguments that `recording` noted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.examples import inputs_of
from quantkit.model.weights.torch_model import LEFT_OUT
from quantkit.quantization.calibration.tokens import Tokens

# Letters: B windows of a batch, T tokens of a window, H hidden size.
Place = int | str  # of an argument: its position or its name
# Of the sum of magnitudes. A replay is the same arithmetic, so any real change is larger.
TOLERANCE = 1e-4


class NotBlockwiseError(Exception):
    """The model cannot be run block by block, for the reason in the message."""


class _FirstBlockError(Exception):
    """Ends a forward pass at the first block, and carries the hidden states that it would read."""

    def __init__(self, hidden_BTH: Tensor) -> None:
        self.hidden_BTH = hidden_BTH


@dataclass(kw_only=True, slots=True)
class BlockCall:
    """One block as the model called it, hidden states left out."""

    name: str
    block: nn.Module
    arguments: dict[Place, Any]
    hidden_at: Place = 0
    output_at: int | None = None  # None: the block returns the hidden states and nothing else
    num_outputs: int = 1
    outputs: Any = None  # kept until the next block is called
    digest: tuple[float, float] = (0.0, 0.0)


def forward(module: nn.Module, tokens_BT: Tokens) -> Any:
    """An ordinary forward pass without a cache; a decoder beside an encoder reads the same text."""
    devices = (parameter.device for parameter in module.parameters())
    device = next((device for device in devices if device.type != "meta"), "cpu")  # weights may be streamed
    inputs: dict[str, Any] = {name: values.to(device) for name, values in inputs_of(tokens_BT).items()}
    config: Any = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        ids_BT = inputs["input_ids"]
        configs = (config, getattr(module, "generation_config", None))
        starts = [getattr(settings, "decoder_start_token_id", None) for settings in configs]
        start_B1 = torch.full_like(ids_BT[:, :1], next((token for token in starts if token is not None), 0))
        inputs["decoder_input_ids"] = torch.cat([start_B1, ids_BT[:, :-1]], 1)
    if "use_cache" in inspect.signature(module.forward).parameters:
        inputs["use_cache"] = False
    return module(**inputs)


@contextmanager
def blocks_left_out(blocks: Sequence[BlockCall]) -> Iterator[None]:
    """Lets each block return the hidden states that it is given, in the place of its outputs."""

    def returning(call: BlockCall) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            hidden_BTH = args[call.hidden_at] if isinstance(call.hidden_at, int) else kwargs[call.hidden_at]
            return _outputs(call, hidden_BTH)

        return run

    with _replaced_forward({call.block: returning(call) for call in blocks}):
        yield


def _outputs(call: BlockCall, hidden_BTH: Tensor) -> Any:
    """Hidden states where the block returns them, and nothing else."""
    if call.output_at is None:
        return hidden_BTH
    return tuple(hidden_BTH if at == call.output_at else None for at in range(call.num_outputs))


@contextmanager
def head_left_out(module: nn.Module) -> Iterator[None]:
    """Skips the product of lm_head, whose logits may be larger than the model; its input is still watched."""
    getter = getattr(module, "get_output_embeddings", None)
    try:
        head = getter() if getter else None
    except (NotImplementedError, AttributeError):
        head = None
    replaced = {head: lambda x, *_, **__: x.new_zeros((*x.shape[:-1], 1))} if head is not None else {}
    with _replaced_forward(replaced):
        yield


@contextmanager
def _replaced_forward(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    before = {module: vars(module).get("forward") for module in functions}
    try:
        for module, function in functions.items():
            module.forward = function
            setattr(module, LEFT_OUT, True)
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            vars(module).pop(LEFT_OUT, None)
            if own is not None:
                module.forward = own


def digest_of(hidden_BTH: Tensor) -> tuple[float, float]:
    """(sum, sum of magnitudes), which tell a replayed block from one that computed something else."""
    doubled = hidden_BTH.double()
    return float(doubled.sum()), float(doubled.abs().sum())


def replay(call: BlockCall, hidden_BTH: Tensor) -> Tensor:
    """The block's output on these hidden states."""
    arguments = {**call.arguments, call.hidden_at: hidden_BTH}
    args = [value for place, value in arguments.items() if isinstance(place, int)]
    outputs = call.block(*args, **{place: v for place, v in arguments.items() if isinstance(place, str)})
    output_BTH: Tensor = outputs if call.output_at is None else outputs[call.output_at]
    return output_BTH


def require_as_recorded(call: BlockCall, output_BTH: Tensor) -> None:
    """Compare a replayed output with the recorded one, for the windows that were recorded."""
    (total, _), (recorded, magnitude) = digest_of(output_BTH), call.digest
    if not abs(total - recorded) <= TOLERANCE * magnitude:
        raise NotBlockwiseError(f"block '{call.name}' computes something else by itself")


def run_before(module: nn.Module, tokens_BT: Tokens, first: BlockCall) -> Tensor:
    """The hidden states that the first block reads; the pass ends there."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = first.hidden_at
        raise _FirstBlockError(args[at] if isinstance(at, int) else kwargs[at])

    handle = first.block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        forward(module, tokens_BT)
    except _FirstBlockError as reached:
        return reached.hidden_BTH
    finally:
        handle.remove()
    raise AssertionError(f"block '{first.name}' was not called")


def run_after(
    module: nn.Module,
    tokens_BT: Tokens,
    blocks: Sequence[BlockCall],
    hidden_BTH: Tensor,
    on_start: Callable[[], None] = lambda: None,
) -> Any:
    """The model's output from the last block's hidden states; `on_start` is called after the last block."""

    def replacing(call: BlockCall) -> Callable[..., Any]:
        def run(*_: Any, **__: Any) -> Any:
            if call is blocks[-1]:
                on_start()
            return _outputs(call, hidden_BTH)

        return run

    with _replaced_forward({call.block: replacing(call) for call in blocks}):
        return forward(module, tokens_BT)
