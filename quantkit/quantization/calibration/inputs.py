"""What is calibrated on what, and which inputs belong together in which part of the pass.

Matrices that read the very same tensor (query, key and value; gate and up) share one entry, so that a second
moment is neither computed nor stored three times. That is seen in the recorded pass and not taken from a
family's facts, so it holds for any architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quantkit.errors import InputError
from quantkit.model import linears
from quantkit.model.names import modules_by_name
from quantkit.quantization.calibration import statistics as running
from quantkit.quantization.calibration import store
from quantkit.quantization.calibration.replay import Ints, Recording, is_same_call, record

BLOCKS, WHOLE, APART = "blocks", "whole", "apart"  # apart: whole, and no input counts as shared
WAYS = (BLOCKS, WHOLE, APART)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One input, and the matrices that read it."""

    matrices: tuple[str, ...]
    wants: frozenset[str]
    part: int

    @property
    def name(self) -> str:
        """The matrix under whose name its statistics are stored."""
        return self.matrices[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is calibrated, on what, and into which folder."""

    module: nn.Module
    tokens_BT: Ints
    matrices: Mapping[str, nn.Module]  # each module once, under the first of its names
    names: Mapping[str, str]  # every name that was asked for -> its name in `matrices`
    wanted: Mapping[str, frozenset[str]]
    blocks: Mapping[str, nn.Module]
    folder: Path
    key: str
    batch: int
    seed: int
    memory_bytes: int

    def batches(self) -> Iterator[tuple[int, Ints]]:
        """(number of the first window, windows)."""
        for begin in range(0, len(self.tokens_BT), self.batch):
            yield begin, self.tokens_BT[begin : begin + self.batch]

    def wants_of(self, matrix: str) -> frozenset[str]:
        """All that is asked of a matrix, under whichever name."""
        return frozenset().union(
            *(self.wanted[name] for name, first in self.names.items() if first == matrix)
        )

    def bytes_of(self, entry: Entry) -> int:
        """Memory of an entry's running statistics."""
        return running.expected_bytes(_width(self.matrices[entry.name]), entry.wants)


def open_subject(
    module: nn.Module,
    tokens_BT: Ints,
    wanted: Mapping[str, frozenset[str]],
    blocks: Sequence[str],
    folder: Path,
    *,
    batch: int,
    seed: int,
    memory_bytes: int,
) -> Subject:
    """Find the modules behind the names, and refuse what cannot be calibrated."""
    assert tokens_BT.ndim == 2, tokens_BT.shape
    assert tokens_BT.size, "no windows"
    assert batch >= 1, batch
    unknown = frozenset().union(*wanted.values()) - set(running.WANTS)
    assert not unknown, f"no such statistics: {sorted(unknown)}"
    named = modules_by_name(module)
    missing = [name for name in (*wanted, *blocks) if name not in named]
    assert not missing, f"the model has no modules {missing[:4]}"
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(named[name]), name) for name in wanted}
    _check_ids(module, tokens_BT)
    return Subject(
        module=module,
        tokens_BT=tokens_BT,
        matrices={name: named[name] for name in first.values()},
        names=names,
        wanted=wanted,
        blocks={name: named[name] for name in blocks},
        folder=folder,
        # Batch and memory decide which part holds what, and an unfinished run goes on part by part.
        key=store.key_of(module, tokens_BT, wanted, blocks, [seed, batch, memory_bytes]),
        batch=batch,
        seed=seed,
        memory_bytes=memory_bytes,
    )


def _check_ids(module: nn.Module, tokens_BT: Ints) -> None:
    table = getattr(module, "get_input_embeddings", lambda: None)()
    num_rows = getattr(table, "num_embeddings", None)
    if num_rows is not None and not 0 <= int(tokens_BT.min()) <= int(tokens_BT.max()) < num_rows:
        raise InputError(
            f"token ids from {int(tokens_BT.min())} to {int(tokens_BT.max())}",
            where="calibration",
            allowed=f"0 to {num_rows - 1}, the model's vocabulary",
            next_step="encode the text with the tokenizer that belongs to the model",
        )


def _width(module: nn.Module) -> int:
    kind = linears.kind_of(module)
    assert kind is not None, type(module).__name__
    return linears.weight_OI(module, kind).shape[1]


def record_calls(subject: Subject) -> Mapping[int, Recording]:
    """One recording for each size of batch; a second one of the first size shows what never changes."""
    made: list[tuple[int, Recording]] = []
    for _, windows_BT in subject.batches():
        sizes = [size for size, _ in made]
        if len(made) < 2 or len(windows_BT) not in sizes:
            one = record(subject.module, windows_BT, blocks=subject.blocks, matrices=subject.matrices)
            made.append((len(windows_BT), one))
        if made[0][1].problem:  # it will be run whole: one recording tells all
            break
    size, first = made[0]
    first.problem = first.problem or _out_of_place(first)
    for other_size, other in made[1:]:
        changed = _what_changes(first, other) if other_size == size else None
        first.problem = first.problem or other.problem or changed
    return dict(reversed(made))  # of one size, the first counts


def _what_changes(first: Recording, second: Recording) -> str | None:
    if [call.name for call in first.blocks] != [call.name for call in second.blocks]:
        return "which blocks run depends on the text"
    for one, other in zip(first.blocks, second.blocks, strict=True):
        if not is_same_call([one.args, one.kwargs], [other.args, other.kwargs]):
            return f"what block '{one.name}' is given depends on the text"
    return None


def _part_of(moment: int, num_blocks: int) -> int:
    """0 before the blocks, 1 and on within them, one more after the last; -1 between two of them."""
    if moment % 2:
        return moment // 2 + 1
    return {0: 0, 2 * num_blocks: num_blocks + 1}.get(moment, -1)


def _out_of_place(recording: Recording) -> str | None:
    for name, calls in recording.calls.items():
        parts = {_part_of(moment, len(recording.blocks)) for moment, _ in calls}
        if -1 in parts or len(parts) > 1:
            return f"'{name}' is called between blocks or in several of them"
    return None


def entries_of(subject: Subject, recording: Recording, kind: str) -> list[Entry]:
    """Matrices that read the same tensors in the same order are one entry; each unseen one is its own."""
    num_blocks = len(recording.blocks)
    grouped: dict[Any, list[str]] = {}
    for name, calls in recording.calls.items():
        shares = bool(calls) and kind != APART
        grouped.setdefault(tuple(calls) if shares else name, []).append(name)
    holders = {
        id(child): number for number, call in enumerate(recording.blocks) for child in call.block.modules()
    }
    entries = []
    for names in grouped.values():
        calls = recording.calls[names[0]]
        part = 0
        if kind == BLOCKS:
            within = holders.get(id(subject.matrices[names[0]]), -1) + 1
            part = _part_of(calls[0][0], num_blocks) if calls else within
            if not calls and not within:
                continue  # the model runs without it
        wants = frozenset().union(*(subject.wants_of(name) for name in names))
        entries.append(Entry(matrices=tuple(names), wants=wants, part=part))
    return entries


def require_space(subject: Subject, entries: Sequence[Entry], hidden_bytes: int) -> None:
    """Refuse a disk that cannot hold the statistics and the hidden states."""
    num_values = 0
    for entry in entries:
        width = _width(subject.matrices[entry.name])
        num_values += width * width if "second_moment" in entry.wants else 0
        num_values += width * running.SAMPLE_ROWS if "sample" in entry.wants else 0
    store.require_space(subject.folder, hidden_bytes + 4 * num_values)
