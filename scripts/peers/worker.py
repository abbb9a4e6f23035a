"""A system that stays open and is timed in short turns: the processes of all systems wait while one works.

A machine has phases of minutes in which everything, or memory alone, is slower. Systems timed one after the
other meet different phases, and the ratio of two of them says more of the machine than of either; in turns of
a second all of them meet the same ones. What waits reads its input and computes nothing, once the threads
of its last turn have gone to sleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from peers.workplace import failure, killed_in_time, start

PAUSE_S = 0.25  # threads of OpenMP wait with their hands on the processor for up to 0.2 s


def busy_seconds() -> float:
    """What all processes together have computed so far; 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Worker:
    """One open process."""

    def __init__(self, command: list[str], log: Path) -> None:
        """Start it and wait until it has opened its model."""
        self.log = log
        self.process = start(command, log, stdin=subprocess.PIPE)
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next line of JSON; other lines, which libraries print, are passed over."""
        assert self.process.stdout is not None
        with killed_in_time(self.process):
            for line in self.process.stdout:
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
        raise failure(self.log, [], f"exit {self.process.wait()}")

    def turn(self) -> tuple[dict[str, list[float]], float]:
        """(what it measured in one turn, the share of all processors that others took meanwhile)."""
        assert self.process.stdin is not None
        time.sleep(PAUSE_S)
        begin, busy = time.perf_counter(), busy_seconds()
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError as error:
            raise failure(self.log, [], str(error.strerror)) from error
        found = self.answer()
        seconds, others = time.perf_counter() - begin, busy_seconds() - busy - found["cpu_seconds"]
        return found["samples"], max(0.0, others / seconds / (os.cpu_count() or 1))

    def close(self) -> None:
        """An end of input ends it; what does not end is ended."""
        try:
            self.process.communicate(timeout=20)
        except (subprocess.TimeoutExpired, OSError):
            self.process.kill()
            self.process.wait()
