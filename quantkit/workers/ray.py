"""The engine `ray`: tasks on this machine or on a cluster. Ray is imported here alone, and late."""

from __future__ import annotations

import os
import platform
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.runtime.machine.facts import read_cpu
from quantkit.workers.local import THREAD_VARIABLES
from quantkit.workers.paths import marked, require_paths
from quantkit.workers.process import outcome
from quantkit.workers.record import THREADS, Workers, WorkerSettings
from quantkit.workers.shared import Shared, shared_in_memory
from quantkit.workers.versions import installed_versions, require_versions

CONNECT_SECONDS = 3.0
PROBE_SECONDS = 120.0  # in which a host starts a worker and tells its versions
RETRIES = 3  # of a task whose worker was killed
STORE_BYTES = 512 << 20  # of results on this machine; Ray writes more of them to its disk
DEFAULT_WORKERS = 2


@contextmanager
def ray_workers(settings: WorkerSettings) -> Iterator[Workers]:
    """A task is a Ray task of one core, in the caller's working folder, which all hosts see."""
    ray = imported()
    cores = max(1, int(read_cpu().usable_cores))
    number = settings.number or min(DEFAULT_WORKERS, cores)
    connect(
        ray, address=settings.address, num_cpus=None if settings.address else number, store_bytes=STORE_BYTES
    )
    try:
        require_equal_hosts(
            ray, installed_versions(), read=(Path.cwd(), *settings.read), written=settings.written
        )
        variables = dict.fromkeys(THREAD_VARIABLES, str(THREADS))
        task = ray.remote(num_cpus=THREADS, max_retries=RETRIES, runtime_env={"env_vars": variables})(_called)
        if settings.address:
            number = max(1, int(ray.cluster_resources().get("CPU", 1)))

        def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            # A shared value is no part of the task: Ray passes it once to each host.
            plain = [None if isinstance(value, _Reference) else value for value in arguments]
            references = {
                str(place): value.reference
                for place, value in enumerate(arguments)
                if isinstance(value, _Reference)
            }
            sent = task.remote(str(Path.cwd()), function, plain, **references)
            return _result_of(ray, sent)

        yield Workers(
            number=number,
            submit=submit,
            share=lambda value: _Reference(ray.put(shared_in_memory(value))),
        )
    finally:
        ray.shutdown()


class _Reference:
    """A shared value in Ray's store."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference


def _called(folder: str, function: Any, arguments: list[Any], **shared: Shared) -> tuple[bool, Any]:
    """The outcome of a task; an error of the task is no error of Ray, which would wrap it."""
    os.chdir(folder)
    for place, value in shared.items():
        arguments[int(place)] = value
    return outcome(function, arguments)


def _result_of(ray: Any, reference: Any) -> Future[Any]:
    """The result of a task, or its error; an end of Ray's worker after all retries is refused."""
    result: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        try:
            is_result, value = done.result()
        except ray.exceptions.RayError as error:
            line = " ".join(str(error).split())[-300:]
            result.set_exception(InputError(f"Ray lost a task ({line})", where="--engine ray"))
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value) if is_result else result.set_exception(value)

    reference.future().add_done_callback(settle)
    return result


def imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "Ray is not installed", where="--engine ray", next_step="pip install 'quantkit-onnx[ray]'"
        ) from error
    return ray


def connect(ray: Any, *, address: str | None, num_cpus: int | None, store_bytes: int) -> None:
    """Start Ray on this machine, or join the cluster at the address."""
    options: dict[str, Any] = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    options["object_store_memory"] = store_bytes
    if address:
        _require_listener(address)
        options = {"address": address}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(**options, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise InputError(
            f"Ray cannot be reached ({error})",
            where=f"--address {address}" if address else "--engine ray",
            next_step="'ray status' on a host shows whether it runs; RAY_AUTH_TOKEN is its token",
        ) from error
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():  # Ray puts its own in their place
            signal.signal(number, handler)


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


def require_equal_hosts(
    ray: Any, versions: Mapping[str, str], *, read: Sequence[Path] = (), written: Sequence[Path] = ()
) -> None:
    """Refuse hosts that lack quantkit, the driver's versions of it and its libraries, or a shared folder."""
    with marked(written) as marks:
        _ask_hosts(ray, dict(versions), [path.absolute() for path in read], marks)


def _ask_hosts(ray: Any, versions: Mapping[str, str], read: Sequence[Path], marks: Sequence[Path]) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    require = ray.remote(num_cpus=0)(_differences)
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        place = OnNode(node_id=node["NodeID"], soft=False)
        name = node["NodeManagerHostname"]
        try:
            fault = ray.get(
                require.options(scheduling_strategy=place).remote(versions, read, marks),
                timeout=PROBE_SECONDS,
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


def _differences(
    versions: Mapping[str, str], read: Sequence[Path], marks: Sequence[Path]
) -> dict[str, str] | None:
    """The refusal of this host; None where its versions and folders are the driver's."""
    try:
        require_versions(versions, host=platform.node())
        require_paths(read, marks, host=platform.node())
    except InputError as refusal:
        return {name: getattr(refusal, name) for name in ("what", "where", "allowed", "next_step")}
    return None
