"""Supervision of a cell's process, with processes that hang, fail, are killed, or wait for their turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from quantkit.runtime.machine.disk import LOCKS
from quantkit.sweeps import supervise as supervision
from quantkit.sweeps.rows import RECORDS, Row, record_path
from quantkit.sweeps.supervise import Job, supervise

pytestmark = [pytest.mark.once, pytest.mark.skipif(LOCKS is None, reason="no locks of files here")]
ROW = Row(name="a", model="m", recipe="r", target="cpu", text="", key="k", folder="a-k")
START = """
import json, os, signal, sys, time
from pathlib import Path
job = json.loads(sys.stdin.readline())
def say(**message): print(json.dumps(message), flush=True)
def ask(cores): say(asks=cores); sys.stdin.readline()
def end(error=None): say(error=error, failures=[], seconds=1.0, timed_seconds=0.0, waited_seconds=0.0)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def job(tmp_path):
    (tmp_path / RECORDS).mkdir()
    return Job(
        row=ROW,
        output=tmp_path,
        recipe={},
        versions={},
        needs={},
        trust_remote_code=False,
        time_limit_seconds=60.0,
        threads=None,
    )


def runs(monkeypatch, code):
    """Cells run this code."""
    monkeypatch.setattr(supervision, "COMMAND", (sys.executable, "-c", START + textwrap.dedent(code)))


def test_the_row_says_where_and_how_long(job, monkeypatch):
    runs(monkeypatch, "end()")
    row = supervise(job)
    assert (row.state, row.error, row.attempts, row.seconds) == ("done", None, 1, 1.0)
    assert row.host and row.processor and row.num_cores
    assert json.loads(record_path(job.output, ROW).read_text())["state"] == "done"


def test_an_error_is_in_the_row(job, monkeypatch):
    runs(monkeypatch, "end('scheme: no such file')")
    row = supervise(job)
    assert (row.state, row.error) == ("failed", "scheme: no such file")


def test_a_process_without_a_word_is_answered_with_its_last_lines(job, monkeypatch):
    runs(monkeypatch, "raise SystemExit('out of luck')")
    assert supervise(job).error == "the process ended with code 1: out of luck"


def test_a_cell_that_hangs_is_stopped_with_its_processes(job, monkeypatch):
    runs(
        monkeypatch,
        """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        Path(job["output"] + ".pid").write_text(str(child.pid))
        time.sleep(100)
        """,
    )
    limited = Job(**{name: getattr(job, name) for name in Job.__slots__} | {"time_limit_seconds": 1.5})
    row = supervise(limited)
    assert row.state == "failed"
    assert "the limit of a cell" in row.error
    child = int(Path(f"{job.output / ROW.folder}.pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        gone, _ = psutil.wait_procs([psutil.Process(child)], timeout=10)
        assert gone or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_the_system_kills_runs_once_more(job, monkeypatch):
    runs(
        monkeypatch,
        """
        mark = Path(job["output"] + ".mark")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        end()
        """,
    )
    row = supervise(job)
    assert (row.state, row.attempts) == ("done", 2)
    runs(monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    assert "SIGKILL ended the process 2 times" in supervise(job).error


def test_a_cell_is_paused_while_another_is_timed(job, monkeypatch):
    """Ticks of the cell, beside the time in which another holds all cores."""
    runs(
        monkeypatch,
        """
        with open(job["output"] + ".ticks", "w") as file:
            for _ in range(30):
                print(time.time(), file=file, flush=True)
                time.sleep(0.05)
        end()
        """,
    )
    code = (
        "import time\n"
        "from quantkit.sweeps.turns import open_turns\n"
        "with open_turns() as turns:\n"
        "    input()\n"
        "    while not turns.take(): time.sleep(0.01)\n"
        "    print(time.time(), flush=True)\n"
        "    time.sleep(1)\n"
        "    print(time.time(), flush=True)\n"
    )
    ticks = Path(f"{job.output / ROW.folder}.ticks")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as timed:
        said = []
        real = supervision._say

        def say(process, line):
            real(process, line)
            while not ticks.exists():
                time.sleep(0.01)
            timed.stdin.write("\n")
            timed.stdin.flush()
            said.append(line)

        monkeypatch.setattr(supervision, "_say", say)
        row = supervise(job)
        start, end = map(float, timed.stdout.read().split())
    assert said and row.state == "done"
    times = [float(line) for line in ticks.read_text().split()]
    assert len(times) == 30
    assert not [tick for tick in times if start < tick < end]
    assert row.waited_seconds > 0.9


def test_a_timed_part_has_all_cores_to_itself(job, monkeypatch):
    runs(
        monkeypatch,
        """
        ask("all cores")
        Path(job["output"] + ".timed").write_text(str(time.time()))
        ask("shared cores")
        end()
        """,
    )
    code = (
        "import time\n"
        "from quantkit.sweeps.turns import open_turns\n"
        "with open_turns() as turns:\n"
        "    print(turns.share(), flush=True)\n"
        "    time.sleep(1.5)\n"
        "    print(time.time(), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert supervise(job).state == "done"
        released = float(other.stdout.readline())
    begin = float(Path(f"{job.output / ROW.folder}.timed").read_text())
    assert begin > released, "it began while another computed"


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=LINUX)])
def test_a_cell_ends_with_its_supervisor_even_while_it_is_paused(stops):
    listens = "threading.Thread(target=cell._listen, args=(queue.Queue(),), daemon=True).start()"
    ends = "cell.end_with_parent()" if stops else listens
    cell = (
        "import queue, threading, time; from quantkit.sweeps import cell; "
        f"{ends}; print('ready', flush=True); time.sleep(100)"
    )
    code = (
        "import subprocess, sys, time\n"
        f"cell = subprocess.Popen([sys.executable, '-c', {cell!r}], process_group=0,\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "cell.stdout.readline()\n"
        "print(cell.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int(supervisor.stdout.readline()))
    if stops:
        os.killpg(process.pid, signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs([process], timeout=10)
    assert not alive
