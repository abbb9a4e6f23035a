"""Peak resident memory of a command, and the time to read bytes from memory.

The operating system reports the peak of a process after its end, which misses no peak. On Linux a child
inherits the peak of its parent, so a small child of a large parent would look large. A bare interpreter
therefore starts the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from quantkit.runtime.machine.disk import temporary_folder

POLL_SECONDS = 0.005
GB = 1e9
# Runs a command, then writes its exit status and peak; wait4 counts KiB on Linux, bytes on macOS.
LAUNCHER = """
import json, os, sys
result, command = sys.argv[1], sys.argv[2:]
process = os.posix_spawnp(command[0], command, os.environ)
_, status, usage = os.wait4(process, 0)
peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
with open(result, "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), peak], file)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRun:
    peak_bytes: int
    seconds: float
    exit_code: int  # negative: the signal that ended it
    output: str
    errors: str


def run_and_measure(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> ChildRun:
    """Run a command to its end; the peak is of its largest process."""
    with temporary_folder() as folder:
        output, errors, result = (folder / name for name in ("output", "errors", "result"))
        # Files instead of pipes: a full pipe blocks the child until it is read.
        with output.open("wb") as out, errors.open("wb") as err:
            start = time.perf_counter()
            if os.name == "nt":
                exit_code, peak_bytes = _poll(command, out.fileno(), err.fileno(), environment)
            else:
                launch = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(result), *command]
                # A session of its own, so that an interrupt here can end the command too.
                process = subprocess.Popen(
                    launch, stdout=out, stderr=err, env=environment, start_new_session=True
                )
                try:
                    process.wait()
                except BaseException:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    raise
            seconds = time.perf_counter() - start
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (output, errors)]
        if os.name != "nt":
            if not result.exists():
                reason = (texts[1].strip().splitlines() or ["no reason given"])[-1]
                raise OSError(f"'{command[0]}' could not be run: {reason}")
            exit_code, peak_bytes = json.loads(result.read_text(encoding="utf-8"))
    return ChildRun(
        peak_bytes=peak_bytes, seconds=seconds, exit_code=exit_code, output=texts[0], errors=texts[1]
    )


def _poll(
    command: Sequence[str], out: int, err: int, environment: Mapping[str, str] | None
) -> tuple[int, int]:
    """Run a command on Windows, which reports the peak only while the process lives."""
    process = psutil.Popen(list(command), stdout=out, stderr=err, env=environment)
    peak_bytes = 0
    while process.poll() is None:
        try:
            memory = process.memory_info()
        except psutil.Error:  # the process ended between the two calls
            break
        peak_bytes = max(peak_bytes, getattr(memory, "peak_wset", memory.rss))
        time.sleep(POLL_SECONDS)
    return int(process.wait()), peak_bytes


def floor_ms(*, bytes_read: float, bandwidth_gb_per_s: float) -> float:
    """Milliseconds to read bytes at a memory bandwidth; 1 GB is 1e9 bytes."""
    assert bytes_read > 0, bytes_read
    assert bandwidth_gb_per_s > 0, bandwidth_gb_per_s
    return bytes_read / (bandwidth_gb_per_s * GB) * 1e3
