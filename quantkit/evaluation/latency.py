"""Timing several models against each other in one sitting: A, B, A, B, after a warm-up.

On a shared or a throttling machine a run now and a run a minute later differ by more than the models do.
Taking turns spreads such drift over all of them, so that their ratio holds even where the milliseconds do
not. The median is the result and the spread stands beside it. Garbage collection waits until a run is over.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from quantkit.evaluation.measurements import Latency, Timing

Run = Callable[[], object]
Clock = Callable[[], float]  # seconds


def nothing() -> None:
    """What needs no preparation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When to stop: never before `min_runs` of each, then at `max_runs` or when the time is up."""

    min_runs: int = 5
    max_runs: int = 50
    max_seconds: float = 30.0  # warm-ups and preparations included
    num_warm_ups: int = 2
    clock: Clock = field(default=time.perf_counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is timed: `run`, with `prepare` untimed before each."""

    run: Run
    prepare: Run = nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """A model's two phases: `prefill` reads the prompt, each `step` after it makes one more token."""

    prefill: Run
    step: Run | None = None  # None: the model generates nothing
    prepare: Run = nothing  # untimed before each prefill


def interleave(subjects: Mapping[str, Subject], budget: Budget) -> dict[str, Timing]:
    """Time each subject in turn, round by round."""
    clock = budget.clock
    begin = clock()
    for _ in range(budget.num_warm_ups):
        for subject in subjects.values():
            subject.prepare()
            subject.run()
    samples_ms: dict[str, list[float]] = {name: [] for name in subjects}
    longest_round = 0.0
    for num_done in range(max(budget.min_runs, budget.max_runs)):
        round_begin = clock()
        # A round that would outlast the budget is not begun.
        if num_done >= budget.min_runs and round_begin + longest_round - begin > budget.max_seconds:
            break
        for name, subject in subjects.items():
            subject.prepare()
            with _no_collection():
                start = clock()
                subject.run()
                samples_ms[name].append((clock() - start) * 1e3)
        longest_round = max(longest_round, clock() - round_begin)
    return {name: timing_of(samples) for name, samples in samples_ms.items()}


def timing_of(samples_ms: list[float]) -> Timing:
    """The samples' median and spread; quartiles are interpolated between samples."""
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


def measure_prefill(models: Mapping[str, Runs], budget: Budget) -> dict[str, Timing]:
    """Milliseconds for the whole prompt."""
    return interleave(
        {name: Subject(run=each.prefill, prepare=each.prepare) for name, each in models.items()}, budget
    )


def measure_decode(models: Mapping[str, Runs], budget: Budget, *, num_tokens: int) -> dict[str, Timing]:
    """Milliseconds per token over `num_tokens` after the prompt; each run starts from the prompt again."""
    totals = interleave({name: _decoding(each, num_tokens) for name, each in models.items()}, budget)
    return {name: _per_token(timing, num_tokens) for name, timing in totals.items()}


def measure_latency(
    *,
    quantized: Runs,
    reference: Runs | None,
    provider: str,
    threads: int,
    prompt_length: int,
    num_decoded: int,
    budget: Budget,
    batch: int = 1,
    reference_name: str | None = None,
    floor_ms_per_token: float | None = None,
) -> Latency:
    """Prompt and token, quantized and reference, each phase with a budget of its own."""
    models = (
        {"quantized": quantized} if reference is None else {"reference": reference, "quantized": quantized}
    )
    prefill = measure_prefill(models, budget)
    can_decode = all(each.step for each in models.values())
    decode = measure_decode(models, budget, num_tokens=num_decoded) if can_decode else {}
    return Latency(
        provider=provider,
        threads=threads,
        prompt_length=prompt_length,
        prefill=prefill["quantized"],
        prefill_reference=prefill.get("reference"),
        decode=decode.get("quantized"),
        decode_reference=decode.get("reference"),
        num_decoded=num_decoded if can_decode else None,
        floor_ms_per_token=floor_ms_per_token if can_decode else None,
        num_warm_ups=budget.num_warm_ups,
        batch=batch,
        reference=reference_name,
    )


def _decoding(model: Runs, num_tokens: int) -> Subject:
    step = model.step
    assert step is not None, "the model has no step"

    def prepare() -> None:
        model.prepare()
        model.prefill()

    def run() -> None:
        for _ in range(num_tokens):
            step()

    return Subject(run=run, prepare=prepare)


def _per_token(timing: Timing, num_tokens: int) -> Timing:
    return Timing(
        median_ms=timing.median_ms / num_tokens,
        lowest_ms=timing.lowest_ms / num_tokens,
        lower_quartile_ms=timing.lower_quartile_ms / num_tokens,
        upper_quartile_ms=timing.upper_quartile_ms / num_tokens,
        highest_ms=timing.highest_ms / num_tokens,
        num_runs=timing.num_runs,
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
