"""Supervises the process of one cell: its turns at the cores, its time limit, its end and its record."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import quantkit
from quantkit.runtime.machine.facts import read_cpu
from quantkit.sweeps.cell import ALL_CORES
from quantkit.sweeps.rows import Row, is_whole, log_path, record_path, recorded, write_json
from quantkit.sweeps.turns import Turns, open_turns

COMMAND = (sys.executable, "-m", "quantkit.sweeps.cell")
POLL_SECONDS = 0.05
MOST_KILLS = 2  # of a cell's process by the operating system, for lack of memory as a rule
LOG_LINES = 3  # of a process that ended without a word


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A cell with everything that the host needs which runs it."""

    row: Row
    output: Path  # folder of the sweep
    recipe: dict[str, Any]
    versions: Mapping[str, str]  # of the driver
    needs: Mapping[str, float]
    trust_remote_code: bool
    time_limit_seconds: float
    threads: int | None  # outside of the timed part; None: as many as the libraries take


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The end of a process: its result, or the reason why there is none."""

    result: Mapping[str, Any]
    paused_seconds: float
    is_killed: bool  # by the operating system


def supervise(job: Job) -> Row:
    """Run a cell to its end; a whole artifact of its key is kept as it is."""
    cpu = read_cpu()
    row = recorded(job.output, job.row)
    if is_whole(job.output / row.folder):
        return _keep(job, replace(row, state="done", error=None))
    row = replace(row, host=platform.node(), processor=cpu.model, num_cores=cpu.usable_cores)
    for _ in range(MOST_KILLS):
        row = _keep(job, replace(row, state="running", error=None, attempts=row.attempts + 1))
        with open_turns() as turns:
            while not turns.share():
                time.sleep(POLL_SECONDS)
            ending = _run(job, row, turns)
        if not ending.is_killed:
            break
    result = ending.result
    return _keep(
        job,
        replace(
            row,
            state="failed" if result["error"] else "done",
            error=result["error"],
            failures=tuple(result.get("failures", ())),
            seconds=max(0.0, result["seconds"] - ending.paused_seconds) if "seconds" in result else None,
            timed_seconds=result.get("timed_seconds"),
            waited_seconds=result.get("waited_seconds", 0.0) + ending.paused_seconds,
        ),
    )


def _keep(job: Job, row: Row) -> Row:
    write_json(record_path(job.output, row), asdict(row))
    return row


def _run(job: Job, row: Row, turns: Turns) -> Ending:
    with (
        log_path(job.output, row).open("ab") as log,
        subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(job),
            process_group=0,  # it is paused and ended with the processes that it starts
        ) as process,
    ):
        try:
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_read, args=(process, lines), daemon=True).start()
            _say(process, json.dumps(_described(job, row)))
            return _watch(process, lines, job, row, turns)
        finally:
            _signal(process, "SIGKILL")


def _environment(job: Job) -> dict[str, str]:
    """The process imports this package, wherever its supervisor found it."""
    package = str(Path(quantkit.__file__).parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = paths if package in paths else [*paths, package]
    threads = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", **threads}


def _described(job: Job, row: Row) -> dict[str, Any]:
    return {
        "recipe": job.recipe,
        "output": str(job.output / row.folder),
        "versions": dict(job.versions),
        "host": row.host,
        "trust_remote_code": job.trust_remote_code,
    }


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it has ended, which its output will show
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _signal(process: subprocess.Popen[str], name: str) -> None:
    """Signal the process and those that it started; where there are no groups, end the process."""
    if os.name != "posix":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, getattr(signal, name))


def _watch(
    process: subprocess.Popen[str], lines: queue.Queue[str | None], job: Job, row: Row, turns: Turns
) -> Ending:
    """Answer the process's requests for cores and pause it in the turns of others, until it ends."""
    seconds = paused_seconds = 0.0
    asked = ""  # cores that the process waits for
    holds_all = is_paused = False
    for line, passed in _polled(lines):
        if is_paused:
            paused_seconds += passed
        elif not asked:
            seconds += passed
        if seconds > job.time_limit_seconds:
            _signal(process, "SIGKILL")
            error = f"stopped after {job.time_limit_seconds / 60:g} minutes, the limit of a cell"
            return Ending(result={"error": error}, paused_seconds=paused_seconds, is_killed=False)
        message = json.loads(line) if line else {}
        if "error" in message:
            return Ending(result=message, paused_seconds=paused_seconds, is_killed=False)
        if "asks" in message:
            asked = message["asks"]
            turns.give_up()
        if asked:
            if turns.take() if asked == ALL_CORES else turns.share():
                holds_all, asked = asked == ALL_CORES, ""
                _say(process, "go")
        elif is_paused and turns.share():
            is_paused = False
            _signal(process, "SIGCONT")
        elif not (is_paused or holds_all) and turns.is_wanted():
            is_paused = True
            _signal(process, "SIGSTOP")
            turns.give_up()
    code = process.wait()
    if code < 0:
        name = signal.Signals(-code).name
        error = f"{name} ended the process {MOST_KILLS} times; its memory may not have sufficed"
        return Ending(result={"error": error}, paused_seconds=paused_seconds, is_killed=True)
    last = log_path(job.output, row).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    error = f"the process ended with code {code}: {' | '.join(last)}"
    return Ending(result={"error": error}, paused_seconds=paused_seconds, is_killed=False)


def _polled(lines: queue.Queue[str | None]) -> Iterator[tuple[str, float]]:
    """(a line or "", seconds since the last one), until the process closes its output."""
    last = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            line = ""
        if line is None:
            return
        now = time.monotonic()
        yield line, now - last
        last = now
