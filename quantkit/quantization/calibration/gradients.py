"""Second moments of gradients: how much a change of each output matters to the model's predictions.

For a matrix y = x W^T the KL divergence of the next token after a small change E of W is, to second order
and with inputs and gradients taken as independent, tr(G E H E^T) / 2: H is the second moment of the inputs
x, G that of the gradients at the outputs y, of the log-likelihood of tokens drawn from the model's own
predictions (K-FAC, https://arxiv.org/abs/1503.05671; for rounding https://arxiv.org/abs/2505.22988). H holds
the correlations of inputs, G those of outputs. Labels are drawn and not read from the text, so nothing is
fitted to it.

The pass goes back block by block: hidden states before every block are written to disk on the way forth,
then each block is run once more with its gradients on. In memory are one block's graph and statistics, and
the gradients of the hidden states of all windows. A few thousand tokens are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.quantization.calibration import running, store
from quantkit.quantization.calibration.passes import Reporter
from quantkit.quantization.calibration.recording import Recording, record_calls
from quantkit.quantization.calibration.replay import (
    NotBlockwiseError,
    head_left_out,
    replay,
    require_as_recorded,
    run_after,
    run_before,
)
from quantkit.quantization.calibration.tokens import Tokens

# Letters: T tokens, H hidden size, O outputs of a projection, V vocabulary.
Outputs = Mapping[str, tuple[nn.Module, Tensor]]  # projection -> its module, its rows among the outputs
STATISTICS = frozenset({"second_moment"})  # of the gradients
PIECE_VALUES = 1 << 24  # logits at once: 64 MB


def collect_gradients(
    module: nn.Module,
    tokens_BT: Tokens,
    *,
    outputs: Outputs,
    blocks: Mapping[str, nn.Module],
    folder: Path,
    seed: int = 0,
    progress: Callable[[int], None] = lambda count: None,
) -> store.StatisticsFile:
    """Second moments of the gradients at these outputs, or finished ones of the same key.

    `progress` is called with numbers of tokens, which add up to those of the text. A model that is no chain
    of blocks, or gives no logits, raises NotBlockwiseError. Weights are never changed, and get no gradients.
    """
    requested = dict.fromkeys(outputs, STATISTICS)
    key = store.key_of(module, tokens_BT, requested, ["gradients", *blocks], [seed])
    file = store.resume(folder, key, requested, int(tokens_BT.size))
    if file.is_finished:
        progress(int(tokens_BT.size))
        return file
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    module.eval()
    windows = [tokens_BT[number : number + 1] for number in range(len(tokens_BT))]
    with torch.no_grad(), head_left_out(module):
        recording = record_calls(module, windows, blocks=blocks, matrices={})[1]
    if recording.problem:
        raise NotBlockwiseError(recording.problem)
    back = _Backward(module=module, windows=windows, recording=recording, folder=folder)
    located: dict[str, tuple[int, str]] = {}
    reporter, num_blocks = Reporter(progress=progress, num_tokens=int(tokens_BT.size)), len(recording.blocks)
    with torch.no_grad():
        back.write_hidden_states()
        random = torch.Generator().manual_seed(seed)
        gradients = [back.last_gradient(window, random) for window in range(len(windows))]
        for number in reversed(range(num_blocks)):
            finished = back.block(number, gradients, outputs)
            if finished:
                store.write_part(folder, number, finished)
            located |= {name: (number, name) for name in finished}
            reporter.reach((num_blocks - number) / num_blocks)
    file = replace(file, located=located, done=num_blocks, is_finished=True)
    store.write_index(file)
    store.clear_hidden(folder)
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backward:
    """The backward pass, block by block. Hidden states are numbered by the block that reads them."""

    module: nn.Module
    windows: list[Tokens]
    recording: Recording
    folder: Path

    def hidden(self, number: int, window: int) -> Tensor:
        assert self.recording.like is not None
        return store.read_hidden(self.folder, number, window, self.recording.like)

    def write_hidden_states(self) -> None:
        """The forward pass, block by block."""

        def outputs(number: int) -> Iterator[Tensor]:
            call = self.recording.blocks[number]
            for window in range(len(self.windows)):
                hidden_1TH = replay(call, self.hidden(number, window))
                if window == 0:
                    require_as_recorded(call, hidden_1TH)
                yield hidden_1TH

        with head_left_out(self.module):
            first = self.recording.blocks[0]
            store.write_hidden(
                self.folder, 0, (run_before(self.module, tokens_1T, first) for tokens_1T in self.windows)
            )
        for number in range(len(self.recording.blocks)):
            store.write_hidden(self.folder, number + 1, outputs(number))

    def last_gradient(self, window: int, random: torch.Generator) -> Tensor:
        """Gradient at the last block's output, piece by piece: logits may be larger than the model."""
        hidden_1TH = self.hidden(len(self.recording.blocks), window)
        gradient_1TH, step, begin = torch.empty_like(hidden_1TH), 1, 0
        while begin < hidden_1TH.shape[1]:
            piece = slice(begin, begin + step)
            part_1TH = hidden_1TH[:, piece].clone().requires_grad_()
            tokens_1T = self.windows[window][:, piece]
            with torch.enable_grad():
                output = run_after(self.module, tokens_1T, self.recording.blocks, part_1TH)
            logits_1TV = getattr(output, "logits", None)
            if logits_1TV is None or logits_1TV.shape[:2] != part_1TH.shape[:2]:
                raise NotBlockwiseError("the model gives no logits for each token")
            error_TV = logits_1TV.detach()[0].float().softmax(-1)
            labels_T1 = torch.multinomial(error_TV, 1, generator=random)
            error_TV.scatter_add_(1, labels_T1, torch.full_like(labels_T1, -1, dtype=error_TV.dtype))
            (gradient_1TH[:, piece],) = torch.autograd.grad(
                logits_1TV, part_1TH, error_TV[None].to(logits_1TV.dtype)
            )
            begin += step
            step = max(1, PIECE_VALUES // logits_1TV.shape[-1])
        return gradient_1TH

    def block(self, number: int, gradients: list[Tensor], outputs: Outputs) -> dict[str, running.Finished]:
        """Statistics of a block's projections; `gradients` move from the block's output to its input."""
        call, sums = self.recording.blocks[number], dict[str, running.Running]()
        inside = {id(child) for child in call.block.modules()}
        here = {name: (linear, rows_O) for name, (linear, rows_O) in outputs.items() if id(linear) in inside}
        for window in range(len(gradients)):
            hidden_1TH = self.hidden(number, window).requires_grad_()
            with (
                torch.enable_grad(),
                _outputs_of({id(linear): linear for linear, _ in here.values()}) as kept,
            ):
                out_1TH = replay(call, hidden_1TH)
            tensors = [tensor for calls in kept.values() for tensor in calls]
            gradients[window], *at_outputs = torch.autograd.grad(
                out_1TH, [hidden_1TH, *tensors], gradients[window], allow_unused=True
            )
            by_tensor = {id(tensor): grad for tensor, grad in zip(tensors, at_outputs, strict=True)}
            for name, (linear, rows_O) in here.items():
                for tensor in kept.get(id(linear), ()):
                    gradient = by_tensor[id(tensor)]
                    if gradient is not None:
                        _add(sums, name, gradient.flatten(0, -2)[:, rows_O])
        return {name: running.finish(moment) for name, moment in sums.items() if moment.num_rows}


def _add(sums: dict[str, running.Running], name: str, gradient_TO: Tensor) -> None:
    if running.num_nonfinite(gradient_TO):
        raise NotBlockwiseError(f"the gradients of '{name}' are not finite")
    if name not in sums:
        sums[name] = running.start(gradient_TO.shape[-1], STATISTICS, 0)
    running.add(sums[name], gradient_TO)


@contextmanager
def _outputs_of(linears: Mapping[int, nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """The outputs of these modules while the context lasts, by id of the module."""
    kept: dict[int, list[Tensor]] = {}

    def leaving(linear: nn.Module, _: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            kept.setdefault(id(linear), []).append(output)

    with ExitStack() as stack:
        for linear in linears.values():
            stack.callback(linear.register_forward_hook(leaving).remove)
        yield kept
