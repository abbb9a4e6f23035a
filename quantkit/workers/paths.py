"""Folders that all hosts of a job share, under one path.

A host of a cluster may lack the disk with the model, or have another disk under the path of the statistics:
groups that it writes there would be lost. So the driver leaves a file in each folder that workers write, and
every host looks for it before the work.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from quantkit.errors import InputError
from quantkit.runtime.machine.disk import writing

REMEDY = (
    "mount the driver's disk there under this path, or name a folder that all hosts see with --statistics"
)


@contextmanager
def marked(folders: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """A file of the driver's in each of these folders, while hosts look for it."""
    marks: list[Path] = []
    new = [folder for folder in folders if not folder.exists()]
    try:
        for folder in folders:
            mark = folder.absolute() / f".seen-{uuid.uuid4().hex}"
            with writing(folder, next_step=REMEDY):
                folder.mkdir(parents=True, exist_ok=True)
                mark.touch()
            marks.append(mark)
        yield tuple(marks)
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)
        for folder in new:
            with suppress(OSError):
                folder.rmdir()


def require_paths(read: Sequence[Path], marks: Sequence[Path], *, host: str) -> None:
    """Refuse a host that lacks a path that is read, or the driver's mark in a folder that is written."""
    for path in read:
        if not path.exists():
            raise InputError(f"the host does not see {path}", where=f"host {host}", next_step=REMEDY)
    for mark in marks:
        if not mark.exists():
            raise InputError(
                f"the host has not the driver's disk at {mark.parent}", where=f"host {host}", next_step=REMEDY
            )
        if not os.access(mark.parent, os.W_OK):
            raise InputError(f"{mark.parent} cannot be written there", where=f"host {host}", next_step=REMEDY)
