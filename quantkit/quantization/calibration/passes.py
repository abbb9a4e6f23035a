"""The calibration pass: blocks one after the other over all windows, or the whole model where that fails.

Running block by block keeps one block's statistics in memory and nothing of the others, whatever the depth
and whatever the number of windows; hidden states wait in a file, so the time stays linear. A model that is no
chain of plain blocks (an encoder beside a decoder, one block called many times) is run whole, several times
over the text if its statistics do not fit into memory together. Layer-wise calibration is that of GPTQ,
https://arxiv.org/abs/2210.17323.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.quantization.calibration import statistics as running
from quantkit.quantization.calibration import store
from quantkit.quantization.calibration.inputs import (
    APART,
    BLOCKS,
    WAYS,
    WHOLE,
    Entry,
    Subject,
    entries_of,
    open_subject,
    record_calls,
    require_space,
)
from quantkit.quantization.calibration.replay import (
    BlockCall,
    Ints,
    NotPlainError,
    Recording,
    digest_of,
    first_input,
    forward,
    head_left_out,
    is_unchanged,
    replay,
    run_after,
    run_before,
)

Progress = Callable[[int], None]
MEMORY_BYTES = 1 << 29  # of running statistics, when the whole model runs at once
REPLAY_TOLERANCE = (
    1e-4  # of the sum of magnitudes; a replay is the same arithmetic, so any real change is larger
)


@dataclass(kw_only=True, slots=True)
class Reporter:
    """Turns work done into tokens reported: they add up to the text's tokens, however it is run."""

    progress: Progress
    num_tokens: int
    reported: int = 0

    def reach(self, part: float) -> None:
        """This part of all work is done; what was reported is never taken back."""
        count = int(self.num_tokens * min(part, 1.0)) - self.reported
        if count > 0:
            self.reported += count
            self.progress(count)


@dataclass(kw_only=True, slots=True)
class Held:
    """An input that not all of its readers have been given yet."""

    x: Tensor
    version: int
    call: int  # the readers' how manieth
    num_readers: int = 1


@dataclass(kw_only=True, slots=True)
class Watch:
    """What the hooks of one part gather."""

    is_open: bool = True
    found: dict[str, running.Running] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)  # of every matrix
    held: dict[str, Held] = field(default_factory=dict)  # by entry, where several matrices are to read it
    problem: str | None = None


def collect(
    module: nn.Module,
    tokens_BT: Ints,
    *,
    wanted: Mapping[str, frozenset[str]],
    blocks: Sequence[str],
    folder: Path,
    progress: Progress = lambda count: None,
    batch: int = 1,
    seed: int = 0,
    memory_bytes: int = MEMORY_BYTES,
) -> store.StatisticsFile:
    """Collect what is wanted of every matrix's input, or take finished statistics of the same key.

    `progress` is told tokens, which add up to those of the text. An interrupted run goes on where it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subject = open_subject(
        module, tokens_BT, wanted, blocks, folder, batch=batch, seed=seed, memory_bytes=memory_bytes
    )
    reporter = Reporter(progress=progress, num_tokens=int(tokens_BT.size))
    index = store.read_index(folder)
    if index.get("key") != subject.key:
        store.clear(folder)
        index = {}
    if not index.get("is_finished"):
        was_training = [child for child in module.modules() if child.training]
        try:
            with torch.no_grad(), head_left_out(module.eval()):
                _run(subject, index, reporter)
        finally:
            for child in was_training:
                child.training = True
    reporter.reach(1.0)
    return store.open_statistics(folder)


def _run(subject: Subject, index: Mapping[str, Any], reporter: Reporter) -> None:
    """Try the ways in order; what was done under a later one is never done again under an earlier."""
    recordings = record_calls(subject)
    recording = recordings[min(subject.batch, len(subject.tokens_BT))]
    reason = recording.problem
    ways = WAYS[WAYS.index(index["kind"]) :] if index else WAYS[reason is not None :]
    reason = index.get("reason") or reason
    for kind in ways:
        entries = entries_of(subject, recording, kind)
        described = {"kind": kind, "reason": reason, "done": 0, "located": {}, **index}
        try:
            if kind == BLOCKS:
                _run_blocks(subject, recordings, entries, described, reporter)
            else:
                _run_whole(subject, entries, described, reporter)
        except NotPlainError as error:
            if kind == APART:
                raise
            store.clear(subject.folder)
            index, reason = {}, str(error)
        else:
            return


@contextmanager
def _watching(subject: Subject, entries: Sequence[Entry], watch: Watch) -> Iterator[None]:
    """Feed the inputs of these entries into their running statistics."""

    def reading(name: str, entry: Entry) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not watch.is_open:
                return
            x = first_input(args, kwargs)
            _compare(watch, name, entry, x)
            if name == entry.name:
                _require_finite(x, f"what is given to '{name}'")
                if name not in watch.found:
                    watch.found[name] = running.start(x.shape[-1], entry.wants, subject.seed)
                running.add(watch.found[name], x.cpu())

        return hook

    with ExitStack() as stack:
        for entry in entries:
            for name in entry.matrices:
                hooked = subject.matrices[name].register_forward_pre_hook(
                    reading(name, entry), with_kwargs=True
                )
                stack.callback(hooked.remove)
        yield
    if watch.problem or watch.held:
        raise NotPlainError(watch.problem or f"not all readers of {[*watch.held][:4]} were called")


def _compare(watch: Watch, name: str, entry: Entry, x: Tensor) -> None:
    """Make sure that the matrices of an entry read one and the same tensor in every call, as recorded."""
    if len(entry.matrices) == 1:
        return
    call = watch.num_calls[name] = watch.num_calls.get(name, 0) + 1
    held = watch.held.get(entry.name)
    if held is None:
        watch.held[entry.name] = Held(x=x, version=x._version, call=call)
    elif held.call != call or not is_unchanged(x, held.x, held.version):
        watch.problem = f"'{name}' does not always read what {[*entry.matrices]} read together"
    else:
        held.num_readers += 1
        if held.num_readers == len(entry.matrices):
            del watch.held[entry.name]


def _require_finite(x: Tensor, what: str) -> None:
    num_bad = running.count_bad(x)
    if num_bad:
        kind = "NaN" if x.isnan().any() else "infinite"
        raise InputError(
            f"{what} holds {num_bad} values of {x.numel()} that are {kind}",
            where="calibration",
            next_step="check the layers before it: their weights, or an overflow of half precision",
        )


def _finish_part(
    subject: Subject, entries: Sequence[Entry], watch: Watch, described: dict[str, Any], part: int, last: int
) -> None:
    """Write a part's statistics and say in the index that it is done."""
    finished = {}
    for entry in entries:
        seen = watch.found.pop(entry.name, None)
        if seen is None or not seen.num_rows:
            continue
        finished[entry.name] = running.finish(seen)
        for name, first in subject.names.items():
            if first in entry.matrices:
                described["located"][name] = [part, entry.name]
    if finished:
        store.write_part(subject.folder, part, finished)
    reason = described["reason"]
    described |= {
        "key": subject.key,
        "done": part + 1,
        "is_finished": part == last,
        "way": described["kind"] if described["kind"] == BLOCKS else f"{WHOLE}: {reason}",
        "wanted": {name: sorted(wants) for name, wants in subject.wanted.items()},
        "unreached": [name for name in subject.wanted if name not in described["located"]],
        "num_tokens": int(subject.tokens_BT.size),
    }
    store.write_index(subject.folder, described)
    store.clear_hidden(subject.folder, keep=None if part == last else part + 1)


