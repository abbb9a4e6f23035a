"""How a model calls its blocks, recorded in one ordinary forward pass.

Masks, position embeddings and other arguments of blocks differ from family to family and from layer to layer;
they are recorded here instead of being rebuilt, and `replay` calls the blocks again one by one. That is valid
only where each block reads the output of the block before it and no other argument depends on the text. Both
conditions are checked; a model that violates one is run whole instead.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.quantization.calibration.replay import (
    BlockCall,
    Place,
    blocks_left_out,
    digest_of,
    forward,
)
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.quantization.modules import watching_inputs

# Letters: B windows of a batch, T tokens of a window.
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
NUM_RECENT = 4  # inputs that are compared with the next one, to find matrices that share an input


@dataclass(kw_only=True, slots=True)
class Recording:
    """One forward pass. A moment is even outside of blocks and odd inside: 2 * number + 1."""

    like: Tensor | None = None  # the hidden states that the first block read
    blocks: list[BlockCall] = field(default_factory=list)
    calls: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # matrix -> (moment, input)
    problem: str | None = None  # why the blocks cannot be run one by one
    moment: int = 0


def record_calls(
    module: nn.Module,
    batches: Sequence[Tokens],
    *,
    blocks: Mapping[str, nn.Module],
    matrices: Mapping[str, nn.Module],
) -> dict[int, Recording]:
    """Batch size -> recording; a second batch of the first size shows which arguments depend on the text."""
    first = record(module, batches[0], blocks=blocks, matrices=matrices)
    first.problem = first.problem or _misplaced_matrix(first)
    recordings = {len(batches[0]): first}
    is_compared = False
    for windows_BT in batches[1:]:
        if first.problem:  # the model will be run whole
            break
        if len(windows_BT) not in recordings:
            other = record(module, windows_BT, blocks=blocks, matrices=matrices)
            recordings[len(windows_BT)] = other
            first.problem = other.problem
        elif len(windows_BT) == len(batches[0]) and not is_compared:
            first.problem = _problem_of_another(module, windows_BT, first, blocks)
            is_compared = True
    return recordings


def _problem_of_another(
    module: nn.Module, windows_BT: Tokens, first: Recording, blocks: Mapping[str, nn.Module]
) -> str | None:
    """Compare the recording with that of another text.

    The first comparison leaves the blocks out, which takes next to no time: an argument that depends on the
    text, or on an output of a block, differs then too.
    """
    with suppress(Exception), blocks_left_out(first.blocks):  # a model may read further outputs of a block
        other = record(module, windows_BT, blocks=blocks, matrices={})
        if not (other.problem or _change_between(first, other)):
            return None
    other = record(module, windows_BT, blocks=blocks, matrices={})
    return other.problem or _change_between(first, other)


def record(
    module: nn.Module,
    tokens_BT: Tokens,
    *,
    blocks: Mapping[str, nn.Module],
    matrices: Mapping[str, nn.Module],
) -> Recording:
    """One forward pass: the calls of blocks and matrices, in order, with the inputs that matrices share."""
    recording = Recording(calls={name: [] for name in matrices})
    recent: deque[tuple[Tensor, int, int]] = deque(maxlen=NUM_RECENT)  # tensor, its version, its number
    numbers = itertools.count()

    def number_of(x: Tensor) -> int:
        for known, version, number in recent:
            if is_unchanged(x, known, version):
                return number
        recent.append((x, x._version, next(numbers)))
        return recent[-1][-1]

    def reading(name: str, x: Tensor) -> None:
        recording.calls[name].append((recording.moment, number_of(x)))

    def entering(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if recording.moment % 2:
                recording.problem = f"block '{name}' runs inside another"
            recording.moment += 1
            arguments: dict[Place, Any] = dict([*enumerate(args), *kwargs.items()])
            _add_block(recording, BlockCall(name=name, block=block, arguments=arguments))

        return hook

    def leaving(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> None:
        recording.moment += 1
        recording.blocks[-1].outputs = outputs

    with ExitStack() as stack:
        stack.enter_context(watching_inputs(matrices, reading))
        for name, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(entering(name), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leaving).remove)
        forward(module, tokens_BT)
    _close(recording, len(tokens_BT))
    if recording.problem:
        recording.blocks.clear()  # releases the tensors that it holds
    return recording


def is_unchanged(x: Tensor, known: Tensor, version: int) -> bool:
    """Whether `x` is the known tensor, not written to since it had this version."""
    ours, theirs = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (x, known))
    return ours == theirs and x._version == version


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _add_block(recording: Recording, call: BlockCall) -> None:
    """Find the output of the block before among the arguments of this one."""
    previous = recording.blocks[-1] if recording.blocks else None
    recording.blocks.append(call)
    if previous is None:
        return
    matches = [
        (place, at)
        for place, value in call.arguments.items()
        for at, output in enumerate(_as_tuple(previous.outputs))
        if torch.is_tensor(value) and value is output
    ]
    if not matches:
        recording.problem = f"block '{call.name}' does not read the output of '{previous.name}'"
        previous.outputs = None
        return
    call.hidden_at, at = matches[0]
    call.arguments[call.hidden_at] = None
    _settle_output(previous, at)


def _settle_output(call: BlockCall, at: int) -> None:
    is_tensor = torch.is_tensor(call.outputs)
    hidden: Tensor = call.outputs if is_tensor else call.outputs[at]
    call.output_at = None if is_tensor else at
    call.num_outputs = 1 if is_tensor else len(call.outputs)
    call.digest = digest_of(hidden)
    call.outputs = None  # releases its memory


def _close(recording: Recording, num_windows: int) -> None:
    """Settle the first and the last block, and note why the blocks cannot be run one by one."""
    if not recording.blocks:
        recording.problem = "no blocks are known"
        return
    first, last = recording.blocks[0], recording.blocks[-1]
    names = [call.name for call in recording.blocks]
    if len(set(names)) < len(names):
        recording.problem = "a block runs more than once"
    if recording.problem:
        return
    if len(names) > 1:
        first.hidden_at = recording.blocks[1].hidden_at
    else:
        first.hidden_at = 0 if 0 in first.arguments else "hidden_states"
    hidden = first.arguments.get(first.hidden_at)
    outputs = _as_tuple(last.outputs)
    at = (recording.blocks[-2].output_at if len(names) > 1 else 0) or 0
    if not torch.is_tensor(hidden) or not hidden.is_floating_point() or hidden.dim() != 3:
        recording.problem = f"block '{first.name}' reads no plain hidden states"
    elif len(hidden) != num_windows:
        recording.problem = "hidden states do not lie window by window"
    elif not torch.is_tensor(outputs[at]) or outputs[at].shape != hidden.shape:
        recording.problem = f"block '{last.name}' returns no plain hidden states"
    else:
        recording.like = torch.empty_like(hidden)
        first.arguments[first.hidden_at] = None
        _settle_output(last, at)
        recording.problem = next(
            (
                f"block '{call.name}' is given a {type(value).__name__}"
                for call in recording.blocks
                for value in call.arguments.values()
                if not _is_replayable(value)
            ),
            None,
        )


def _is_replayable(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_replayable(part) for part in value)
    if isinstance(value, dict):
        return all(_is_replayable(part) for part in value.values())
    return torch.is_tensor(value) or isinstance(value, CONSTANTS)


def _change_between(first: Recording, second: Recording) -> str | None:
    if [call.name for call in first.blocks] != [call.name for call in second.blocks]:
        return "the sequence of blocks depends on the text"
    for one, other in zip(first.blocks, second.blocks, strict=True):
        if not _is_same(one.arguments, other.arguments):
            return f"an argument of block '{one.name}' depends on the text"
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Equal arguments of two calls, tensors value by value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if torch.is_tensor(one):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def part_of(moment: int, num_blocks: int) -> int:
    """Part of the pass: 0 before the blocks, 1 and on inside, one more after the last; -1 between two."""
    if moment % 2:
        return moment // 2 + 1
    return {0: 0, 2 * num_blocks: num_blocks + 1}.get(moment, -1)


def _misplaced_matrix(recording: Recording) -> str | None:
    for name, calls in recording.calls.items():
        parts = {part_of(moment, len(recording.blocks)) for moment, _ in calls}
        if -1 in parts or len(parts) > 1:
            return f"'{name}' is called between blocks or in several of them"
    return None
