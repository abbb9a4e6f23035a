"""How a model calls its blocks, seen in one ordinary forward pass, and those calls made again one by one.

Masks, position embeddings and whatever else a model hands to its blocks differ from family to family and from
one layer to the next; here they are not rebuilt but recorded, and a block is then run with hidden states of
other windows and the very arguments that the model gave it. That holds only where each block reads what the
one before it returned, and where nothing else in its arguments depends on the text. Both are checked, and a
model that is built otherwise is run whole instead.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# Letters: B windows of a batch, T tokens of a window, H hidden size.
Ints = NDArray[np.int64]
Place = int | str  # of an argument: its position or its name
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
NUM_HELD = 4  # inputs that are remembered while readers of the same one are looked for


class NotPlainError(Exception):
    """The model cannot be run block by block; the message says why."""


class _FirstBlockError(Exception):
    """Carries the first block's hidden states out of a forward pass that need not go on."""

    def __init__(self, hidden_BTH: Tensor) -> None:
        self.hidden_BTH = hidden_BTH


@dataclass(kw_only=True, slots=True)
class BlockCall:
    """One block as the model called it, hidden states left out."""

    name: str
    block: nn.Module
    args: list[Any]
    kwargs: dict[str, Any]
    hidden_at: Place = 0
    output_at: int | None = None  # None: the block returns the hidden states and nothing else
    num_outputs: int = 1
    outputs: Any = None  # what it returned, until the next block was called
    digest: tuple[float, float] = (0.0, 0.0)


@dataclass(kw_only=True, slots=True)
class Recording:
    """One forward pass. A moment is even outside of blocks and odd inside: 2 * number + 1."""

    like: Tensor | None = None  # the hidden states that the first block read
    blocks: list[BlockCall] = field(default_factory=list)
    calls: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # matrix -> (moment, input)
    problem: str | None = None  # why the blocks cannot be run one by one
    moment: int = 0


def forward(module: nn.Module, tokens_BT: Ints) -> Any:
    """An ordinary forward pass without a cache; a decoder beside an encoder is given the same text."""
    device = next(module.parameters()).device
    ids_BT = torch.from_numpy(np.ascontiguousarray(tokens_BT)).to(device)
    inputs: dict[str, Any] = {"input_ids": ids_BT}
    config: Any = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        sources = (config, getattr(module, "generation_config", None))
        found = [getattr(source, "decoder_start_token_id", None) for source in sources]
        start_B1 = torch.full_like(ids_BT[:, :1], next((each for each in found if each is not None), 0))
        inputs["decoder_input_ids"] = torch.cat([start_B1, ids_BT[:, :-1]], 1)
    if "use_cache" in inspect.signature(module.forward).parameters:
        inputs["use_cache"] = False
    return module(**inputs)


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What a linear module multiplies."""
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


def is_unchanged(x: Tensor, known: Tensor, version: int) -> bool:
    """Whether `x` is a tensor that is still held, not written to since it had this version."""
    ours, theirs = ((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (x, known))
    return ours == theirs and x._version == version


@contextmanager
def head_left_out(module: nn.Module) -> Iterator[None]:
    """Run without the product of the output projection: a window's logits may be larger than the model.

    The projection is still called, so its input is seen; nothing that is calibrated reads its output.
    """
    getter = getattr(module, "get_output_embeddings", None)
    try:
        head = getter() if getter else None
    except (NotImplementedError, AttributeError):
        head = None
    replaced = {head: lambda x, *_, **__: x.new_zeros((*x.shape[:-1], 1))} if head is not None else {}
    with standing_in(replaced):
        yield


@contextmanager
def standing_in(replaced: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules that compute something else for a while."""
    before = {module: vars(module).get("forward") for module in replaced}
    try:
        for module, function in replaced.items():
            module.forward = function
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own


