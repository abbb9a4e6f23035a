"""The plan of a calibration pass: which statistics of which inputs are collected in which part of it.

Matrices that read the very same tensor (query, key and value; gate and up) share one input, so that a second
moment is neither computed nor stored three times. Sharing is read from the recorded pass and not from a
family's facts, so it holds for any architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantkit.model import linears
from quantkit.model.examples import are_pictures
from quantkit.model.names import modules_by_name
from quantkit.quantization.calibration import running
from quantkit.quantization.calibration.recording import Recording, part_of
from quantkit.quantization.calibration.statistics import FIELDS
from quantkit.quantization.calibration.store import APART, BLOCKS
from quantkit.quantization.calibration.tokens import Tokens, require_known_ids

MOST_GROUPS = 16  # of windows: the most workers that calibrate at once, and sums that wait on disk


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedInput:
    """One input, and the matrices that read it."""

    matrices: tuple[str, ...]
    statistics: frozenset[str]
    part: int

    @property
    def name(self) -> str:
        """The matrix under whose name the statistics are stored."""
        return self.matrices[0]


Parts = tuple[tuple[SharedInput, ...], ...]  # the inputs that each part of a pass collects


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRun:
    """A model, its calibration text and the requested statistics."""

    module: nn.Module
    tokens_BT: Tokens
    matrices: Mapping[str, nn.Module]  # each module once, under the first of its names
    names: Mapping[str, str]  # every requested name -> its name in `matrices`
    requested: Mapping[str, frozenset[str]]
    blocks: Mapping[str, nn.Module]
    batch: int
    seed: int

    @property
    def groups(self) -> list[range]:
        """Windows whose statistics are summed up by themselves: a division that the text alone decides."""
        num_windows = len(self.tokens_BT)
        num_batches = -(-num_windows // self.batch)
        step = self.batch * -(-num_batches // MOST_GROUPS)
        return [range(begin, min(begin + step, num_windows)) for begin in range(0, num_windows, step)]

    def batches(self, windows: range | None = None) -> Iterator[tuple[int, Tokens]]:
        """(number of the first window, windows) of some windows, or of all."""
        windows = range(len(self.tokens_BT)) if windows is None else windows
        for begin in windows[:: self.batch]:
            yield begin, self.tokens_BT[begin : min(begin + self.batch, windows.stop)]

    def statistics_of(self, matrices: Iterable[str]) -> frozenset[str]:
        """All statistics requested of these matrices, under any of their names."""
        return frozenset().union(
            *(self.requested[name] for name, first in self.names.items() if first in matrices)
        )

    def width_of(self, shared: SharedInput) -> int:
        module = self.matrices[shared.name]
        kind = linears.kind_of(module)
        assert kind is not None, type(module).__name__
        return linears.weight_OI(module, kind).shape[1]

    def stored_bytes(self, inputs: Sequence[SharedInput]) -> int:
        """Disk space of the statistics of these inputs."""
        return sum(running.stored_bytes(self.width_of(shared), shared.statistics) for shared in inputs)


def open_run(
    module: nn.Module,
    tokens_BT: Tokens,
    requested: Mapping[str, frozenset[str]],
    blocks: Sequence[str],
    *,
    batch: int,
    seed: int,
) -> CalibrationRun:
    """Find the modules behind the names, and refuse token ids outside of the vocabulary."""
    assert tokens_BT.ndim == (4 if are_pictures(tokens_BT) else 2), tokens_BT.shape
    assert tokens_BT.size, "no windows"
    assert batch >= 1, batch
    unknown = frozenset().union(*requested.values()) - set(FIELDS)
    assert not unknown, f"no such statistics: {sorted(unknown)}"
    named = modules_by_name(module)
    missing = [name for name in (*requested, *blocks) if name not in named]
    assert not missing, f"the model has no modules {missing[:4]}"
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(named[name]), name) for name in requested}
    table = getattr(module, "get_input_embeddings", lambda: None)()
    num_rows = getattr(table, "num_embeddings", None)
    if num_rows is not None and not are_pictures(tokens_BT):
        require_known_ids(tokens_BT, num_rows, where="calibration")
    return CalibrationRun(
        module=module,
        tokens_BT=tokens_BT,
        matrices={name: named[name] for name in first.values()},
        names=names,
        requested=requested,
        blocks={name: named[name] for name in blocks},
        batch=batch,
        seed=seed,
    )


def shared_inputs(run: CalibrationRun, recording: Recording, way: str) -> list[SharedInput]:
    """Inputs of the pass; matrices that read the same tensors in the same order share one."""
    groups: dict[Any, list[str]] = {}
    for name, calls in recording.calls.items():
        shares = bool(calls) and way != APART
        groups.setdefault(tuple(calls) if shares else name, []).append(name)
    block_numbers = {
        id(child): number for number, call in enumerate(recording.blocks) for child in call.block.modules()
    }
    inputs = []
    for names in groups.values():
        calls, part = recording.calls[names[0]], 0
        if way == BLOCKS:
            within = block_numbers.get(id(run.matrices[names[0]]), -1) + 1
            part = part_of(calls[0][0], len(recording.blocks)) if calls else within
            if not calls and not within:
                continue  # the model runs without it
        inputs.append(SharedInput(matrices=tuple(names), statistics=run.statistics_of(names), part=part))
    return inputs
