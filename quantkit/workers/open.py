"""Opens the workers of an engine, a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from quantkit.errors import InputError, not_one_of
from quantkit.workers.local import local_workers
from quantkit.workers.ray import ray_workers
from quantkit.workers.record import Workers, WorkerSettings

ENGINES: Mapping[str, Callable[[WorkerSettings], AbstractContextManager[Workers]]] = {
    "local": local_workers,
    "ray": ray_workers,
}


def require_engine(settings: WorkerSettings) -> None:
    """Refuse settings that no engine takes, before any work."""
    if settings.engine not in ENGINES:
        raise not_one_of(settings.engine, ENGINES, where="--engine")
    if settings.number is not None and settings.number < 1:
        raise InputError(f"{settings.number} workers", where="--workers", allowed="1 or more")
    if settings.engine == "local" and settings.address:
        raise InputError(
            "the engine 'local' runs on this machine", where="--address", next_step="--engine ray"
        )
    if settings.address and settings.number:
        raise InputError(
            "a cluster runs as many tasks at once as it has cores",
            where="--workers",
            next_step="leave --workers out, or --address",
        )


@contextmanager
def open_workers(settings: WorkerSettings) -> Iterator[Workers | None]:
    """Workers while the context lasts; None where everything runs in this process."""
    require_engine(settings)
    if settings.engine == "local" and settings.number is None:
        yield None
        return
    with ENGINES[settings.engine](settings) as workers:
        yield workers
