"""Latency of several models in interleaved runs, A, B, A, B, after a warm-up.

The speed of a shared or throttling machine drifts within minutes by more than models differ. Interleaved runs
share the drift, so the ratio of two models holds where milliseconds do not. The result is the median, with
the spread beside it. Garbage collection is off during a run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from quantkit.evaluation.measurements import Latency, Timing
from quantkit.export.traffic import Traffic
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.generate import Batch
from quantkit.runtime.session import Session, example_of

Run = Callable[[], object]
Clock = Callable[[], float]  # seconds
PROVIDER = "CPUExecutionProvider"
SETTLING_SECONDS = 0.05
SMALLEST_VOCABULARY = 28  # ids that every encoder has


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Number of runs: at least `min_runs`, then until `max_runs` or `max_seconds` is reached."""

    min_runs: int = 5
    max_runs: int = 50
    max_seconds: float = 30.0  # warm-ups and preparations included
    num_warm_ups: int = 2
    clock: Clock = field(default=time.perf_counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A timed function; `prepare` runs untimed before every run."""

    run: Run
    prepare: Run = lambda: None
    num_tokens: int = 1  # of a run; the time is divided by it


Phases = Mapping[str, Subject]  # "prefill" reads the prompt; "decode" generates after it


def phases_of(session: Session, prompt: int, decode: int) -> Phases:
    """The phases of a session; caches are allocated untimed before every prompt."""
    vocab_size = session.vocab_size or SMALLEST_VOCABULARY
    ids = np.random.default_rng(0).integers(0, vocab_size, (1, prompt)).astype(np.int64)
    if not session.generates:
        example = example_of(session, ids)
        return {"prefill": Subject(run=lambda: session.logits(example), prepare=_settle)}
    batches: list[Batch] = []

    def begin() -> None:
        _settle()
        batches[:] = [session.begin(ids.tolist(), decode)]

    def read() -> None:
        batches[0].read()

    def begin_and_read() -> None:
        begin()
        read()

    def step() -> None:
        for _ in range(decode):
            batches[0].step(ids[0, :1], (0,))

    return {
        "prefill": Subject(run=read, prepare=begin),
        "decode": Subject(run=step, prepare=begin_and_read, num_tokens=decode),
    }


def _settle() -> None:
    """Wait until the spinning worker threads of the other session sleep."""
    time.sleep(SETTLING_SECONDS)


def fitting(session: Session, prompt: int, decode: int) -> tuple[int, int]:
    """(prompt length, decoded tokens) to time: a static graph always computes its full length.

    So does a graph of pictures, whose tokens are those of one picture.
    """
    if isinstance(session, Encoder) and session.reads_pictures:
        return session.context or prompt, decode
    prompt = session.fixed_length or prompt
    if session.kind == "static" and session.context:
        decode = min(decode, session.context - prompt)
    return prompt, decode


def bytes_per_token(session: Session, traffic: Traffic, lengths: tuple[int, int]) -> float:
    """Mean bytes that a decoded token reads; a static graph reads its full cache at every token."""
    prompt, decode = lengths
    if session.kind == "static" and session.context:
        return traffic.bytes_at(session.context, session.cache_number_bytes)
    return traffic.bytes_at(prompt + (decode + 1) / 2, session.cache_number_bytes)


def interleave(subjects: Mapping[str, Subject], budget: Budget) -> dict[str, Timing]:
    """Time the subjects in turn, round by round."""
    clock = budget.clock
    begin = clock()
    for _ in range(budget.num_warm_ups):
        for subject in subjects.values():
            subject.prepare()
            subject.run()
    samples_ms: dict[str, list[float]] = {name: [] for name in subjects}
    longest_round = 0.0
    for num_rounds in range(max(budget.min_runs, budget.max_runs)):
        round_begin = clock()
        # No round begins that would exceed the budget.
        if num_rounds >= budget.min_runs and round_begin + longest_round - begin > budget.max_seconds:
            break
        for name, subject in subjects.items():
            subject.prepare()
            with _no_collection():
                start = clock()
                subject.run()
                samples_ms[name].append((clock() - start) * 1e3 / subject.num_tokens)
        longest_round = max(longest_round, clock() - round_begin)
    return {name: timing_of(samples) for name, samples in samples_ms.items()}


def timing_of(samples_ms: list[float]) -> Timing:
    """Median and spread; quartiles are interpolated between samples."""
    quartiles = statistics.quantiles(samples_ms, n=4, method="inclusive") if len(samples_ms) > 1 else None
    lower, upper = (quartiles[0], quartiles[2]) if quartiles else (samples_ms[0], samples_ms[0])
    return Timing(
        median_ms=statistics.median(samples_ms),
        lowest_ms=min(samples_ms),
        lower_quartile_ms=lower,
        upper_quartile_ms=upper,
        highest_ms=max(samples_ms),
        num_runs=len(samples_ms),
    )


def measure_latency(
    *,
    quantized: Phases,
    reference: Phases | None,
    threads: int,
    prompt_length: int,
    num_decoded: int,
    budget: Budget,
    reference_name: str | None = None,
    floor_ms_per_token: float | None = None,
) -> Latency:
    """Latency of prompt and token on the CPU; prefill and decode have a budget each."""
    models = {"reference": reference} if reference else {}
    models["quantized"] = quantized
    prefill = interleave({name: phases["prefill"] for name, phases in models.items()}, budget)
    can_decode = all("decode" in phases for phases in models.values())
    decode = {}
    if can_decode:
        decode = interleave({name: phases["decode"] for name, phases in models.items()}, budget)
    return Latency(
        provider=PROVIDER,
        threads=threads,
        prompt_length=prompt_length,
        prefill=prefill["quantized"],
        prefill_reference=prefill.get("reference"),
        decode=decode.get("quantized"),
        decode_reference=decode.get("reference"),
        num_decoded=num_decoded if can_decode else None,
        floor_ms_per_token=floor_ms_per_token if can_decode else None,
        num_warm_ups=budget.num_warm_ups,
        reference=reference_name,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