def _run_blocks(
    subject: Subject,
    recordings: Mapping[int, Recording],
    entries: Sequence[Entry],
    described: dict[str, Any],
    reporter: Reporter,
) -> None:
    recording = recordings[min(subject.batch, len(subject.tokens_BT))]
    num_blocks = len(recording.blocks)
    last = max((entry.part for entry in entries), default=0)
    assert recording.like is not None
    require_space(subject, entries, 2 * len(subject.tokens_BT) * recording.like[0].nbytes)
    done = described["done"]
    if done and not store.hidden_path(subject.folder, done).exists():
        described |= {"done": 0, "located": {}}
        done = 0
    for part in range(done, last + 1):
        here = [entry for entry in entries if entry.part == part]
        watch = Watch(is_open=part <= num_blocks)
        with ExitStack() as stack:
            out = stack.enter_context(store.writing_hidden(subject.folder, part + 1)) if part < last else None
            stack.enter_context(_watching(subject, here, watch))
            for begin, windows_BT in subject.batches():
                made = recordings[len(windows_BT)]
                hidden_BTH = _run_part(subject, made, part, begin, windows_BT, watch)
                if out and hidden_BTH is not None:
                    store.append_hidden(out, hidden_BTH.cpu())
                # Embeddings and norms take next to no time beside a block.
                within = (begin + len(windows_BT)) / len(subject.tokens_BT)
                reporter.reach((part - 1 + within) / max(1, min(last, num_blocks)))
        _finish_part(subject, here, watch, described, part, last)


def _run_part(
    subject: Subject, made: Recording, part: int, begin: int, windows_BT: Ints, watch: Watch
) -> Tensor | None:
    """One part on one batch: before the blocks, a block, or after them."""
    if part == 0:
        return run_before(subject.module, windows_BT, made.blocks[0])
    assert made.like is not None
    hidden_BTH = store.read_hidden(subject.folder, part, begin, made.like)
    hidden_BTH = hidden_BTH.to(made.like.device)
    if part <= len(made.blocks):
        return _run_block(made.blocks[part - 1], hidden_BTH, is_first=begin == 0)

    def begin_watching() -> None:
        watch.is_open = True

    watch.is_open = False
    run_after(subject.module, windows_BT, made.blocks, hidden_BTH, begin_watching)
    return None


def _run_block(call: BlockCall, hidden_BTH: Tensor, *, is_first: bool) -> Tensor:
    output_BTH = replay(call, hidden_BTH)
    _require_finite(output_BTH, f"what block '{call.name}' returns")
    if is_first:
        (total, _), (recorded, magnitude) = digest_of(output_BTH), call.digest
        if abs(total - recorded) > REPLAY_TOLERANCE * magnitude:
            raise NotPlainError(f"block '{call.name}' computes something else by itself")
    return output_BTH


def _run_whole(
    subject: Subject,
    entries: Sequence[Entry],
    described: dict[str, Any],
    reporter: Reporter,
) -> None:
    groups: list[list[Entry]] = [[]]
    room = subject.memory_bytes
    for entry in entries:
        needed = subject.bytes_of(entry)
        if needed > room and groups[-1]:
            groups.append([])
            room = subject.memory_bytes
        groups[-1].append(entry)
        room -= needed
    require_space(subject, entries, 0)
    for part in range(described["done"], len(groups)):
        watch = Watch()
        with _watching(subject, groups[part], watch):
            for begin, windows_BT in subject.batches():
                forward(subject.module, windows_BT)
                within = (begin + len(windows_BT)) / len(subject.tokens_BT)
                reporter.reach((part + within) / len(groups))
        _finish_part(subject, groups[part], watch, described, part, len(groups) - 1)
