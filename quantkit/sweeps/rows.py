"""The row of a cell, and its record on disk.

The process that supervises a cell writes its record, on whichever host it runs, so that the record outlives
the driver. Every file is replaced in one step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.runtime.machine.disk import writing
from quantkit.runtime.manifest import require_whole

RECORDS = ".cells"  # folder of records and logs
FREE = "free some space, or choose a place that you may write to with -o; finished cells are kept"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cell: its names, its state, and where and how long it ran."""

    name: str
    model: str
    recipe: str
    target: str
    text: str
    key: str
    folder: str  # of the artifact, in the folder of the sweep
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    error: str | None = None
    failures: tuple[str, ...] = ()  # figures that could not be measured
    host: str | None = None
    processor: str | None = None
    num_cores: float | None = None
    attempts: int = 0
    seconds: float | None = None  # of work
    timed_seconds: float | None = None  # of it with all cores of the host
    waited_seconds: float | None = None  # for the turn of others


def record_path(output: Path, row: Row) -> Path:
    return output / RECORDS / f"{row.folder}.json"


def log_path(output: Path, row: Row) -> Path:
    return output / RECORDS / f"{row.folder}.log"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path, next_step=FREE):
        temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def recorded(output: Path, row: Row) -> Row:
    """The row as its record says; without a record of its key, the row itself."""
    try:
        record = read_json(record_path(output, row))
        names = {field.name for field in fields(Row)} - {"failures"}
        known = {name: value for name, value in record.items() if name in names}
        return Row(**known, failures=tuple(record["failures"])) if known.get("key") == row.key else row
    except (InputError, KeyError, TypeError):
        return row


def is_whole(folder: Path) -> bool:
    """Whether all files of an artifact are there as its manifest lists them."""
    try:
        return bool(require_whole(folder))
    except InputError:
        return False
