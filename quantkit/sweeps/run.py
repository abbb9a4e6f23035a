"""A sweep on one screen: file -> cells -> keys -> engine -> sweep.json, table and page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, not_one_of
from quantkit.progress import Progress
from quantkit.report.web_page import comparison_html
from quantkit.runtime.machine.disk import writing
from quantkit.sweeps.engine import EngineSettings, RunJobs
from quantkit.sweeps.grid import Cell, SweepFile, cells_of, check_sweep, load_sweep
from quantkit.sweeps.local import local_engine
from quantkit.sweeps.ray import ray_engine
from quantkit.sweeps.results import (
    PAGE_FILE,
    RESULTS_FILE,
    SweepResult,
    results_of,
    sole_sweep,
    with_state,
)
from quantkit.sweeps.rows import FREE, RECORDS, Row, record_path, recorded, write_json
from quantkit.sweeps.supervise import Job
from quantkit.workers.versions import installed_versions

ENGINES: Mapping[str, Callable[[EngineSettings], AbstractContextManager[RunJobs]]] = {
    "local": local_engine,
    "ray": ray_engine,
}
CONTINUES = "finished cells are kept, and the same command continues"


def sweep(
    sweep: str | Path | Mapping[str, Any],
    *,
    output: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    retry: bool = False,
    quiet: bool = True,
) -> SweepResult:
    """Quantize every cell of a table of models, recipes, targets and texts, and compare the artifacts.

    Cells that are done are kept, by a key of recipe, model files, texts and versions.

    Args:
        sweep: The path of a sweep file, or its content.
        output: The folder of the artifacts and of sweep.json; the name of the sweep file if not given.
        engine: "local", one cell after the other, or "ray".
        address: HOST:PORT of a Ray cluster, or "auto"; Ray runs on this machine if not given.
        workers: Cells at once, where Ray runs on this machine.
        retry: Run failed cells again.
        quiet: Write no progress to stderr.

    Returns:
        The rows, and comparisons of the artifacts by model and text.

    Raises:
        InputError: The sweep, a model or the engine is wrong. The error of a cell is in its row.
    """
    if engine not in ENGINES:
        raise not_one_of(engine, ENGINES, where="--engine")
    file, where = opened(sweep)
    folder = folder_of(file, sweep, output)
    cells = cells_of(file, where=where)
    versions = installed_versions()
    settings = EngineSettings(address=address, workers=workers, threads=file.threads, versions=versions)
    progress = Progress(quiet=quiet)
    with sole_sweep(folder), _continuing(), ENGINES[engine](settings) as run_jobs:
        planned = planned_rows(file, cells, versions)
        rows = [with_state(folder, row) for row in planned]
        jobs = [
            _job(file, cell, row, folder, versions)
            for cell, row in zip(cells, rows, strict=True)
            if row.state == "waiting" or (retry and row.state == "failed")
        ]
        with writing(folder, next_step=FREE):
            (folder / RECORDS).mkdir(exist_ok=True)
        for job in jobs:
            write_json(record_path(folder, job.row), asdict(replace(job.row, state="waiting")))
        num_failed = sum(row.state == "failed" and not retry for row in rows)
        kept = len(rows) - len(jobs) - num_failed
        progress.say(f"{len(rows)} cells: {len(jobs)} to run, {kept} done, {num_failed} failed before")
        start = time.perf_counter()

        def results(rows: list[Row]) -> SweepResult:
            document = {
                "sweep": where,
                "engine": engine,
                "versions": versions,
                "wall_seconds": time.perf_counter() - start,
            }
            return _written(results_of(folder, rows, document))

        result = results(rows)
        ended: dict[str, Row] = {}
        for row in run_jobs(jobs):
            ended[row.name] = row
            progress.say(f"{len(ended)} of {len(jobs)}: {row.name}: {row.error or _time_of(row)}")
            # Other cells have begun since; their records say so.
            result = results([ended.get(row.name) or _current(folder, row, jobs) for row in rows])
    with writing(folder, next_step=FREE):
        if result.comparisons:
            (folder / PAGE_FILE).write_text(comparison_html(*result.comparisons), encoding="utf-8")
    return result


def opened(sweep: str | Path | Mapping[str, Any]) -> tuple[SweepFile, str]:
    """(the sweep, its place for errors)."""
    if isinstance(sweep, Mapping):
        return check_sweep(dict(sweep), where="the sweep"), "the sweep"
    return load_sweep(Path(sweep)), str(sweep)


def folder_of(file: SweepFile, sweep: str | Path | Mapping[str, Any], output: str | Path | None) -> Path:
    """The folder of the artifacts; absolute, since workers may have another working folder."""
    name = output or file.output
    if name is None and isinstance(sweep, Mapping):
        raise InputError("no folder is named", where="sweep", next_step="pass output=, or the key 'output'")
    return Path(name or Path(str(sweep)).stem).expanduser().absolute()


def planned_rows(file: SweepFile, cells: tuple[Cell, ...], versions: Mapping[str, str]) -> list[Row]:
    # The key opens models and brings torch, which no refusal of a sweep file or an engine waits for.
    from quantkit.sweeps.key import SHOWN_CHARACTERS, key_of, source_hashes

    sources = {
        name: source_hashes(model, trust_remote_code=file.trust_remote_code)
        for name, model in file.models.items()
        if any(cell.model == name for cell in cells)
    }
    rows = []
    for cell in cells:
        key = key_of(cell, sources[cell.model], versions)
        rows.append(
            Row(
                name=cell.name,
                model=cell.model,
                recipe=cell.recipe,
                target=cell.target,
                text=cell.text,
                key=key,
                folder=f"{cell.name}-{key[:SHOWN_CHARACTERS]}",
            )
        )
    return rows


def _job(file: SweepFile, cell: Cell, row: Row, folder: Path, versions: Mapping[str, str]) -> Job:
    recipe = cell.settings.model_dump()
    for place, key in ((recipe, "model"), (recipe["measure"], "text"), (recipe["calibration"], "text")):
        if place[key] and Path(place[key]).expanduser().exists():  # not a name
            place[key] = str(Path(place[key]).expanduser().absolute())
    return Job(
        row=row,
        output=folder,
        recipe=recipe,
        versions=versions,
        needs=cell.needs,
        trust_remote_code=file.trust_remote_code,
        time_limit_seconds=60 * file.time_limit_minutes,
        threads=file.threads,
    )


def _current(folder: Path, row: Row, jobs: list[Job]) -> Row:
    return recorded(folder, row) if any(job.row.name == row.name for job in jobs) else row


def _written(result: SweepResult) -> SweepResult:
    write_json(result.output / RESULTS_FILE, result.document)
    return result


def _time_of(row: Row) -> str:
    return f"done in {row.seconds:.0f} s" if row.seconds is not None else "done before"


@contextmanager
def _continuing() -> Iterator[None]:
    """A stop says that nothing is lost."""
    try:
        yield
    except SystemExit as ending:
        ending.add_note(CONTINUES)
        raise
