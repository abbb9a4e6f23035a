"""The share of this machine that other programs took while a measurement ran: its caveat, in a number."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk


@contextmanager
def others() -> Iterator[Callable[[], float]]:
    """Gives, after the block, the cores that programs other than this one and its ended children used."""
    begin, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    share: list[float] = []
    yield lambda: share[0]
    seconds = time.perf_counter() - begin
    share.append(max(0.0, (_busy_seconds() - busy) - (_own_seconds() - own)) / seconds)


def _busy_seconds() -> float:
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(count for column, count in enumerate(ticks) if column not in IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
