"""Workers as their caller sees them: a number, a way to submit a task, and a way to share a value."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THREADS = 1  # of a worker's task: results then depend neither on cores nor on the number of workers


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    number: int | None = None  # of tasks at once; None: none on the engine 'local', else the engine's own
    engine: str = "local"
    address: str | None = None  # of a Ray cluster; None: this machine
    read: tuple[Path, ...] = ()  # files and folders that workers read
    written: tuple[Path, ...] = ()  # folders that workers write


IN_THIS_PROCESS = WorkerSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """Open workers of one engine.

    `submit(function, *arguments)` runs a function of a module; `share(value)` gives an argument that a
    worker reads once, with `quantkit.workers.shared.opened`, for all tasks that have it.
    """

    number: int  # of tasks that run at once
    submit: Callable[..., Future[Any]]
    share: Callable[[Any], Any]
