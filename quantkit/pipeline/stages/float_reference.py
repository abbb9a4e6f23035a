"""The float reference of an artifact: the original as the same graph in float32.

Latency and memory are compared with it, and it is compared with transformers in every run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from quantkit.errors import InputError
from quantkit.evaluation.artifact import open_artifact, run_once
from quantkit.evaluation.float_error import LONG, check_prompts, float_error, picture_error
from quantkit.evaluation.measure import Measured, attempt, measure
from quantkit.evaluation.measurements import FloatError
from quantkit.evaluation.reference import Reference, transformers_reference
from quantkit.export.encoder import vector_output
from quantkit.model.reference import answer_logits_of, logits_of
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.stages.export import float_bytes
from quantkit.pipeline.stages.resolve import Resolved
from quantkit.pipeline.stages.write import Written, write_float, write_float_static
from quantkit.plan.targets import TARGETS
from quantkit.recipe import Measure

CONFIG_FILES = ("config.json", "generation_config.json")  # they name a decoder's first token
UNMEASURED_BYTES = 4 << 30  # of a float reference that is only compared with transformers
SAFE_SHARE = 0.6  # of the free memory that a float reference may take


def measures_anything(wanted: Measure) -> bool:
    return wanted.accuracy or wanted.latency or wanted.memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """The float reference of an artifact; without a folder, the note says why there is none."""

    is_measured: bool = True  # False: no session runs the artifact
    folder: Path | None = None
    num_bytes: int | None = None
    note: str = ""
    failures: tuple[str, ...] = ()  # why it could not be written


def why_not_run(written: Written, folder: Path) -> str:
    """Run the written graphs once; why that is not possible on this machine, or ""."""
    if written.exported.num_bytes > psutil.virtual_memory().available:
        return "its weights do not fit into the free memory"
    try:
        # A tracer may write graphs of other inputs than text.
        return run_once(folder, written.prepared.resolved.model_map.name)
    except InputError as error:
        if not TARGETS[written.recipe.target].is_half:
            raise
        return str(error)  # the CPU has no kernels of half precision for some operators


@contextmanager
def float_twin(written: Written, folder: Path) -> Iterator[Twin]:
    """The original as the same graph in float32, where it is needed and memory and disk allow."""
    resolved = written.prepared.resolved
    reason = why_not_run(written, folder)
    if reason:
        note = f"the model is exported and checked, but was not run here: {reason}"
        yield Twin(is_measured=False, note=note)
        return
    size = float_bytes(resolved.model_map)
    if size > UNMEASURED_BYTES and not measures_anything(written.recipe.measure):
        yield Twin(
            note=f"no float graph was compared with transformers: its {size / 1e9:.1f} GB take minutes"
        )
        return
    fits_memory = size < psutil.virtual_memory().available * SAFE_SHARE
    if not (fits_memory and 2 * size < shutil.disk_usage(folder).free):
        scarce = "memory" if not fits_memory else "disk space"
        yield Twin(
            note="no float graph was timed or compared with transformers: "
            f"its {size / 1e9:.1f} GB do not fit into the free {scarce}"
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
    error, reason = _float_error(written, twin)
    notes = (*notes, reason) if reason else notes
    if not measures_anything(written.recipe.measure):
        return Measured(float_error=error, notes=notes)
    measured = measure(
        open_artifact(folder, written.recipe),
        original=None
        if written.recipe.random_weights
        else transformers_reference(resolved.source, vector_output(resolved.model_map)),
        reference=twin.folder,
        accuracy=written.accuracy,
        progress=resolved.progress,
    )
    return replace(measured, float_error=error, notes=(*notes, *measured.notes))


def _float_error(written: Written, twin: Twin) -> tuple[FloatError | None, str]:
    """(error of the float graph beside transformers, reason why there is none)."""
    resolved = written.prepared.resolved
    config, model_map, static = resolved.source.config, resolved.model_map, written.recipe.static
    vocab_size = model_map.vocab_size
    if twin.folder is None or (vocab_size is None and not model_map.picture):
        return None, ""
    if model_map.picture or vocab_size is None:
        with resolved.progress.stage("float check"):
            try:
                error = picture_error(twin.folder, _original(resolved))
            except Exception as reason:  # a class that transformers does not load
                return None, f"the float graph was not compared with transformers: {str(reason)[:300]}"
        return error, f"the float graph does not run: {error.failure}" if error.failure else ""
    prompts = check_prompts(
        config,
        vocab_size=vocab_size,
        num_parameters=model_map.num_parameters,
        most_tokens=static.prompt or model_map.context or LONG,
    )
    with resolved.progress.stage("float check"), float_graphs(written, twin.folder) as folder:
        try:
            error = float_error(folder, _original(resolved), prompts, pad_id=config.get("pad_token_id") or 0)
        except Exception as reason:  # a graph of other inputs, or a class that transformers does not load
            return None, f"the float graph was not compared with transformers: {str(reason)[:300]}"
        return error, f"the float graph does not run: {error.failure}" if error.failure else ""


@contextmanager
def float_graphs(written: Written, twin: Path) -> Iterator[Path]:
    """Float graphs of the emitter that wrote the artifact: the twin, or graphs of the same fixed shapes."""
    if not TARGETS[written.recipe.target].is_static:
        yield twin
        return
    with tempfile.TemporaryDirectory(dir=twin) as folder:
        write_float_static(written, Path(folder))
        yield Path(folder)


def _original(resolved: Resolved) -> Reference:
    """The original in transformers; random weights are put into its module."""
    if not resolved.recipe.random_weights:
        return transformers_reference(resolved.source)
    module = partial(torch_model, resolved.source, resolved.model_map, resolved.weights)
    return Reference(logits=lambda: logits_of(module()), answer_logits=lambda: answer_logits_of(module()))
