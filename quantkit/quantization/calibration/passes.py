"""The calibration pass: blocks one after the other over all windows, or the whole model where that fails.

Running block by block keeps the statistics of one block in memory, whatever the depth and the number of
windows; hidden states wait in a file, so the time stays linear. A model that is no chain of blocks (an
encoder beside a decoder, one block called many times) is run whole, several times over the text if its
statistics do not fit into memory together. Layer-wise calibration is that of GPTQ,
https://arxiv.org/abs/2210.17323.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from quantkit.quantization.calibration import groups, running, store
from quantkit.quantization.calibration.group_pass import Pass, run_group
from quantkit.quantization.calibration.inputs import (
    CalibrationRun,
    Parts,
    SharedInput,
    open_run,
    shared_inputs,
)
from quantkit.quantization.calibration.listing import list_part, write_totals
from quantkit.quantization.calibration.on_workers import Rebuild, run_parts_on_workers, waiting_bytes
from quantkit.quantization.calibration.recording import record_calls
from quantkit.quantization.calibration.replay import NotBlockwiseError, head_left_out
from quantkit.quantization.calibration.store import APART, BLOCKS, WAYS, WHOLE
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.runtime.machine.disk import require_free
from quantkit.workers.record import Workers

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
    workers: Workers | None = None,
    rebuild: Rebuild | None = None,
) -> store.StatisticsFile:
    """Collect the requested statistics of every matrix's input, or open finished ones of the same key.

    `progress` is called with numbers of tokens, which add up to those of the text. An interrupted run
    continues with the part that it was at. Workers get the model from `rebuild`, which they are sent; other
    processes with workers may fill the same folder meanwhile.
    """
    assert (workers is None) == (rebuild is None)
    run = open_run(module, tokens_BT, requested, blocks, batch=batch, seed=seed)
    reporter = Reporter(progress=progress, num_tokens=int(tokens_BT.size))
    # Batch and memory decide the content of each part, and an unfinished run goes on part by part.
    key = store.key_of(module, tokens_BT, requested, blocks, [seed, batch, memory_bytes])
    file = store.resume(folder, key, requested, int(tokens_BT.size), is_shared=workers is not None)
    if not file.is_finished:
        was_training = [child for child in module.modules() if child.training]
        try:
            with torch.no_grad(), head_left_out(module.eval()):
                file = _run(run, file, reporter, memory_bytes, workers, rebuild)
        finally:
            for child in was_training:
                child.training = True
    reporter.reach(1.0)
    return file


def _run(
    run: CalibrationRun,
    file: store.StatisticsFile,
    reporter: Reporter,
    memory_bytes: int,
    workers: Workers | None,
    rebuild: Rebuild | None,
) -> store.StatisticsFile:
    """Try the ways in order; an interrupted run continues in the way that it had reached."""
    batches = [windows_BT for _, windows_BT in run.batches()]
    recordings = record_calls(run.module, batches, blocks=run.blocks, matrices=run.matrices)
    recording = recordings[min(run.batch, len(run.tokens_BT))]
    if not file.done:
        file = replace(file, kind=WHOLE if recording.problem else BLOCKS, reason=recording.problem)
    while True:
        inputs = shared_inputs(run, recording, file.kind)
        parts = _parts_of(run, inputs, file.kind, memory_bytes)
        work = Pass(run=run, recordings=recordings, kind=file.kind, parts=parts, folder=file.folder)
        like = recording.like if file.kind == BLOCKS else None
        hidden_bytes = len(run.tokens_BT) * like[0].nbytes if like is not None else 0
        waiting = waiting_bytes(work, hidden_bytes) if workers else 2 * hidden_bytes
        _require_room(file.folder, waiting + run.stored_bytes(inputs))
        if file.kind == BLOCKS and not store.has_hidden(file.folder, file.done, len(run.groups)):
            file = replace(file, done=0, located={})
        try:
            if workers and rebuild:
                return run_parts_on_workers(workers, work, rebuild, file, reporter.reach)
            return _run_parts(work, file, reporter)
        except NotBlockwiseError as error:
            if file.kind == APART:
                raise
            store.clear(file.folder)
            kind = WAYS[WAYS.index(file.kind) + 1]
            file = replace(file, kind=kind, reason=str(error), done=0, located={})


def _run_parts(work: Pass, file: store.StatisticsFile, reporter: Reporter) -> store.StatisticsFile:
    """Part by part in this process, one group of windows after the other."""
    num_windows, num_groups = len(work.run.tokens_BT), len(work.run.groups)
    for part in range(file.done, len(work.parts)):
        totals: dict[str, running.Running] = {}

        def on_batch(windows: int, part: int = part) -> None:
            reporter.reach(_share_of(work, part, windows / num_windows))

        for group in range(num_groups):
            if groups.is_whole(work.folder, part, group):  # of an earlier run on workers
                groups.merge_into(totals, groups.read_group(work.folder, part, group))
            else:
                groups.merge_into(totals, run_group(work, part, group, on_batch))
        write_totals(work, part, totals)
        file = list_part(work, file)
    return file


def _share_of(work: Pass, part: int, within: float) -> float:
    """The share of the work that is done; embeddings and norms take next to no time beside a block."""
    if work.kind != BLOCKS:
        return (part + within) / len(work.parts)
    last = len(work.parts) - 1
    return (part - 1 + within) / max(1, min(last, len(work.recording.blocks)))


def _parts_of(run: CalibrationRun, inputs: Sequence[SharedInput], kind: str, memory_bytes: int) -> Parts:
    """The inputs by part: by where they are read, or as many as fit into memory together."""
    if kind == BLOCKS:
        last = max((shared.part for shared in inputs), default=0)
        return tuple(tuple(shared for shared in inputs if shared.part == part) for part in range(last + 1))
    parts: list[list[SharedInput]] = [[]]
    room = memory_bytes
    for shared in inputs:
        needed = running.expected_bytes(run.width_of(shared), shared.statistics)
        if needed > room and parts[-1]:
            parts.append([])
            room = memory_bytes
        parts[-1].append(shared)
        room -= needed
    return tuple(tuple(part) for part in parts)


def _require_room(folder: Path, num_bytes: int) -> None:
    remedy = "choose a folder on a larger disk, or a method that needs no second moments"
    require_free(folder, num_bytes, what="calibration", next_step=remedy)
