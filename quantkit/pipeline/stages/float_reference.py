"""The float reference of an artifact: the original as the same graph in float32."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from quantkit.errors import InputError
from quantkit.evaluation.artifact import open_artifact, why_not_measured
from quantkit.evaluation.measure import Measured, attempt, measure
from quantkit.evaluation.reference import transformers_reference
from quantkit.pipeline.stages.export import float_bytes
from quantkit.pipeline.stages.write import Written, write_float
from quantkit.recipe import Measure

CONFIG_FILES = ("config.json", "generation_config.json")  # they name a decoder's first token
SAFE_SHARE = 0.6  # of the free memory that a float reference may take


def measures_anything(wanted: Measure) -> bool:
    return wanted.accuracy or wanted.latency or wanted.memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """The float reference of an artifact; without a folder, the note says why there is none."""

    is_measured: bool = True  # False: nothing is to be measured, or no session runs the artifact
    folder: Path | None = None
    num_bytes: int | None = None
    note: str = ""
    failures: tuple[str, ...] = ()  # why it could not be written


@contextmanager
def float_twin(written: Written, folder: Path) -> Iterator[Twin]:
    """The original as the same graph in float32, where it is needed and memory and disk allow."""
    resolved, wanted = written.prepared.resolved, written.recipe.measure
    if not measures_anything(wanted):
        yield Twin(is_measured=False)
        return
    # A tracer may write graphs of other inputs than text.
    reason = why_not_measured(folder) if written.exported.kind == "traced" else None
    if reason:
        note = f"the model is exported and checked, but not measured: {reason}"
        yield Twin(is_measured=False, note=note)
        return
    size = float_bytes(resolved.model_map)
    fits_memory = size < psutil.virtual_memory().available * SAFE_SHARE
    if not (fits_memory and 2 * size < shutil.disk_usage(folder).free):
        scarce = "memory" if not fits_memory else "disk space"
        yield Twin(
            note=f"no float reference was timed: its {size / 1e9:.1f} GB do not fit into the free {scarce}"
        )
        return
    twin = folder / ".reference"
    twin.mkdir()
    try:
        failures: list[str] = []
        made = attempt("the float reference", partial(_write_twin, written, twin), failures)
        if made is None:
            shutil.rmtree(twin)  # before anything else is written to a disk that may be full
        yield made or Twin(failures=tuple(failures))
    finally:
        shutil.rmtree(twin, ignore_errors=True)


def _write_twin(written: Written, folder: Path) -> Twin:
    resolved = written.prepared.resolved
    num_weights = sum(layer.num_weights for layer in resolved.model_map.at_inference.layers)
    with resolved.progress.stage("float reference", total=num_weights, unit="weights") as count:
        try:
            exported = write_float(resolved, folder, count=count)
        except InputError as error:  # a traced float file may exceed the size limit of such files
            if written.exported.kind != "traced":
                raise
            return Twin(note=f"no float reference was timed: {error}")
    for name in CONFIG_FILES:
        if (written.exported.folder / name).exists():
            shutil.copyfile(written.exported.folder / name, folder / name)
    return Twin(folder=folder, num_bytes=exported.num_bytes)


def measure_written(written: Written, folder: Path, twin: Twin) -> Measured:
    """Accuracy beside the original in transformers, latency and memory beside the float twin."""
    resolved = written.prepared.resolved
    notes = (twin.note,) if twin.note else ()
    if not twin.is_measured:
        return Measured(notes=notes)
    measured = measure(
        open_artifact(folder, written.recipe),
        original=None if written.recipe.random_weights else transformers_reference(resolved.source),
        reference=twin.folder,
        accuracy=written.accuracy,
        progress=resolved.progress,
    )
    return replace(measured, notes=(*notes, *measured.notes))
