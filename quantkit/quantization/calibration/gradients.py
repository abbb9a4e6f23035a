"""How much a change of each output matters to what the model predicts: second moments of gradients.

For a matrix y = x W^T the KL divergence of the next token after a small change E of W is, to second order
and with inputs and gradients taken as independent, tr(G E H E^T) / 2: H is the second moment of the inputs
x, G that of the gradients at the outputs y, of the log-likelihood of tokens drawn from the model's own
predictions (K-FAC, https://arxiv.org/abs/1503.05671; for rounding https://arxiv.org/abs/2505.22988). H says
which inputs go together, G which outputs do. Nothing of the text but its contexts is used, so no fit to it
happens.

The pass goes back block by block: hidden states in front of every block are written to disk on the way
forth, then each block is run once more with its gradients on. In memory are one block's graph and
statistics, and the gradients of the hidden states of all windows. A few thousand tokens are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from quantkit.quantization.calibration import statistics as running
from quantkit.quantization.calibration import store
from quantkit.quantization.calibration.passes import REPLAY_TOLERANCE
from quantkit.quantization.calibration.replay import (
    Ints,
    NotPlainError,
    Recording,
    digest_of,
    head_left_out,
    is_same_call,
    record,
    replay,
    run_after,
    run_before,
)

Progress = Callable[[int], None]
Outputs = Mapping[str, tuple[nn.Module, Tensor]]  # projection -> its module, its rows among the outputs
WANT = "gradient"
ARRAY = "second_moment_II"  # as `running` calls it
PIECE_VALUES = 1 << 24  # logits at once: 64 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientsFile:
    """Finished second moments of gradients."""

    folder: Path
    parts: Mapping[str, int]  # projection -> the part that holds it
    num_rows: int  # tokens
    key: str

    def read(self, name: str) -> NDArray[np.float32] | None:
        """[O, O] of one projection; None where no gradient came to it."""
        if name not in self.parts:
            return None
        with safe_open(store.part_path(self.folder, self.parts[name]), framework="numpy") as file:
            found: NDArray[np.float32] = file.get_tensor(f"{name}.{ARRAY}")
        return found


def collect_gradients(
    module: nn.Module,
    tokens_BT: Ints,
    *,
    outputs: Outputs,
    blocks: Mapping[str, nn.Module],
    folder: Path,
    seed: int = 0,
    progress: Progress = lambda count: None,
) -> GradientsFile:
    """Second moments of the gradients at these outputs, or finished ones of the same key.

    `progress` is told tokens; together they are those of the text. A model that is no chain of blocks, or
    gives no logits, raises NotPlainError. Weights are never changed, and get no gradients.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: frozenset({WANT}) for name in outputs}
    key = store.key_of(module, tokens_BT, wanted, [*blocks], [seed])
    index = store.read_index(folder)
    if index.get("key") == key and index.get("is_finished"):
        progress(int(tokens_BT.size))
        return _opened(folder, index)
    store.clear(folder)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    module.eval()
    recording = _recorded(module, tokens_BT, blocks)
    back = _Back(module=module, tokens_BT=tokens_BT, recording=recording, folder=folder)
    parts: dict[str, int] = {}
    reported, total = 0, int(tokens_BT.size)
    with torch.no_grad():
        gradients = back.ends(torch.Generator().manual_seed(seed))
        for number in reversed(range(len(recording.blocks))):
            found = back.block(number, gradients, outputs)
            if found:
                store.write_part(folder, number, found)
            parts |= dict.fromkeys(found, number)
            share = total * (len(recording.blocks) - number) // len(recording.blocks)
            progress(share - reported)
            reported = share
    described = {"key": key, "is_finished": True, "parts": parts, "num_tokens": total}
    store.write_index(folder, described)
    store.clear_hidden(folder)
    return _opened(folder, described)


def _opened(folder: Path, index: Mapping[str, Any]) -> GradientsFile:
    return GradientsFile(folder=folder, parts=index["parts"], num_rows=index["num_tokens"], key=index["key"])


def _recorded(module: nn.Module, tokens_BT: Ints, blocks: Mapping[str, nn.Module]) -> Recording:
    """How the blocks are called, which must not depend on the text."""
    with torch.no_grad(), head_left_out(module):
        first = record(module, tokens_BT[:1], blocks=blocks, matrices={})
        if first.problem is None and len(tokens_BT) > 1:
            second = record(module, tokens_BT[1:2], blocks=blocks, matrices={})
            calls = (
                [[call.name, call.args, call.kwargs] for call in each.blocks] for each in (first, second)
            )
            if second.problem or not is_same_call(*calls):
                first.problem = second.problem or "what blocks are given depends on the text"
    if first.problem:
        raise NotPlainError(first.problem)
    return first


