"""What an engine is told, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantkit.sweeps.rows import Row
from quantkit.sweeps.supervise import Job

RunJobs = Callable[[Sequence[Job]], Iterator[Row]]  # rows in the order in which they end


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    address: str | None = None  # of a Ray cluster; None: this machine
    workers: int | None = None  # cells at once on this machine
    threads: int | None = None  # of a cell outside of its timed part
    versions: Mapping[str, str]  # of the driver
