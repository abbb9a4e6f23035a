"""The results of a sweep: its rows with the figures of their artifacts, for sweep.json, table and page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.report.comparison import Comparison, compare_reports
from quantkit.runtime.machine.disk import LOCKS, open_lock, writing
from quantkit.sweeps.rows import FREE, RECORDS, Row, is_whole, recorded

RESULTS_FILE = "sweep.json"
PAGE_FILE = "sweep.html"
LOCK = ".sweep.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    output: Path
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]  # one for each model and text
    document: dict[str, Any]  # the content of sweep.json

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.state == "failed")


@contextlib.contextmanager
def sole_sweep(output: Path) -> Iterator[None]:
    """The folder of a sweep, for one driver at a time; a sweep that is refused leaves none behind."""
    if output.exists() and not output.is_dir():
        raise InputError("a file is in the way", where=str(output), next_step="choose another folder with -o")
    with writing(output, next_step=FREE):
        output.mkdir(parents=True, exist_ok=True)
        lock = open_lock(output / LOCK)
    try:
        _require_sole(lock, output)
        try:
            yield
        finally:
            if not (output / RECORDS).exists():
                (output / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other files lie there
                    output.rmdir()
    finally:
        os.close(lock)


def _require_sole(lock: int, output: Path) -> None:
    if LOCKS is None:
        return
    try:
        LOCKS.flock(lock, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
        if not os.fstat(lock).st_nlink:  # another sweep has removed it at its end
            raise FileNotFoundError(output / LOCK)
    except OSError as error:
        raise InputError(
            "another sweep writes this folder",
            where=str(output),
            next_step="wait for it to end, or choose another folder with -o",
        ) from error


def with_state(output: Path, row: Row) -> Row:
    """The row at the start of a sweep: done where its artifact is whole, failed where its record says so."""
    row = recorded(output, row)
    if is_whole(output / row.folder):
        return replace(row, state="done", error=None)
    return row if row.state == "failed" else replace(row, state="waiting")


def results_of(output: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> SweepResult:
    """Rows with their figures; ratios are to the first row of the same model and text."""
    from quantkit.pipeline.compare import stored_report  # brings torch, which no refusal of a sweep waits for

    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.state == "done":
            groups.setdefault((row.model, row.text), []).append(row)
    figures: dict[str, dict[str, Any]] = {}
    comparisons = []
    for group in groups.values():
        comparison = compare_reports([stored_report(output / row.folder) for row in group])
        comparisons.append(comparison)
        for row, artifact in zip(group, comparison.artifacts, strict=True):
            figures[row.name] = {
                "figures": artifact.values,
                "ratios": artifact.ratios,
                "not_compared": artifact.not_compared,
            }
    document = {**settings, "rows": [{**asdict(row), **figures.get(row.name, {})} for row in rows]}
    return SweepResult(output=output, rows=tuple(rows), comparisons=tuple(comparisons), document=document)
