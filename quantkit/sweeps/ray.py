"""The engine `ray`: a task a cell, on this machine or on a cluster. Ray is imported here alone, and late.

A task supervises the process of its cell, so a killed worker takes its cell along, and Ray runs the task
again.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quantkit.errors import InputError
from quantkit.runtime.machine.facts import read_cpu
from quantkit.sweeps.engine import EngineSettings, RunJobs
from quantkit.sweeps.rows import Row
from quantkit.sweeps.supervise import Job, supervise
from quantkit.sweeps.versions import require_versions

CONNECT_SECONDS = 3.0
PROBE_SECONDS = 120.0  # in which a host starts a worker and tells its versions
RETRIES = 3  # of a task whose worker was killed
STORE_BYTES = 80 << 20  # of objects on this machine: records alone
DEFAULT_WORKERS = 2


@contextmanager
def ray_engine(settings: EngineSettings) -> Iterator[RunJobs]:
    ray = _imported()
    threads = _connect(ray, settings)
    try:
        _require_equal_hosts(ray, settings.versions)
        yield lambda jobs: _run(ray, jobs, threads)
    finally:
        ray.shutdown()


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "Ray is not installed", where="--engine ray", next_step="pip install 'quantkit-onnx[ray]'"
        ) from error
    return ray


def _connect(ray: Any, settings: EngineSettings) -> int:
    """Start Ray on this machine, or join the cluster at the address; threads of a cell."""
    cores = max(1, int(read_cpu().usable_cores))
    workers = settings.workers or min(DEFAULT_WORKERS, cores)
    threads = settings.threads or max(1, cores // workers)
    options: dict[str, Any] = {"address": "local", "num_cpus": workers * threads, "include_dashboard": False}
    options["object_store_memory"] = STORE_BYTES
    if settings.address:
        if settings.workers:
            raise InputError(
                "a cluster runs as many cells at once as its cores hold",
                where="--workers",
                next_step="set 'threads' of a cell in the sweep file",
            )
        _require_listener(settings.address)
        options = {"address": settings.address}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(**options, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise InputError(
            f"Ray cannot be reached ({error})",
            where=f"--address {settings.address}" if settings.address else "--engine ray",
            next_step="'ray status' on a host shows whether it runs; RAY_AUTH_TOKEN is its token",
        ) from error
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():  # Ray puts its own in their place
            signal.signal(number, handler)
    return threads


def _require_listener(address: str) -> None:
    """Refuse an address at which nothing listens within seconds; Ray itself waits for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"no cluster answers ({error})",
            where=f"--address {address}",
            allowed="HOST:PORT of a Ray head, or auto",
            next_step="'ray start --head' starts one",
        ) from error


def _require_equal_hosts(ray: Any, versions: Mapping[str, str]) -> None:
    """Refuse hosts that lack quantkit or have other versions of it and its libraries."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    require = ray.remote(num_cpus=0)(_differences)
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        place = OnNode(node_id=node["NodeID"], soft=False)
        name = node["NodeManagerHostname"]
        try:
            fault = ray.get(
                require.options(scheduling_strategy=place).remote(dict(versions)), timeout=PROBE_SECONDS
            )
        except ray.exceptions.RayError as error:
            line = " ".join(str(error).split())[-300:]
            raise InputError(
                f"quantkit does not start ({line})",
                where=f"host {name}",
                next_step="install the driver's versions there",
            ) from error
        if fault:
            raise InputError(**fault)


def _differences(versions: Mapping[str, str]) -> dict[str, str] | None:
    """The refusal of this host; None where its versions are the driver's."""
    try:
        require_versions(versions, host=platform.node())
    except InputError as refusal:
        return {name: getattr(refusal, name) for name in ("what", "where", "allowed", "next_step")}
    return None


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