@dataclass(frozen=True, kw_only=True, slots=True)
class _Back:
    """The way back, and what every step of it needs."""

    module: nn.Module
    tokens_BT: Ints
    recording: Recording
    folder: Path

    def hidden(self, number: int, window: int) -> Tensor:
        """What a block reads of one window."""
        assert self.recording.like is not None
        return store.read_hidden(self.folder, number, window, self.recording.like)

    def ends(self, chances: torch.Generator) -> list[Tensor]:
        """Forth, block by block; -> the gradient at what the last block returns, of each window."""
        calls = self.recording.blocks
        with store.writing_hidden(self.folder, 0) as out, head_left_out(self.module):
            for window in range(len(self.tokens_BT)):
                store.append_hidden(
                    out, run_before(self.module, self.tokens_BT[window : window + 1], calls[0])
                )
        for number, call in enumerate(calls):
            with store.writing_hidden(self.folder, number + 1) as out:
                for window in range(len(self.tokens_BT)):
                    hidden_1TH = replay(call, self.hidden(number, window))
                    _require_same(hidden_1TH, call.digest, call.name, is_first=window == 0)
                    store.append_hidden(out, hidden_1TH)
        return [self.end(window, chances) for window in range(len(self.tokens_BT))]

    def end(self, window: int, chances: torch.Generator) -> Tensor:
        """Back from the logits of one window, a piece of it at a time: they may be larger than the model."""
        hidden_1TH = self.hidden(len(self.recording.blocks), window)
        made, step, begin = torch.empty_like(hidden_1TH), 1, 0
        while begin < hidden_1TH.shape[1]:
            piece = slice(begin, begin + step)
            part_1TH = hidden_1TH[:, piece].clone().requires_grad_()
            tokens_1T = self.tokens_BT[window : window + 1, piece]
            with torch.enable_grad():
                given = run_after(self.module, tokens_1T, self.recording.blocks, part_1TH, lambda: None)
            logits_1TV = getattr(given, "logits", None)
            if logits_1TV is None or logits_1TV.shape[:2] != part_1TH.shape[:2]:
                raise NotPlainError("the model gives no logits for each token")
            error_TV = logits_1TV.detach()[0].float().softmax(-1)
            drawn_T1 = torch.multinomial(error_TV, 1, generator=chances)
            error_TV.scatter_add_(1, drawn_T1, torch.full_like(drawn_T1, -1, dtype=error_TV.dtype))
            (made[:, piece],) = torch.autograd.grad(logits_1TV, part_1TH, error_TV[None].to(logits_1TV.dtype))
            begin += step
            step = max(1, PIECE_VALUES // logits_1TV.shape[-1])
        return made

    def block(self, number: int, gradients: list[Tensor], outputs: Outputs) -> dict[str, store.Finished]:
        """Statistics of a block's projections; the gradients go on to what the block reads."""
        call, seen = self.recording.blocks[number], dict[str, running.Running]()
        inside = {id(child) for child in call.block.modules()}
        here = {name: (linear, rows_O) for name, (linear, rows_O) in outputs.items() if id(linear) in inside}
        for window in range(len(gradients)):
            hidden_1TH = self.hidden(number, window).requires_grad_()
            with torch.enable_grad(), _watching({id(linear): linear for linear, _ in here.values()}) as given:
                out_1TH = replay(call, hidden_1TH)
            watched = [tensor for tensors in given.values() for tensor in tensors]
            gradients[window], *found = torch.autograd.grad(
                out_1TH, [hidden_1TH, *watched], gradients[window], allow_unused=True
            )
            by_tensor = {id(tensor): each for tensor, each in zip(watched, found, strict=True)}
            for name, (linear, rows_O) in here.items():
                for tensor in given.get(id(linear), ()):
                    gradient = by_tensor[id(tensor)]
                    if gradient is not None:
                        _add(seen, name, gradient.flatten(0, -2)[:, rows_O])
        return {name: running.finish(each) for name, each in seen.items() if each.num_rows} if seen else {}


def _add(seen: dict[str, running.Running], name: str, gradient_TO: Tensor) -> None:
    if running.count_bad(gradient_TO):
        raise NotPlainError(f"the gradients of '{name}' are not finite")
    if name not in seen:
        seen[name] = running.start(gradient_TO.shape[-1], frozenset({"second_moment"}), 0)
    running.add(seen[name], gradient_TO)


def _require_same(hidden_BTH: Tensor, digest: tuple[float, float], name: str, *, is_first: bool) -> None:
    total, _ = digest_of(hidden_BTH)
    if is_first and not abs(total - digest[0]) <= REPLAY_TOLERANCE * digest[1]:
        raise NotPlainError(f"block '{name}' computes something else by itself")


@contextmanager
def _watching(linears: Mapping[int, nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """What these modules return while the context lasts."""
    given: dict[int, list[Tensor]] = {}

    def leaving(linear: nn.Module, _: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            given.setdefault(id(linear), []).append(output)

    with ExitStack() as stack:
        for linear in linears.values():
            stack.callback(linear.register_forward_hook(leaving).remove)
        yield given
