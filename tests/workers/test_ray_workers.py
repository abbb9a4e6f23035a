"""Tasks on two Ray workers of this machine, one of them killed."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from quantkit.errors import InputError
from quantkit.workers.open import open_workers, require_engine
from quantkit.workers.ray import require_equal_hosts
from quantkit.workers.record import WorkerSettings
from quantkit.workers.shared import opened
from quantkit.workers.versions import installed_versions

pytest.importorskip("ray", reason="pip install 'quantkit-onnx[ray]'")
pytestmark = [pytest.mark.once, pytest.mark.slow]


@pytest.fixture(scope="module")
def workers():
    with open_workers(WorkerSettings(number=2, engine="ray")) as workers:
        yield workers


def test_tasks_share_a_value_and_raise_their_errors(workers):
    shared = workers.share([1, 2, 3])
    assert workers.submit(opened, shared).result() == [1, 2, 3]
    assert workers.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    assert workers.submit(os.getcwd).result() == str(Path.cwd())
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        workers.submit(math.sqrt, -1).result()
    with pytest.raises(InputError) as refusal:
        workers.submit(require_engine, WorkerSettings(number=0)).result()
    assert refusal.value.where == "--workers"


def test_a_host_that_does_not_see_the_model_is_refused(workers, tmp_path):
    import ray

    require_equal_hosts(ray, installed_versions(), read=[tmp_path], written=[tmp_path / "statistics"])
    with pytest.raises(InputError, match=r"the host does not see .*absent") as refusal:
        require_equal_hosts(ray, installed_versions(), read=[tmp_path / "absent"])
    assert refusal.value.where.startswith("host ")


def test_the_task_of_a_killed_worker_is_done_again(workers):
    tasks = [workers.submit(time.sleep, 3.0) for _ in range(2)]
    killed = []

    def kill_a_worker():
        while not killed:
            time.sleep(0.1)
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "ray::_called" in " ".join(process.cmdline()) and not killed:
                        killed.append(process.pid)
                        process.kill()

    thread = threading.Thread(target=kill_a_worker, daemon=True)
    thread.start()
    assert [task.result() for task in tasks] == [None, None]
    assert len(killed) == 1
