"""Timing against a clock that only the timed things move: every figure is known beforehand."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from quantkit.evaluation.latency import (
    Budget,
    Subject,
    interleave,
    measure_latency,
    phases_of,
    timing_of,
)

pytestmark = pytest.mark.once


class Clock:
    """Stands still until told otherwise."""

    def __init__(self):
        self.now = 100.0
        self.log = []

    def __call__(self):
        return self.now

    def takes(self, name, *milliseconds):
        """Something that lasts as long as listed, run by run; the last one repeats."""
        left = list(milliseconds)

        def run():
            self.log.append(name)
            self.now += (left.pop(0) if len(left) > 1 else left[0]) / 1e3

        return run


def budget(clock, **changes):
    return Budget(
        clock=clock, **({"min_runs": 3, "max_runs": 3, "max_seconds": 1e9, "num_warm_ups": 1} | changes)
    )


def test_subjects_take_turns():
    clock = Clock()
    interleave({"a": Subject(run=clock.takes("a", 1)), "b": Subject(run=clock.takes("b", 1))}, budget(clock))
    assert "".join(clock.log) == "ab" + "ab" * 3


def test_warm_ups_and_preparation_are_not_timed():
    clock = Clock()
    subject = Subject(run=clock.takes("run", 900, 10, 30, 20), prepare=clock.takes("prepare", 500))
    timing = interleave({"it": subject}, budget(clock))["it"]
    assert clock.log == ["prepare", "run"] * 4
    assert (timing.lowest_ms, timing.median_ms, timing.highest_ms) == pytest.approx((10, 20, 30))
    assert timing.num_runs == 3


def test_quartiles_and_median_of_known_samples():
    timing = timing_of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.lower_quartile_ms, timing.median_ms, timing.upper_quartile_ms) == (2.0, 3.0, 4.0)
    alone = timing_of([7.0])
    assert alone.lower_quartile_ms == alone.highest_ms == alone.median_ms == 7.0


def test_time_decides_the_number_of_runs():
    clock = Clock()
    subjects = {"a": Subject(run=clock.takes("a", 600)), "b": Subject(run=clock.takes("b", 400))}
    found = interleave(subjects, budget(clock, max_runs=100, max_seconds=10, num_warm_ups=2))
    assert found["a"].num_runs == found["b"].num_runs == 8  # 2 s of warm-ups, then rounds of 1 s
    assert clock.now - 100.0 <= 10 + 1e-9


def test_never_fewer_than_the_least_and_never_more_than_the_most():
    clock = Clock()
    slow = interleave(
        {"a": Subject(run=clock.takes("a", 60_000))}, budget(clock, min_runs=5, max_runs=50, max_seconds=30)
    )
    assert slow["a"].num_runs == 5
    quick = interleave(
        {"a": Subject(run=clock.takes("a", 1))}, budget(clock, min_runs=5, max_runs=50, max_seconds=30)
    )
    assert quick["a"].num_runs == 50


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_waits_until_a_run_is_over(was_enabled):
    seen = []
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        interleave(
            {"a": Subject(run=lambda: seen.append(gc.isenabled()))}, Budget(max_runs=5, num_warm_ups=0)
        )
        assert seen == [False] * 5
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_garbage_is_collected_again_after_a_failure():
    def fail():
        raise RuntimeError("no")

    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        interleave({"a": Subject(run=fail)}, Budget(num_warm_ups=0))
    assert gc.isenabled()


def test_decode_is_per_token_and_starts_from_the_prompt_each_time():
    clock = Clock()
    prefill, step, begin = clock.takes("prefill", 170), clock.takes("step", 5), clock.takes("begin", 40)
    batch = SimpleNamespace(read=prefill, step=lambda tokens, rows: step())

    def new_batch(prompts, num_new):
        begin()
        return batch

    phases = phases_of(SimpleNamespace(vocab_size=50, generates=True, begin=new_batch), 16, 8)
    decode = interleave({"model": phases["decode"]}, budget(clock))["model"]
    assert decode.median_ms == pytest.approx(5)
    assert decode.highest_ms == pytest.approx(5)
    assert clock.log == (["begin", "prefill"] + ["step"] * 8) * 4
    prefill_timing = interleave({"model": phases["prefill"]}, budget(clock))["model"]
    assert prefill_timing.median_ms == pytest.approx(170)


def test_the_whole_record():
    clock = Clock()
    found = measure_latency(
        quantized={"prefill": Subject(run=clock.takes("", 76)), "decode": Subject(run=clock.takes("", 5))},
        reference={"prefill": Subject(run=clock.takes("", 174)), "decode": Subject(run=clock.takes("", 21))},
        threads=2,
        prompt_length=128,
        num_decoded=4,
        budget=budget(clock),
        floor_ms_per_token=3.4,
    )
    medians = [
        each.median_ms
        for each in (found.prefill, found.prefill_reference, found.decode, found.decode_reference)
    ]
    assert medians == pytest.approx([76, 174, 5, 21])
    assert (found.num_decoded, found.floor_ms_per_token, found.num_warm_ups) == (4, 3.4, 1)


def test_a_model_that_generates_nothing_has_no_decode_figures():
    clock = Clock()
    found = measure_latency(
        quantized={"prefill": Subject(run=clock.takes("", 8))},
        reference=None,
        threads=2,
        prompt_length=128,
        num_decoded=4,
        budget=budget(clock),
        floor_ms_per_token=3.4,
    )
    assert found.prefill.median_ms == pytest.approx(8)
    assert found.decode is found.num_decoded is found.floor_ms_per_token is found.prefill_reference is None
