"""Benchmarks an artifact: speed and memory on the CPU, or speed and placement on execution providers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.agreement import agreement
from quantkit.evaluation.artifact import OpenArtifact
from quantkit.evaluation.evaluate import text_tokens
from quantkit.evaluation.latency import timing_of
from quantkit.evaluation.measure import measure, timed_lengths
from quantkit.evaluation.measurements import Latency, Memory, ProviderAccuracy, ProviderRun
from quantkit.evaluation.models import SMALLEST_VOCABULARY, fitting
from quantkit.evaluation.reference import named_reference, original_at_hand
from quantkit.progress import Progress
from quantkit.recipe import override
from quantkit.runtime.providers.placement import PlacedOperator, Placement, UnplacedNode
from quantkit.runtime.providers.trial import ProviderChoice, try_provider

# Few texts, since an emulator takes seconds for each.
COMPARED_WINDOWS, COMPARED_LENGTH = 4, 64
# Fields of a provider trial's JSON that are fields of its record.
TRIAL_FIELDS = (
    "why_not", "cure", "device", "version", "prompt_length", "peak_bytes", "library_ms", "start_ms",
    "start_again_ms", "compile_ms",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """Speed and peak memory of an artifact on the CPU."""

    latency: Latency
    memory: Memory
    notes: tuple[str, ...] = ()


def benchmark(artifact: OpenArtifact, *, progress: Progress) -> Benchmark:
    """Measure prompt and token latency and peak memory."""
    wanted = {"measure.accuracy": False, "measure.latency": True, "measure.memory": True}
    measured = measure(replace(artifact, recipe=override(artifact.recipe, wanted)), progress=progress)
    assert measured.latency
    assert measured.memory
    return Benchmark(latency=measured.latency, memory=measured.memory, notes=measured.notes)


def benchmark_providers(
    artifact: OpenArtifact, asked: Sequence[ProviderChoice], *, time_limit: float, progress: Progress
) -> tuple[tuple[ProviderRun, ...], tuple[str, ...]]:
    """(a row for each provider, notes); each in a process of its own, so none can end the others."""
    notes: list[str] = []
    lengths = fitting(artifact.session, *timed_lengths(artifact.recipe.measure, artifact.context))
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        ids_path = Path(folder) / "ids.npy"
        with progress.stage("reference"):
            compared = _compared(artifact, notes)
        if compared:
            np.save(ids_path, compared[0])
        runs = []
        for number, provider in enumerate(asked):
            logits_path = Path(folder) / f"logits-{number}.npy"
            with progress.stage(provider.name):
                trial = try_provider(
                    artifact.folder,
                    provider,
                    threads=artifact.threads,
                    prompt=lengths[0],
                    decode=lengths[1],
                    seconds=artifact.recipe.measure.seconds / 2,
                    time_limit=time_limit,
                    ids=ids_path if compared else None,
                    logits=logits_path,
                )
            accuracy = None
            if compared and "positions" in trial:
                logits = np.load(logits_path)
                accuracy = agreement(
                    logits,
                    compared[1][: len(logits), trial["positions"]],
                    ids_WS=compared[0][: len(logits)],
                    positions=trial["positions"],
                    reference=compared[2],
                    predicts_tokens=artifact.session.generates,
                )
            runs.append(_provider_run(provider, trial, accuracy))
    return tuple(runs), tuple(notes)


def _compared(
    artifact: OpenArtifact, notes: list[str]
) -> tuple[NDArray[np.int64], NDArray[np.float32], str] | None:
    """(texts, the reference's logits, its name): the original, or else the same file on the CPU."""
    session = artifact.session
    if session.reads_and_answers:
        notes.append("an encoder with a decoder behind it is placed, but its logits are not compared")
        return None
    try:
        ids, _ = text_tokens(artifact)
    except InputError as error:  # no tokenizer, or a text that it does not fit
        notes.append(f"logits are compared on random tokens ({error})")
        ids = np.random.default_rng(0).integers(0, SMALLEST_VOCABULARY, COMPARED_WINDOWS * COMPARED_LENGTH)
    length = min(COMPARED_LENGTH, session.fixed_length or artifact.context, len(ids))
    count = min(COMPARED_WINDOWS, len(ids) // length)
    texts_WS = ids[: count * length].reshape(count, length)
    name, _ = original_at_hand(artifact.recipe)
    logits = named_reference(name, session, artifact.threads).logits() if name else session.logits
    words = f"{name} in float32" if name else "the same file on the CPU"
    outputs = np.concatenate([logits(ids_S[None]) for ids_S in texts_WS])
    return texts_WS, outputs if outputs.ndim > 2 else outputs[:, None], words  # one answer a text: one place


def _provider_run(
    asked: ProviderChoice, trial: Mapping[str, Any], accuracy: ProviderAccuracy | None
) -> ProviderRun:
    """The record of what a trial printed."""
    placed = trial.get("placement")
    return ProviderRun(
        provider=asked.name,
        python=asked.python,
        outcome=trial["outcome"],
        prefill=timing_of(trial["prefill_ms"]) if trial.get("prefill_ms") else None,
        decode=timing_of(trial["decode_ms"]) if trial.get("decode_ms") else None,
        placement=Placement(
            **placed
            | {
                "operators": tuple(PlacedOperator(**each) for each in placed["operators"]),
                "unplaced": tuple(UnplacedNode(**each) for each in placed["unplaced"]),
            }
        )
        if placed
        else None,
        accuracy=accuracy,
        notes=(*trial.get("notes", ()), *trial.get("said", ())),
        **{key: trial.get(key) for key in TRIAL_FIELDS},
    )


def fell_back(run: ProviderRun) -> bool:
    """Whether it did not run all of the model, or nobody knows."""
    return run.placement is None or bool(run.placement.unplaced)
