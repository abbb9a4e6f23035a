"""The calibration pass on workers: a task a part and group of windows, and a task that merges a part.

A group's next part needs the hidden states of that group alone, so groups run ahead of each other, and a part
is merged while the next ones run. Sums and hidden states go through the folder of statistics: the workers of
several hosts may fill one folder on a disk that they share, and a group that stands there is not run again.
Tasks run with a fixed number of threads and merge in the order of the groups, so the bytes are those of one
process with that number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.quantization.calibration import groups, running, store
from quantkit.quantization.calibration.claims import Owner, claim, give_up, new_owner
from quantkit.quantization.calibration.group_pass import Pass, run_group
from quantkit.quantization.calibration.inputs import Parts, open_run
from quantkit.quantization.calibration.listing import list_part, write_totals
from quantkit.quantization.calibration.recording import Recording
from quantkit.quantization.calibration.replay import head_left_out
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.workers.record import THREADS, Workers
from quantkit.workers.shared import opened

AHEAD = 2  # parts that a group may be ahead of the merged ones, and tasks that wait for each worker
ASK_AGAIN_SECONDS = 1.0  # for work that another host has claimed
MERGE = -1  # in the place of a group
Rebuild = Callable[[], nn.Module]
Task = tuple[int, int]  # part, group or MERGE; the smallest goes first


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPass:
    """A pass as workers are sent it: without modules, which each builds for itself."""

    rebuild: Rebuild
    tokens_BT: Tokens
    requested: Mapping[str, frozenset[str]]
    blocks: tuple[str, ...]
    batch: int
    seed: int
    recordings: Mapping[int, Recording]
    kind: str
    parts: Parts
    folder: Path


def run_parts_on_workers(
    workers: Workers,
    work: Pass,
    rebuild: Rebuild,
    file: store.StatisticsFile,
    on_share: Callable[[float], None],
) -> store.StatisticsFile:
    """All parts that the index does not list yet; `on_share` gets the share of the groups that are done."""
    shared = workers.share(_sent(work, rebuild))
    owner = new_owner()
    num_parts, num_groups = len(work.parts), len(work.run.groups)
    progress = _Progress(file, work)
    running_tasks: dict[Future[bool], Task] = {}
    claimed: set[Task] = set()  # by another host
    try:
        while file.done < num_parts:
            while len(running_tasks) < AHEAD * workers.number and (task := progress.take(file.done)):
                function = merge_groups if task[1] == MERGE else calibrate_group
                running_tasks[workers.submit(function, shared, *task, owner)] = task
            if not running_tasks:
                time.sleep(ASK_AGAIN_SECONDS)
            timeout = ASK_AGAIN_SECONDS if claimed else None
            done = wait(running_tasks, timeout=timeout, return_when=FIRST_COMPLETED).done
            for future in done:
                task = running_tasks.pop(future)
                if future.result():
                    progress.finish(task)
                else:
                    claimed.add(task)
            if not done:
                progress.ready |= claimed
                claimed.clear()
            while file.done in progress.merged:
                file = list_part(work, file)
            on_share((progress.num_done + file.done) / (num_parts * (num_groups + 1)))
    except Exception:  # the others would write into a folder that is run in another way
        for future in running_tasks:
            future.cancel()
        wait(running_tasks)
        raise
    store.remove_torn(work.folder)  # of killed workers
    return file


def waiting_bytes(work: Pass, hidden_bytes: int) -> int:
    """Disk space of the sums and hidden states that wait for the last group of a part."""
    largest = max((work.run.stored_bytes(inputs) for inputs in work.parts), default=0)
    return (AHEAD + 1) * (len(work.run.groups) * largest // 2 + hidden_bytes)  # half of a symmetric matrix


class _Progress:
    """Which tasks are ready, and which parts are merged."""

    def __init__(self, file: store.StatisticsFile, work: Pass) -> None:
        self.parts = work.parts
        self.num_groups = len(work.run.groups)
        self.left = dict.fromkeys(range(len(work.parts)), self.num_groups)  # groups by part
        self.num_done = file.done * self.num_groups
        self.merged: set[int] = set()
        self.ready: set[Task] = set()
        for group in range(self.num_groups):
            part = file.done
            while part < len(self.parts) and groups.is_whole(work.folder, part, group):
                self._count(part)
                part += 1
            if groups.has_group(work.folder, part, group):  # damaged
                groups.forget(work.folder, part, group)
            self._make_ready(part, group)

    def take(self, num_merged: int) -> Task | None:
        """The next task, unless it is too far ahead."""
        task = min(self.ready, default=None)
        if task is None or task[0] > num_merged + AHEAD:
            return None
        self.ready.discard(task)
        return task

    def finish(self, task: Task) -> None:
        part, group = task
        if group == MERGE:
            self.merged.add(part)
        else:
            self._count(part)
            self._make_ready(part + 1, group)

    def _make_ready(self, part: int, group: int) -> None:
        if part < len(self.parts):
            self.ready.add((part, group))

    def _count(self, part: int) -> None:
        self.num_done += 1
        self.left[part] -= 1
        if not self.left[part] and self.parts[part]:
            self.ready.add((part, MERGE))
        elif not self.left[part]:
            self.merged.add(part)


def calibrate_group(shared: Any, part: int, group: int, owner: Owner) -> bool:
    """Run a part on a group; False where another host has claimed it. Runs in a worker."""
    work: Pass = opened(shared, open_pass)

    def run() -> None:
        with torch.no_grad(), head_left_out(work.run.module):
            groups.write_group(work.folder, part, group, run_group(work, part, group))

    return _claimed(work.folder, part, f"{group:04d}", owner, run)


def merge_groups(shared: Any, part: int, _: int, owner: Owner) -> bool:
    """Write the statistics of a part; False where another host has claimed it. Runs in a worker."""
    work: Pass = opened(shared, open_pass)

    def run() -> None:
        totals: dict[str, running.Running] = {}
        for group in range(len(work.run.groups)):
            groups.merge_into(totals, groups.read_group(work.folder, part, group))
        write_totals(work, part, totals)

    return _claimed(work.folder, part, "merge", owner, run)


def _claimed(folder: Path, part: int, name: str, owner: Owner, run: Callable[[], None]) -> bool:
    def stands() -> bool:
        has_group = name.isdigit() and groups.has_group(folder, part, int(name))
        return has_group or store.has_part(folder, part)

    path = folder / f"claim_{part:04d}_{name}.json"
    if stands():
        return True
    if not claim(path, owner):
        return False
    try:
        if not stands():  # it may have been finished before it was claimed
            run()
    except FileNotFoundError:
        if not stands():  # else another host was faster, and has removed what this task reads
            raise
    finally:
        give_up(path)
    return True


def open_pass(sent: SentPass) -> Pass:
    """The pass with a model of this worker, of which one block at a time is in memory."""
    torch.set_num_threads(THREADS)
    run = open_run(
        sent.rebuild(), sent.tokens_BT, sent.requested, sent.blocks, batch=sent.batch, seed=sent.seed
    )
    for recording in sent.recordings.values():
        for call in recording.blocks:
            call.block = run.blocks[call.name]
    return Pass(run=run, recordings=sent.recordings, kind=sent.kind, parts=sent.parts, folder=sent.folder)


def _sent(work: Pass, rebuild: Rebuild) -> SentPass:
    recordings = {
        size: replace(recording, blocks=[replace(call, block=nn.Identity()) for call in recording.blocks])
        for size, recording in work.recordings.items()
    }
    return SentPass(
        rebuild=rebuild,
        tokens_BT=work.run.tokens_BT,
        requested=work.run.requested,
        blocks=tuple(work.run.blocks),
        batch=work.run.batch,
        seed=work.run.seed,
        recordings=recordings,
        kind=work.kind,
        parts=work.parts,
        folder=work.folder.absolute(),
    )
