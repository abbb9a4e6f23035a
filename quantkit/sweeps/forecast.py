"""A dry run of a sweep: its cells, their bytes and hours. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.pipeline.dry_run import dry_run
from quantkit.sweeps.grid import cells_of
from quantkit.sweeps.results import with_state
from quantkit.sweeps.run import folder_of, opened, planned_rows
from quantkit.workers.versions import installed_versions


@dataclass(frozen=True, kw_only=True, slots=True)
class CellForecast:
    name: str
    state: str  # "to run", or that of an earlier sweep
    num_bytes: int | None = None  # of graphs and weights
    minutes: float | None = None
    error: str | None = None  # refusal of the cell


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepForecast:
    output: str
    cells: tuple[CellForecast, ...]

    @property
    def document(self) -> dict[str, Any]:
        to_run = [cell for cell in self.cells if cell.state == "to run"]
        return {
            "output": self.output,
            "count": len(self.cells),
            "to_run": len(to_run),
            "kept": len(self.cells) - len(to_run),
            "num_bytes": sum(cell.num_bytes or 0 for cell in to_run),
            "hours": sum(cell.minutes or 0.0 for cell in to_run) / 60,
            "cells": [{name: getattr(cell, name) for name in CellForecast.__slots__} for cell in self.cells],
        }


def forecast_sweep(
    sweep: str | Path | Mapping[str, Any], *, output: str | Path | None = None, retry: bool = False
) -> SweepForecast:
    """What `sweep` would do with these arguments; a cell that it would refuse has its error."""
    file, where = opened(sweep)
    folder = folder_of(file, sweep, output)
    cells = cells_of(file, where=where)
    forecasts = []
    for cell, planned in zip(cells, planned_rows(file, cells, installed_versions()), strict=True):
        row = with_state(folder, planned)
        if row.state == "done" or (row.state == "failed" and not retry):
            forecasts.append(CellForecast(name=row.name, state=row.state))
            continue
        try:
            run = dry_run(
                recipe=cell.settings,
                output=folder / row.folder,
                force=True,
                trust_remote_code=file.trust_remote_code,
            )
        except InputError as error:
            forecasts.append(CellForecast(name=row.name, state="to run", error=str(error)))
            continue
        forecasts.append(
            CellForecast(name=row.name, state="to run", num_bytes=run.model_bytes, minutes=run.minutes)
        )
    return SweepForecast(output=str(folder), cells=tuple(forecasts))
