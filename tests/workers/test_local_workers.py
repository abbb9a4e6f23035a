"""Local workers: processes that raise, are killed, or die at every try."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import wait

import psutil
import pytest

from quantkit.errors import InputError
from quantkit.workers.open import open_workers, require_engine
from quantkit.workers.record import WorkerSettings
from quantkit.workers.shared import opened

pytestmark = pytest.mark.once


def workers_of(number):
    return open_workers(WorkerSettings(number=number))


def processes():
    return [
        process
        for process in psutil.Process().children()
        if "quantkit.workers.process" in " ".join(process.cmdline())
    ]


def test_tasks_run_at_once_in_processes_of_one_thread_that_end():
    with workers_of(2) as workers:
        sleeping = [workers.submit(time.sleep, 0.2) for _ in range(2)]
        wait(sleeping)
        pids = {workers.submit(os.getpid).result() for _ in range(20)}
        begin = time.perf_counter()
        wait([workers.submit(time.sleep, 0.5) for _ in range(4)])
        assert time.perf_counter() - begin < 1.8, "four sleeps of half a second on two workers"
        assert pids <= {process.pid for process in processes()}
        assert workers.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    assert not processes()


def test_an_error_of_a_task_is_raised_and_ends_no_worker():
    with workers_of(1) as workers:
        pid = workers.submit(os.getpid).result()
        with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
            workers.submit(math.sqrt, -1).result()
        assert workers.submit(os.getpid).result() == pid


def test_a_refusal_keeps_its_parts():
    with workers_of(1) as workers, pytest.raises(InputError) as refusal:
        workers.submit(require_engine, WorkerSettings(number=0)).result()
    parts = (refusal.value.what, refusal.value.where, refusal.value.allowed)
    assert parts == ("0 workers", "--workers", "1 or more")


def test_the_task_of_a_killed_worker_is_done_by_another(capfd):
    with workers_of(2) as workers:
        wait([workers.submit(time.sleep, 0.2) for _ in range(2)])
        tasks = [workers.submit(math.factorial, 5), *(workers.submit(time.sleep, 1.0) for _ in range(2))]
        time.sleep(0.3)
        victim, other = processes()
        victim.kill()
        assert tasks[0].result() == 120
        assert [task.result() for task in tasks[1:]] == [None, None]
        assert other.is_running(), "its task is not lost with the other's"
    assert f"worker {victim.pid} ended (SIGKILL); another one does its task" in capfd.readouterr().err


def test_a_task_that_ends_every_worker_is_refused_in_the_end():
    with workers_of(1) as workers:
        with pytest.raises(InputError, match=r"3 workers ended at the same task.*SIGABRT"):
            workers.submit(os.abort).result()
        assert workers.submit(math.factorial, 5).result() == 120


def test_a_shared_value_is_opened_once_by_a_worker():
    with workers_of(1) as workers:
        shared = workers.share(list(range(10)))
        assert workers.submit(opened, shared).result() == list(range(10))
        shared.file.unlink()
        assert workers.submit(opened, shared).result() == list(range(10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (WorkerSettings(number=0), "0 workers"),
        (WorkerSettings(number=1, engine="slurm"), "'slurm'.*local, ray"),
        (WorkerSettings(address="auto"), "runs on this machine"),
        (WorkerSettings(number=2, engine="ray", address="auto"), "as many tasks at once as it has cores"),
    ],
)
def test_settings_that_no_engine_takes_are_refused(settings, message):
    with pytest.raises(InputError, match=message), open_workers(settings):
        pass
