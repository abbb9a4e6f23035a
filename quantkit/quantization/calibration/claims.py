"""Claims: which of several processes does a piece of work in a folder that they share, on one host or many.

A claim is a file that one process creates exclusively. It lapses after some minutes, or with its process
where that can be seen, so that nothing waits for a dead host. Two processes that do the same work write the
same bytes and rename them into place: a lapsed claim costs time and nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from pathlib import Path

import psutil

from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.quantization.calibration.store import replacing

LEASE_SECONDS = 600.0
Owner = dict[str, str | int]


def new_owner() -> Owner:
    """This process, as the owner of claims that its workers make."""
    return {"host": platform.node(), "process": os.getpid(), "name": uuid.uuid4().hex}


def claim(path: Path, owner: Owner) -> bool:
    """Whether the work is the owner's: unclaimed so far, its own, or of an owner that is gone."""
    text = json.dumps(owner)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if not _has_lapsed(path, owner):
            return False
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    return True


def give_up(path: Path) -> None:
    path.unlink(missing_ok=True)


def _has_lapsed(path: Path, owner: Owner) -> bool:
    try:
        age = time.time() - path.stat().st_mtime
        holder = read_json(path)
    except (InputError, OSError):  # being written, or given up just now
        return not path.exists()
    if holder == owner or age > LEASE_SECONDS:
        return True
    return holder.get("host") == platform.node() and not psutil.pid_exists(int(holder.get("process", 0)))
