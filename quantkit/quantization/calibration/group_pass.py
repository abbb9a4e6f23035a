"""One part of the pass on one group of windows: its sums, and the hidden states for the next part.

A part is what runs before the blocks, a block, or what runs after them; where the whole model runs at once,
it is a share of its inputs, whose statistics fit into memory together. Groups depend on each other nowhere,
so any process may run one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from quantkit.errors import InputError
from quantkit.quantization.calibration import running, store
from quantkit.quantization.calibration.inputs import CalibrationRun, SharedInput
from quantkit.quantization.calibration.recording import Recording, is_unchanged
from quantkit.quantization.calibration.replay import (
    NotBlockwiseError,
    forward,
    replay,
    require_as_recorded,
    run_after,
    run_before,
)
from quantkit.quantization.calibration.store import BLOCKS
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.quantization.modules import watching_inputs


@dataclass(kw_only=True, slots=True)
class Held:
    """A shared input that some of its readers have not read yet."""

    x: Tensor
    version: int
    call: int  # index of the call
    num_readers: int = 1


@dataclass(kw_only=True, slots=True)
class Watch:
    """Running statistics of one part of the pass on one group, which hooks fill."""

    is_open: bool = True
    group: int = 0
    num_groups: int = 1
    running: dict[str, running.Running] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)  # of every matrix
    held: dict[str, Held] = field(default_factory=dict)  # by the name of the shared input
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A calibration run, how its model is run, and which inputs each part of it collects."""

    run: CalibrationRun
    recordings: Mapping[int, Recording]  # by batch size
    kind: str  # one of `WAYS`
    parts: tuple[tuple[SharedInput, ...], ...]
    folder: Path

    @property
    def recording(self) -> Recording:
        """That of the first batch."""
        return self.recordings[min(self.run.batch, len(self.run.tokens_BT))]


def run_group(
    work: Pass, part: int, group: int, on_batch: Callable[[int], None] = lambda num_windows: None
) -> dict[str, running.Running]:
    """Running statistics by the name of the input; `on_batch` gets the windows of the text so far."""
    windows, num_groups = work.run.groups[group], len(work.run.groups)
    num_blocks = len(work.recording.blocks) if work.kind == BLOCKS else part
    watch = Watch(is_open=part <= num_blocks, group=group, num_groups=num_groups)

    def outputs() -> Iterator[Tensor]:
        """The hidden states after a part, batch by batch; of the part after the blocks there are none."""
        for begin, windows_BT in work.run.batches(windows):
            if work.kind == BLOCKS:
                yield from _run_part(work, part, group, begin, windows_BT, watch)
            else:
                forward(work.run.module, windows_BT)
            on_batch(begin + len(windows_BT))

    with _collecting(work.run, work.parts[part], watch):
        if work.kind == BLOCKS and part + 1 < len(work.parts):
            store.write_hidden(work.folder, part + 1, outputs(), group)
        else:
            deque(outputs(), maxlen=0)
    if num_groups > 1:
        for sums in watch.running.values():
            running.close(sums)
    return watch.running


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
                watch.running[name] = running.start(
                    x.shape[-1],
                    shared.statistics,
                    run.seed,
                    group=watch.group,
                    num_groups=watch.num_groups,
                )
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


def _run_part(
    work: Pass, part: int, group: int, begin: int, windows_BT: Tokens, watch: Watch
) -> Iterator[Tensor]:
    """One part on one batch: before the blocks, a block, or after them."""
    module, recording = work.run.module, work.recordings[len(windows_BT)]
    if part == 0:
        yield run_before(module, windows_BT, recording.blocks[0])
        return
    assert recording.like is not None
    first = begin - work.run.groups[group].start
    hidden_BTH = store.read_hidden(work.folder, part, first, recording.like, group)
    hidden_BTH = hidden_BTH.to(recording.like.device)
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
    run_after(module, windows_BT, recording.blocks, hidden_BTH, open_watch)
