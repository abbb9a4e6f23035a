"""A finished part: its statistics are written, then it is listed in the index."""

from __future__ import annotations

from dataclasses import replace

from quantkit.quantization.calibration import running, store
from quantkit.quantization.calibration.group_pass import Pass


def write_totals(work: Pass, part: int, totals: dict[str, running.Running]) -> None:
    """Write a part's statistics; the sums are released on the way."""
    finished = {}
    for shared in work.parts[part]:
        sums = totals.pop(shared.name, None)
        if sums is not None and sums.num_rows:
            finished[shared.name] = running.finish(sums)
    if work.parts[part]:
        store.write_part(work.folder, part, finished)


def list_part(work: Pass, file: store.StatisticsFile) -> store.StatisticsFile:
    """List the next part, which is written, in the index, and remove what led to it."""
    part, located = file.done, dict(file.located)
    entries = store.entries_of(work.folder, part) if work.parts[part] else ()
    for shared in work.parts[part]:
        if shared.name in entries:
            located |= {
                name: (part, shared.name)
                for name, first in work.run.names.items()
                if first in shared.matrices
            }
    is_last = part == len(work.parts) - 1
    file = replace(file, located=located, done=part + 1, is_finished=is_last)
    store.write_index(file)
    store.clear_hidden(file.folder, keep=None if is_last else part + 1)
    store.clear_groups(file.folder, keep=None if is_last else part + 1)
    return file
