"""The calibration pass: blocks one after the other over all windows, or the whole model where that fails.

Running block by block keeps the statistics of one block in memory, whatever the depth and the number of
windows; hidden states wait in a file, so the time stays linear. A model that is no chain of blocks (an
encoder beside a decoder, one block called many times) is run whole, several times over the text if its
statistics do not fit into memory together. Layer-wise calibration is that of GPTQ,
https://arxiv.org/abs/2210.17323.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.quantization.calibration import running, store
from quantkit.quantization.calibration.inputs import CalibrationRun, SharedInput, open_run, shared_inputs
from quantkit.quantization.calibration.recording import Recording, is_unchanged, record_calls
from quantkit.quantization.calibration.replay import (
    NotBlockwiseError,
    forward,
    head_left_out,
    replay,
    require_as_recorded,
    run_after,
    run_before,
)
from quantkit.quantization.calibration.store import APART, BLOCKS, WAYS, WHOLE
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.quantization.modules import watching_inputs
from quantkit.runtime.machine.disk import require_free

MEMORY_BYTES = 1 << 29  # of running statistics, when the whole model runs at once


@dataclass(kw_only=True, slots=True)
class Reporter:
    """Reports shares of the work as tokens, which add up to those of the text however it is run."""

    progress: Callable[[int], None]
    num_tokens: int
    reported: int = 0

    def reach(self, share: float) -> None:
        count = int(self.num_tokens * min(share, 1.0)) - self.reported
        if count > 0:
            self.reported += count
            self.progress(count)


@dataclass(kw_only=True, slots=True)
class Held:
    """A shared input that some of its readers have not read yet."""

    x: Tensor
    version: int
    call: int  # index of the call
    num_readers: int = 1


@dataclass(kw_only=True, slots=True)
class Watch:
    """Running statistics of one part of the pass, which hooks fill."""

    is_open: bool = True
    running: dict[str, running.Running] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)  # of every matrix
    held: dict[str, Held] = field(default_factory=dict)  # by the name of the shared input
    problem: str | None = None


def collect(
    module: nn.Module,
    tokens_BT: Tokens,
    *,
    requested: Mapping[str, frozenset[str]],
    blocks: Sequence[str],
    folder: Path,
    progress: Callable[[int], None] = lambda count: None,
    batch: int = 1,
    seed: int = 0,
    memory_bytes: int = MEMORY_BYTES,
) -> store.StatisticsFile:
    """Collect the requested statistics of every matrix's input, or open finished ones of the same key.

    `progress` is called with numbers of tokens, which add up to those of the text. An interrupted run
    continues with the part that it was at.
    """
    run = open_run(module, tokens_BT, requested, blocks, batch=batch, seed=seed)
    reporter = Reporter(progress=progress, num_tokens=int(tokens_BT.size))
    # Batch and memory decide the content of each part, and an unfinished run goes on part by part.
    key = store.key_of(module, tokens_BT, requested, blocks, [seed, batch, memory_bytes])
    file = store.resume(folder, key, requested, int(tokens_BT.size))
    if not file.is_finished:
        was_training = [child for child in module.modules() if child.training]
        try:
            with torch.no_grad(), head_left_out(module.eval()):
                file = _run(run, file, reporter, memory_bytes)
        finally:
            for child in was_training:
                child.training = True
    reporter.reach(1.0)
    return file


def _run(
    run: CalibrationRun, file: store.StatisticsFile, reporter: Reporter, memory_bytes: int
) -> store.StatisticsFile:
    """Try the ways in order; an interrupted run continues in the way that it had reached."""
    batches = (windows_BT for _, windows_BT in run.batches())
    recordings = record_calls(run.module, batches, blocks=run.blocks, matrices=run.matrices)
    recording = recordings[min(run.batch, len(run.tokens_BT))]
    if not file.done:
        file = replace(file, kind=WHOLE if recording.problem else BLOCKS, reason=recording.problem)
    while True:
        inputs = shared_inputs(run, recording, file.kind)
        try:
            if file.kind == BLOCKS:
                return _run_blocks(run, recordings, inputs, file, reporter)
            return _run_whole(run, inputs, file, reporter, memory_bytes)
        except NotBlockwiseError as error:
            if file.kind == APART:
                raise
            store.clear(file.folder)
            kind = WAYS[WAYS.index(file.kind) + 1]
            file = replace(file, kind=kind, reason=str(error), done=0, located={})


@contextmanager
def _collecting(run: CalibrationRun, inputs: Sequence[SharedInput], watch: Watch) -> Iterator[None]:
    """Add the inputs of these matrices to their running statistics."""
    by_matrix = {name: shared for shared in inputs for name in shared.matrices}

    def reading(name: str, x: Tensor) -> None:
        if not watch.is_open:
            return
        shared = by_matrix[name]
        _check_shared(watch, name, shared, x)
        if name == shared.name:
            _require_finite(x, f"input of '{name}'")
            if name not in watch.running:
                watch.running[name] = running.start(x.shape[-1], shared.statistics, run.seed)
            running.add(watch.running[name], x.cpu())

    with watching_inputs({name: run.matrices[name] for name in by_matrix}, reading):
        yield
    if watch.problem or watch.held:
        raise NotBlockwiseError(watch.problem or f"not all readers of {[*watch.held][:4]} were called")


def _check_shared(watch: Watch, name: str, shared: SharedInput, x: Tensor) -> None:
    """Note a problem where the readers of a shared input read different tensors in some call."""
    if len(shared.matrices) == 1:
        return
    call = watch.num_calls[name] = watch.num_calls.get(name, 0) + 1
    held = watch.held.get(shared.name)
    if held is None:
        watch.held[shared.name] = Held(x=x, version=x._version, call=call)
    elif held.call != call or not is_unchanged(x, held.x, held.version):
        watch.problem = f"'{name}' does not always read the shared input of {[*shared.matrices]}"
    else:
        held.num_readers += 1
        if held.num_readers == len(shared.matrices):
            del watch.held[shared.name]


def _require_finite(x: Tensor, what: str) -> None:
    num_bad = running.num_nonfinite(x)
    if num_bad:
        kind = "NaN" if x.isnan().any() else "infinite"
        raise InputError(
            f"{what}: {num_bad} values of {x.numel()} are {kind}",
            where="calibration",
            next_step="check the layers before it: their weights, or an overflow of half precision",
        )


def _finish_part(
    run: CalibrationRun,
    inputs: Sequence[SharedInput],
    watch: Watch,
    file: store.StatisticsFile,
    *,
    is_last: bool,
) -> store.StatisticsFile:
    """Write a part's statistics, and list it in the index."""
    finished, located, part = {}, dict(file.located), file.done
    for shared in inputs:
        sums = watch.running.pop(shared.name, None)
        if sums is None or not sums.num_rows:
            continue
        finished[shared.name] = running.finish(sums)
        for name, first in run.names.items():
            if first in shared.matrices:
                located[name] = part, shared.name
    if finished:
        store.write_part(file.folder, part, finished)
    file = replace(file, located=located, done=part + 1, is_finished=is_last)
    store.write_index(file)
    store.clear_hidden(file.folder, keep=None if is_last else part + 1)
    return file


