"""Benchmark of an artifact: latency and memory on the CPU; latency, placement and accuracy on providers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Floats, Ints
from quantkit.evaluation.agreement import agreement
from quantkit.evaluation.artifact import OpenArtifact
from quantkit.evaluation.evaluate import text_tokens
from quantkit.evaluation.latency import SMALLEST_VOCABULARY, fitting, timing_of
from quantkit.evaluation.measure import measure, timed_lengths
from quantkit.evaluation.measurements import Latency, Memory, ProviderAccuracy, ProviderRun
from quantkit.evaluation.reference import named_reference, original_at_hand
from quantkit.progress import Progress
from quantkit.recipe import override
from quantkit.runtime.machine.disk import temporary_folder
from quantkit.runtime.providers.placement import PlacedOperator, Placement, UnplacedNode
from quantkit.runtime.providers.trial import ProviderChoice, try_provider

# Few texts: an emulator takes seconds for each.
COMPARED_WINDOWS, COMPARED_LENGTH = 4, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    latency: Latency | None
    memory: Memory | None
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()  # of what was not measured because of an error


def benchmark(artifact: OpenArtifact, *, progress: Progress) -> Benchmark:
    """Measure latency of prompt and token, and peak memory."""
    switches = {"measure.accuracy": False, "measure.latency": True, "measure.memory": True}
    measured = measure(replace(artifact, recipe=override(artifact.recipe, switches)), progress=progress)
    return Benchmark(
        latency=measured.latency,
        memory=measured.memory,
        notes=measured.notes,
        failures=measured.failures,
    )


def benchmark_providers(
    artifact: OpenArtifact, providers: Sequence[ProviderChoice], *, time_limit: float, progress: Progress
) -> tuple[tuple[ProviderRun, ...], tuple[str, ...]]:
    """(one run for each provider, notes); a crash of one provider's process does not end the others."""
    notes: list[str] = []
    lengths = fitting(artifact.session, *timed_lengths(artifact.recipe.measure, artifact.context))
    with temporary_folder() as folder:
        ids_path = folder / "ids.npy"
        with progress.stage("reference"):
            reference = _reference(artifact, notes)
        if reference:
            np.save(ids_path, reference.ids_WS)
        runs = []
        for number, provider in enumerate(providers):
            logits_path = folder / f"logits-{number}.npy"
            with progress.stage(provider.name):
                trial = try_provider(
                    artifact.folder,
                    provider,
                    threads=artifact.threads,
                    prompt=lengths[0],
                    decode=lengths[1],
                    seconds=artifact.recipe.measure.seconds / 2,
                    time_limit=time_limit,
                    ids=ids_path if reference else None,
                    logits=logits_path,
                )
            accuracy = None
            if reference and "positions" in trial:
                outputs_WPV = np.load(logits_path)
                num_texts = len(outputs_WPV)  # a slow provider reads fewer texts
                accuracy = agreement(
                    outputs_WPV,
                    reference.outputs_WSV[:num_texts, trial["positions"]],
                    ids_WS=reference.ids_WS[:num_texts],
                    positions=trial["positions"],
                    reference=reference.description,
                    predicts_tokens=artifact.session.generates,
                )
            runs.append(_provider_run(provider, trial, accuracy))
    return tuple(runs), tuple(notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReferenceOutputs:
    ids_WS: Ints
    outputs_WSV: Floats
    description: str


def _reference(artifact: OpenArtifact, notes: list[str]) -> _ReferenceOutputs | None:
    """Outputs of the original if it is on this disk, else of the artifact on the CPU."""
    session = artifact.session
    if session.reads_and_answers:
        notes.append("an encoder with a decoder behind it is placed, but its logits are not compared")
        return None
    try:
        ids, _ = text_tokens(artifact)
    except InputError as error:  # the tokenizer is missing or belongs to another model
        notes.append(f"logits are compared on random tokens ({error})")
        ids = np.random.default_rng(0).integers(0, SMALLEST_VOCABULARY, COMPARED_WINDOWS * COMPARED_LENGTH)
    length = min(COMPARED_LENGTH, session.fixed_length or artifact.context, len(ids))
    count = min(COMPARED_WINDOWS, len(ids) // length)
    texts_WS = ids[: count * length].reshape(count, length)
    name, _ = original_at_hand(artifact.recipe)
    logits = named_reference(name, session, artifact.threads).logits() if name else session.logits
    outputs = np.concatenate([logits(ids_S[None]) for ids_S in texts_WS])
    return _ReferenceOutputs(
        ids_WS=texts_WS,
        outputs_WSV=outputs if outputs.ndim > 2 else outputs[:, None],  # [W, V]: a classifier
        description=f"{name} in float32" if name else "the same file on the CPU",
    )


def _provider_run(
    choice: ProviderChoice, trial: Mapping[str, Any], accuracy: ProviderAccuracy | None
) -> ProviderRun:
    """The record of a trial; numbers and texts of its JSON have the names of the record's fields."""
    placement = trial.get("placement")
    structured: dict[str, Any] = {
        "provider": choice.name,
        "python": choice.python,
        "prefill": timing_of(trial["prefill_ms"]) if trial.get("prefill_ms") else None,
        "decode": timing_of(trial["decode_ms"]) if trial.get("decode_ms") else None,
        "placement": _placement(placement) if placement else None,
        "accuracy": accuracy,
        "notes": (*trial.get("notes", ()), *trial.get("said", ())),
    }
    plain = {field.name: trial[field.name] for field in fields(ProviderRun) if field.name in trial}
    return ProviderRun(**plain | structured)


def _placement(record: Mapping[str, Any]) -> Placement:
    operators = tuple(PlacedOperator(**operator) for operator in record["operators"])
    unplaced = tuple(UnplacedNode(**node) for node in record["unplaced"])
    return Placement(**{**record, "operators": operators, "unplaced": unplaced})


def fell_back(run: ProviderRun) -> bool:
    """Whether nodes fell back to the CPU, or placement is unknown."""
    return run.placement is None or bool(run.placement.unplaced)
