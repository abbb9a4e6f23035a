"""Turns at the cores of a host, so that a timed part shares them with no other cell.

Two lock files for each host and user. `cores` is held shared by every cell that computes and exclusively by
one that is timed. `turn` is held exclusively by the cell that is timed or waits until the others have
stopped. A cell that finds `turn` taken is paused and gives `cores` up. The operating system releases both
locks whenever a process ends, so that a killed cell stops nobody.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.runtime.machine.cache import cache_folder
from quantkit.runtime.machine.disk import LOCKS, OTHER_CACHE, open_lock, writing


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Descriptors of the two lock files, of one cell."""

    cores: int
    turn: int

    def share(self) -> bool:
        """Take a share of the cores; False while another cell is timed or waits to be."""
        if not _try(self.turn, "LOCK_SH"):
            return False
        is_shared = _try(self.cores, "LOCK_SH")
        _release(self.turn)
        return is_shared

    def take(self) -> bool:
        """Take all cores; False while others compute. They stop, because the turn is held from now on."""
        return _try(self.turn, "LOCK_EX") and _try(self.cores, "LOCK_EX")

    def is_wanted(self) -> bool:
        """Whether another cell is timed or waits to be."""
        if not _try(self.turn, "LOCK_SH"):
            return True
        _release(self.turn)
        return False

    def give_up(self) -> None:
        _release(self.cores)
        _release(self.turn)


@contextlib.contextmanager
def open_turns() -> Iterator[Turns]:
    """The turns of this host; without locks of files every cell has all turns."""
    if LOCKS is None:
        yield Turns(cores=-1, turn=-1)
        return
    folder = cache_folder() / "locks"
    with writing(folder, next_step=OTHER_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
        cores, turn = (open_lock(folder / f"{name}-{platform.node()}.lock") for name in ("cores", "turn"))
    try:
        yield Turns(cores=cores, turn=turn)
    finally:
        os.close(cores)
        os.close(turn)


def _try(descriptor: int, mode: str) -> bool:
    if LOCKS is None:
        return True
    try:
        LOCKS.flock(descriptor, getattr(LOCKS, mode) | LOCKS.LOCK_NB)
    except OSError:
        return False
    return True


def _release(descriptor: int) -> None:
    if LOCKS is not None:
        LOCKS.flock(descriptor, LOCKS.LOCK_UN)
