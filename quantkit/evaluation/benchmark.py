"""The speed and memory of an artifact that lies in a folder: on the CPU, or on other providers beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.agreement import agreement
from quantkit.evaluation.artifact import Opened
from quantkit.evaluation.evaluate import logits_of, original_at_hand, tokens_of
from quantkit.evaluation.latency import Budget, measure_latency, timing_of
from quantkit.evaluation.measure import PROVIDER, peak_bytes, timed_lengths
from quantkit.evaluation.measurements import Latency, Memory, PeakMemory, ProviderAccuracy, ProviderRun
from quantkit.evaluation.memory import floor_ms
from quantkit.evaluation.models import (
    SMALLEST_VOCABULARY,
    bytes_per_token,
    fitting,
    runs_of,
)
from quantkit.export.traffic import from_metadata
from quantkit.progress import Progress
from quantkit.runtime.machine.throughput import read_bandwidth_gb_per_s
from quantkit.runtime.providers.placement import PlacedOperator, Placement, UnplacedNode
from quantkit.runtime.providers.trial import Asked, try_provider

# Texts whose logits providers are compared by: few, since an emulator takes seconds for each.
COMPARED_WINDOWS, COMPARED_LENGTH = 4, 64
# What a provider's process says in the words of its record.
TOLD = (
    "why_not", "cure", "device", "version", "prompt_length", "peak_bytes", "library_ms", "start_ms",
    "start_again_ms", "compile_ms",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmarked:
    """How fast an artifact is, and what memory it takes."""

    latency: Latency
    memory: Memory
    notes: tuple[str, ...]


def benchmark(opened: Opened, *, progress: Progress) -> Benchmarked:
    """Prompt, tokens after it and peak memory on the CPU provider."""
    wanted, model = opened.recipe.measure, opened.model
    lengths = fitting(model, *timed_lengths(wanted, opened.context))
    # Of weights behind an encoder a token reads a part that no plan tells.
    traffic = None if model.reads_and_answers else from_metadata(opened.metadata)
    notes = []
    with progress.stage("latency"):
        floor = None
        if traffic:
            bandwidth = read_bandwidth_gb_per_s(opened.threads)
            bytes_read = bytes_per_token(model, traffic, lengths)
            floor = floor_ms(bytes_read=bytes_read, bandwidth_gb_per_s=bandwidth)
        elif model.generates:
            notes.append("no memory floor: the artifact does not say how many bytes a token reads")
        latency = measure_latency(
            quantized=runs_of(model, *lengths),
            reference=None,
            provider=PROVIDER,
            threads=opened.threads,
            prompt_length=lengths[0],
            num_decoded=lengths[1],
            budget=Budget(max_runs=15, max_seconds=wanted.seconds / 2),
            floor_ms_per_token=floor,
        )
    with progress.stage("memory"):
        memory = _memory(opened.folder, lengths, opened.threads)
    return Benchmarked(latency=latency, memory=memory, notes=tuple(notes))


def _memory(folder: Path, lengths: tuple[int, int], threads: int) -> Memory:
    """Peaks of processes of their own."""

    def peak(what: str) -> int:
        return peak_bytes(what, folder, lengths, threads)

    peaks = PeakMemory(load_peak_bytes=peak("load"), run_peak_bytes=peak("run"))
    return Memory(quantized=peaks, empty_process_bytes=peak("empty"))


def benchmark_providers(
    opened: Opened, asked: Sequence[Asked], *, time_limit: float, progress: Progress
) -> tuple[tuple[ProviderRun, ...], tuple[str, ...]]:
    """(a row for each provider, notes); each in a process of its own, so none can end the others."""
    notes: list[str] = []
    lengths = fitting(opened.model, *timed_lengths(opened.recipe.measure, opened.context))
    with tempfile.TemporaryDirectory(prefix="quantkit-") as made:
        ids_path = Path(made) / "ids.npy"
        with progress.stage("reference"):
            compared = _compared(opened, notes)
        if compared:
            np.save(ids_path, compared[0])
        runs = []
        for number, each in enumerate(asked):
            logits_path = Path(made) / f"logits-{number}.npy"
            with progress.stage(each.name):
                found = try_provider(
                    opened.folder,
                    each,
                    threads=opened.threads,
                    prompt=lengths[0],
                    decode=lengths[1],
                    seconds=opened.recipe.measure.seconds / 2,
                    time_limit=time_limit,
                    ids=ids_path if compared else None,
                    logits=logits_path,
                )
            accuracy = None
            if compared and "positions" in found:
                logits = np.load(logits_path)
                accuracy = agreement(
                    logits,
                    compared[1][: len(logits), found["positions"]],
                    ids_WS=compared[0][: len(logits)],
                    positions=found["positions"],
                    reference=compared[2],
                    predicts_tokens=opened.model.generates,
                )
            runs.append(_provider_run(each, found, accuracy))
    return tuple(runs), tuple(notes)


def _compared(opened: Opened, notes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.float32], str] | None:
    """(texts, the reference's logits, what it is): the original, or else the same file on the CPU."""
    if opened.model.reads_and_answers:
        notes.append("an encoder with a decoder behind it is placed, but its logits are not compared")
        return None
    try:
        ids, _ = tokens_of(opened)
    except InputError as error:  # no tokenizer, or a text that it does not fit
        notes.append(f"logits are compared on random tokens ({error})")
        ids = np.random.default_rng(0).integers(0, SMALLEST_VOCABULARY, COMPARED_WINDOWS * COMPARED_LENGTH)
    length = min(COMPARED_LENGTH, opened.model.fixed_length or opened.context, len(ids))
    count = min(COMPARED_WINDOWS, len(ids) // length)
    texts_WS = ids[: count * length].reshape(count, length)
    name = original_at_hand(opened.recipe, [])
    outputs = logits_of(name, opened.threads) if name else opened.model.logits
    words = f"{name} in float32" if name else "the same file on the CPU"
    made = np.concatenate([outputs(ids_S[None]) for ids_S in texts_WS])
    return texts_WS, made if made.ndim > 2 else made[:, None], words  # one answer a text stands at one place


def _provider_run(asked: Asked, found: Mapping[str, Any], accuracy: ProviderAccuracy | None) -> ProviderRun:
    """The record of what a trial printed."""
    placed = found.get("placement")
    return ProviderRun(
        provider=asked.name,
        python=asked.python,
        outcome=found["outcome"],
        prefill=timing_of(found["prefill_ms"]) if found.get("prefill_ms") else None,
        decode=timing_of(found["decode_ms"]) if found.get("decode_ms") else None,
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
        notes=(*found.get("notes", ()), *found.get("said", ())),
        **{key: found.get(key) for key in TOLD},
    )


def fell_back(run: ProviderRun) -> bool:
    """Whether it did not run all of the model, or nobody knows."""
    return run.placement is None or bool(run.placement.unplaced)
