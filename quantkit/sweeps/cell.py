"""The process of one cell: `python -m quantkit.sweeps.cell`, started by `quantkit.sweeps.supervise`.

Its first line on stdin is the job. Around a timed stage it asks the supervisor, by a line on stdout, for all
cores or for a share of them, and waits for a line on stdin. It ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from quantkit.errors import InputError
from quantkit.progress import Advance, Progress
from quantkit.workers.process import end_with_parent

TIMED = ("latency", "roofline", "times of products")  # stages whose figure is a time of this machine
ALL_CORES, SHARED_CORES = "all cores", "shared cores"


class SupervisedProgress(Progress):
    """Stages that are timed begin when no other cell computes on this host."""

    def __init__(self, answers: queue.Queue[str], requests: IO[str]) -> None:
        super().__init__(file=sys.stderr)
        self.waited_seconds = 0.0
        self._answers = answers
        self._requests = requests

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "") -> Iterator[Advance]:
        if name not in TIMED:
            with super().stage(name, total=total, unit=unit) as advance:
                yield advance
            return
        self._ask(ALL_CORES)
        try:
            with super().stage(name, total=total, unit=unit) as advance:
                yield advance
        finally:
            self._ask(SHARED_CORES)

    def _ask(self, cores: str) -> None:
        start = time.perf_counter()
        print(json.dumps({"asks": cores}), file=self._requests, flush=True)
        self._answers.get()
        self.waited_seconds += time.perf_counter() - start


def main() -> None:
    end_with_parent()
    requests = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints goes to the log
    job = json.loads(sys.stdin.readline())
    answers: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(answers,), daemon=True).start()
    result = _run(job, SupervisedProgress(answers, requests))
    print(json.dumps(result), file=requests, flush=True)


def _listen(answers: queue.Queue[str]) -> None:
    """Pass the supervisor's lines on; end this process and those that it started when it is gone."""
    for line in sys.stdin:
        answers.put(line)
    if os.name == "posix":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _run(job: Mapping[str, Any], progress: SupervisedProgress) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        from quantkit.pipeline.quantize import Run, run
        from quantkit.recipe import check_recipe
        from quantkit.workers.versions import require_versions

        require_versions(job["versions"], host=job["host"])
        settings = Run(
            output=Path(job["output"]), force=True, trust_remote_code=job["trust_remote_code"], quiet=True
        )
        artifact = run(check_recipe(job["recipe"], where="the sweep"), settings, progress=progress)
        failures, error = list(artifact.report.failures), None
    except InputError as refusal:
        failures, error = [], str(refusal)
    except Exception as fault:
        traceback.print_exc()
        failures, error = [], f"{type(fault).__name__}: {' '.join(str(fault).split())}"
    return {
        "error": error,
        "failures": failures,
        "seconds": time.perf_counter() - start - progress.waited_seconds,
        "timed_seconds": sum(progress.seconds.get(name, 0.0) for name in TIMED),
        "waited_seconds": progress.waited_seconds,
    }


if __name__ == "__main__":
    main()
