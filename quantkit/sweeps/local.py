"""The engine `local`: one cell after the other, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quantkit.errors import InputError
from quantkit.sweeps.engine import EngineSettings, RunJobs
from quantkit.sweeps.rows import Row
from quantkit.sweeps.supervise import Job, supervise


@contextmanager
def local_engine(settings: EngineSettings) -> Iterator[RunJobs]:
    for flag, value in (("--address", settings.address), ("--workers", settings.workers)):
        if value is not None:
            raise InputError(
                "the engine 'local' runs one cell at a time on this machine",
                where=flag,
                next_step="--engine ray",
            )
    yield _run


def _run(jobs: Sequence[Job]) -> Iterator[Row]:
    return map(supervise, jobs)