def record(
    module: nn.Module, tokens_BT: Ints, *, blocks: Mapping[str, nn.Module], matrices: Mapping[str, nn.Module]
) -> Recording:
    """One forward pass: who is called when and with what."""
    seen = Recording(calls={name: [] for name in matrices})
    held: deque[tuple[Tensor, int, int]] = deque(maxlen=NUM_HELD)  # tensor, its version, its number
    numbers = iter(range(1 << 62))

    def number_of(x: Tensor) -> int:
        for known, made_at, number in held:
            if is_unchanged(x, known, made_at):
                return number
        held.append((x, x._version, next(numbers)))
        return held[-1][-1]

    def reading(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.calls[name].append((seen.moment, number_of(first_input(args, kwargs))))

        return hook

    def entering(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if seen.moment % 2:
                seen.problem = f"block '{name}' runs inside another"
            seen.moment += 1
            _add_block(seen, BlockCall(name=name, block=block, args=list(args), kwargs=dict(kwargs)))

        return hook

    def leaving(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> None:
        seen.moment += 1
        seen.blocks[-1].outputs = outputs

    with ExitStack() as stack:
        for name, matrix in matrices.items():
            handle = matrix.register_forward_pre_hook(reading(name), with_kwargs=True)
            stack.callback(handle.remove)
        for name, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(entering(name), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leaving).remove)
        forward(module, tokens_BT)
    _close(seen, len(tokens_BT))
    if seen.problem:
        seen.blocks.clear()  # gives the tensors that it holds back
    return seen


def _add_block(seen: Recording, call: BlockCall) -> None:
    """Find among a block's arguments what the one before it returned."""
    previous = seen.blocks[-1] if seen.blocks else None
    seen.blocks.append(call)
    if previous is None:
        return
    returned = previous.outputs if isinstance(previous.outputs, (tuple, list)) else (previous.outputs,)
    arguments: list[tuple[Place, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    found = [
        (place, at)
        for place, value in arguments
        for at, output in enumerate(returned)
        if torch.is_tensor(value) and value is output
    ]
    if not found:
        seen.problem = f"block '{call.name}' does not read what '{previous.name}' returns"
        previous.outputs = None
        return
    call.hidden_at, at = found[0]
    _settle_output(previous, at)
    _put(call, None)


def _settle_output(call: BlockCall, at: int) -> None:
    is_plain = torch.is_tensor(call.outputs)
    hidden: Tensor = call.outputs if is_plain else call.outputs[at]
    call.output_at = None if is_plain else at
    call.num_outputs = 1 if is_plain else len(call.outputs)
    call.digest = digest_of(hidden)
    call.outputs = None  # gives the memory back


def _put(call: BlockCall, hidden: Tensor | None) -> Any:
    """Set the hidden states among the arguments, and give what stood there."""
    target: Any = call.args if isinstance(call.hidden_at, int) else call.kwargs
    before, target[call.hidden_at] = target[call.hidden_at], hidden
    return before


def digest_of(hidden_BTH: Tensor) -> tuple[float, float]:
    """Two sums that tell a replayed block from one that computed something else."""
    doubled = hidden_BTH.double()
    return float(doubled.sum()), float(doubled.abs().sum())


def _close(seen: Recording, num_windows: int) -> None:
    """Settle the first and the last block, and say what stands in the way of running them one by one."""
    if not seen.blocks:
        seen.problem = "no blocks are known"
        return
    first, last = seen.blocks[0], seen.blocks[-1]
    names = [call.name for call in seen.blocks]
    if len(set(names)) < len(names):
        seen.problem = "a block runs more than once"
    if seen.problem:
        return
    first.hidden_at = seen.blocks[1].hidden_at if len(names) > 1 else (0 if first.args else "hidden_states")
    hidden = first.args[first.hidden_at] if isinstance(first.hidden_at, int) and first.args else None
    hidden = first.kwargs.get(str(first.hidden_at)) if hidden is None else hidden
    returned = last.outputs if isinstance(last.outputs, (tuple, list)) else (last.outputs,)
    at = (seen.blocks[-2].output_at if len(names) > 1 else 0) or 0
    if not torch.is_tensor(hidden) or not hidden.is_floating_point() or hidden.dim() != 3:
        seen.problem = f"block '{first.name}' reads no plain hidden states"
    elif len(hidden) != num_windows:
        seen.problem = "hidden states do not lie window by window"
    elif not torch.is_tensor(returned[at]) or returned[at].shape != hidden.shape:
        seen.problem = f"block '{last.name}' returns no plain hidden states"
    else:
        seen.like = torch.empty_like(hidden)
        _put(first, None)
        _settle_output(last, at)
        seen.problem = next(
            (
                f"block '{call.name}' is given a {type(value).__name__}"
                for call in seen.blocks
                for value in (*call.args, *call.kwargs.values())
                if not _is_plain(value)
            ),
            None,
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return torch.is_tensor(value) or isinstance(value, PLAIN)


def is_same_call(one: Any, other: Any) -> bool:
    """Whether two calls were given the same arguments, tensors value by value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if torch.is_tensor(one):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_same_call, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same_call(one[key], other[key]) for key in one)
    return bool(one == other)


def replay(call: BlockCall, hidden_BTH: Tensor) -> Tensor:
    """Run a block as it was called, on these hidden states."""
    args, kwargs = list(call.args), dict(call.kwargs)
    if isinstance(call.hidden_at, int):
        args[call.hidden_at] = hidden_BTH
    else:
        kwargs[call.hidden_at] = hidden_BTH
    outputs = call.block(*args, **kwargs)
    hidden: Tensor = outputs if call.output_at is None else outputs[call.output_at]
    return hidden


def run_before(module: nn.Module, tokens_BT: Ints, first: BlockCall) -> Tensor:
    """The hidden states that the first block reads; the pass ends there."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[first.hidden_at] if isinstance(first.hidden_at, int) else kwargs[first.hidden_at]
        raise _FirstBlockError(hidden)

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
    tokens_BT: Ints,
    blocks: Sequence[BlockCall],
    hidden_BTH: Tensor,
    reached: Callable[[], None],
) -> Any:
    """What follows the last block, on its hidden states; `reached` is called when it begins."""

    def standing_in_for(call: BlockCall) -> Callable[..., Any]:
        def run(*_: Any, **__: Any) -> Any:
            if call is blocks[-1]:
                reached()
            if call.output_at is None:
                return hidden_BTH
            return tuple(hidden_BTH if at == call.output_at else None for at in range(call.num_outputs))

        return run

    with standing_in({call.block: standing_in_for(call) for call in blocks}):
        return forward(module, tokens_BT)
