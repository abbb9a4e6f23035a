"""The engine `local`: worker processes on this machine.

A thread of the caller owns one process, passes it a task and waits for the result. Where the process is
killed, its thread starts another one and passes it the task again; the other workers notice nothing.
`ProcessPoolExecutor` would end them all.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import InputError
from quantkit.runtime.machine.disk import temporary_folder
from quantkit.workers.record import THREADS, Workers, WorkerSettings
from quantkit.workers.shared import shared_in_file

COMMAND = (sys.executable, "-m", "quantkit.workers.process")
MOST_KILLS = 3  # of the workers of one task
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PICKLE_ENDS = (EOFError, pickle.UnpicklingError, OSError)  # of a result whose writer was killed


@dataclass(kw_only=True, slots=True)
class _Processes:
    """The processes by the thread that owns them."""

    waiting: list[subprocess.Popen[bytes]]  # started, and owned by no thread yet
    by_thread: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True

    def own(self) -> None:
        """Give this thread its process."""
        with self.lock:
            self.by_thread[threading.get_ident()] = self.waiting.pop()

    def renew(self) -> None:
        """Start another process for this thread."""
        with self.lock:
            if not self.is_open:
                raise InterruptedError("the workers are closed")
            self.by_thread[threading.get_ident()] = _started()

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        task = pickle.dumps((function, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        name = "signal 0"
        for _ in range(MOST_KILLS):
            process = self.by_thread[threading.get_ident()]
            assert process.stdin and process.stdout
            try:
                process.stdin.write(task)
                process.stdin.flush()
                is_result, result = pickle.load(process.stdout)
            except PICKLE_ENDS:
                name = _ending(process)
                self.renew()
                print(
                    f"quantkit: worker {process.pid} ended ({name}); another one does its task",
                    file=sys.stderr,
                )
                continue
            if is_result:
                return result
            raise result
        raise InputError(
            f"{MOST_KILLS} workers ended at the same task, the last by {name}",
            where="--workers",
            next_step="their memory may not have sufficed; try fewer workers",
        )

    def end(self) -> None:
        with self.lock:
            self.is_open = False
            processes = [*self.waiting, *self.by_thread.values()]
        for process in processes:
            process.kill()
        for process in processes:
            for stream in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):
                    stream and stream.close()
            process.wait()


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())


def _ending(process: subprocess.Popen[bytes]) -> str:
    process.kill()  # where it only closed its output
    code = process.wait()
    return signal.Signals(-code).name if code < 0 else f"code {code}"


def _environment() -> dict[str, str]:
    """The process imports this package, wherever its caller found it."""
    package = str(Path(quantkit.__file__).parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = paths if package in paths else [*paths, package]
    threads = dict.fromkeys(THREAD_VARIABLES, str(THREADS))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        **threads,
    }


@contextmanager
def local_workers(settings: WorkerSettings) -> Iterator[Workers]:
    assert settings.number is not None
    processes = _Processes(waiting=[_started() for _ in range(settings.number)])  # they import meanwhile
    pool = ThreadPoolExecutor(settings.number, "worker", processes.own)
    try:
        with temporary_folder() as folder:
            yield Workers(
                number=settings.number,
                submit=lambda function, *arguments: pool.submit(processes.run, function, arguments),
                share=partial(shared_in_file, folder=folder),
            )
    finally:
        processes.end()
        pool.shutdown(cancel_futures=True)