def _run_blocks(
    run: CalibrationRun,
    recordings: Mapping[int, Recording],
    inputs: Sequence[SharedInput],
    file: store.StatisticsFile,
    reporter: Reporter,
) -> store.StatisticsFile:
    folder = file.folder
    recording = recordings[min(run.batch, len(run.tokens_BT))]
    num_blocks = len(recording.blocks)
    last = max((shared.part for shared in inputs), default=0)
    assert recording.like is not None
    hidden_bytes = 2 * len(run.tokens_BT) * recording.like[0].nbytes
    _require_room(folder, hidden_bytes + run.stored_bytes(inputs))
    if file.done and not store.hidden_path(folder, file.done).exists():
        file = replace(file, done=0, located={})

    def outputs(part: int, watch: Watch) -> Iterator[Tensor]:
        """The hidden states after a part, batch by batch; of the part after the blocks there are none."""
        for begin, windows_BT in run.batches():
            yield from _run_part(run, recordings[len(windows_BT)], folder, part, begin, windows_BT, watch)
            # Embeddings and norms take next to no time beside a block.
            within = (begin + len(windows_BT)) / len(run.tokens_BT)
            reporter.reach((part - 1 + within) / max(1, min(last, num_blocks)))

    for part in range(file.done, last + 1):
        here = [shared for shared in inputs if shared.part == part]
        watch = Watch(is_open=part <= num_blocks)
        with _collecting(run, here, watch):
            if part < last:
                store.write_hidden(folder, part + 1, outputs(part, watch))
            else:
                deque(outputs(part, watch), maxlen=0)
        file = _finish_part(run, here, watch, file, is_last=part == last)
    return file


def _run_part(
    run: CalibrationRun,
    recording: Recording,
    folder: Path,
    part: int,
    begin: int,
    windows_BT: Tokens,
    watch: Watch,
) -> Iterator[Tensor]:
    """One part on one batch: before the blocks, a block, or after them."""
    if part == 0:
        yield run_before(run.module, windows_BT, recording.blocks[0])
        return
    assert recording.like is not None
    hidden_BTH = store.read_hidden(folder, part, begin, recording.like).to(recording.like.device)
    if part <= len(recording.blocks):
        call = recording.blocks[part - 1]
        output_BTH = replay(call, hidden_BTH)
        _require_finite(output_BTH, f"output of block '{call.name}'")
        if begin == 0:
            require_as_recorded(call, output_BTH)
        yield output_BTH
        return

    def open_watch() -> None:
        watch.is_open = True

    watch.is_open = False
    run_after(run.module, windows_BT, recording.blocks, hidden_BTH, open_watch)


def _run_whole(
    run: CalibrationRun,
    inputs: Sequence[SharedInput],
    file: store.StatisticsFile,
    reporter: Reporter,
    memory_bytes: int,
) -> store.StatisticsFile:
    """The whole model over the text, once for each group of inputs whose statistics fit into memory."""
    groups: list[list[SharedInput]] = [[]]
    room = memory_bytes
    for shared in inputs:
        needed = running.expected_bytes(run.width_of(shared), shared.statistics)
        if needed > room and groups[-1]:
            groups.append([])
            room = memory_bytes
        groups[-1].append(shared)
        room -= needed
    _require_room(file.folder, run.stored_bytes(inputs))
    for part in range(file.done, len(groups)):
        watch = Watch()
        with _collecting(run, groups[part], watch):
            for begin, windows_BT in run.batches():
                forward(run.module, windows_BT)
                within = (begin + len(windows_BT)) / len(run.tokens_BT)
                reporter.reach((part + within) / len(groups))
        file = _finish_part(run, groups[part], watch, file, is_last=part == len(groups) - 1)
    return file


def _require_room(folder: Path, num_bytes: int) -> None:
    remedy = "choose a folder on a larger disk, or a method that needs no second moments"
    require_free(folder, num_bytes, what="calibration", next_step=remedy)
