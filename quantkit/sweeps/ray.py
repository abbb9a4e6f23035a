"""The engine `ray`: a task a cell, on this machine or on a cluster.

A task supervises the process of its cell, so a killed worker takes its cell along, and Ray runs the task
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quantkit.errors import InputError
from quantkit.runtime.machine.facts import read_cpu
from quantkit.sweeps.engine import EngineSettings, RunJobs
from quantkit.sweeps.rows import Row
from quantkit.sweeps.supervise import Job, supervise
from quantkit.workers.ray import DEFAULT_WORKERS, RETRIES, connect, imported, require_equal_hosts

STORE_BYTES = 80 << 20  # of objects on this machine: records alone


@contextmanager
def ray_engine(settings: EngineSettings) -> Iterator[RunJobs]:
    ray = imported()
    threads = _connect(ray, settings)
    try:
        require_equal_hosts(ray, settings.versions)
        yield lambda jobs: _run(ray, jobs, threads)
    finally:
        ray.shutdown()


def _connect(ray: Any, settings: EngineSettings) -> int:
    """Start Ray on this machine, or join the cluster at the address; threads of a cell."""
    cores = max(1, int(read_cpu().usable_cores))
    workers = settings.workers or min(DEFAULT_WORKERS, cores)
    threads = settings.threads or max(1, cores // workers)
    if settings.address and settings.workers:
        raise InputError(
            "a cluster runs as many cells at once as its cores hold",
            where="--workers",
            next_step="set 'threads' of a cell in the sweep file",
        )
    connect(ray, address=settings.address, num_cpus=workers * threads, store_bytes=STORE_BYTES)
    return threads


def _run(ray: Any, jobs: Sequence[Job], threads: int) -> Iterator[Row]:
    task = ray.remote(max_retries=RETRIES)(supervise)
    pending = {
        task.options(num_cpus=threads, resources=dict(job.needs)).remote(replace(job, threads=threads)): job
        for job in jobs
    }
    while pending:
        (ready, *_), _ = ray.wait(list(pending), num_returns=1)
        job = pending.pop(ready)
        try:
            yield ray.get(ready)
        except ray.exceptions.RayError as error:
            line = " ".join(str(error).split())
            yield replace(job.row, state="failed", error=f"Ray: {type(error).__name__}: {line}")
