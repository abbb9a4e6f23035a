"""Rooflines: every time, bound and verdict against the arithmetic it must follow from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_maps import MAPS, gpt2_map
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.plan.cost.roofline import FAIR, GOOD, NOT_TIMED, short, times_us
from quantkit.plan.cost.specification import specify
from quantkit.plan.machines import MACHINES, Machine

DEVICES = tuple(MACHINES.values())
SERVER = MACHINES["server-2core-vnni"]
GPT2 = gpt2_map()
GPT2_SPEC = specify(GPT2, batch=1, length=1024, devices=DEVICES)
every_map = pytest.mark.parametrize("mapped", MAPS.values(), ids=list(MAPS))


@every_map
def test_bounds_and_verdicts_follow_from_the_parts(mapped):
    by_name = {device.name: device for device in DEVICES}
    for row in specify(mapped, batch=1, length=64, devices=DEVICES).rows:
        assert [fit.device for fit in row.fits] == list(by_name)
        if row.processing in NOT_TIMED:
            assert all(fit.bound == "-" for fit in row.fits)
            continue
        best = min(fit.time_us for fit in row.fits)
        for fit in row.fits:
            device = by_name[fit.device]
            compute = row.flops / (device.peak_tera_ops[fit.dtype] * 1e12) * 1e6
            memory = row.moved_bytes / (device.bandwidth_gb_per_s * 1e9) * 1e6
            dispatch = device.dispatch_us * row.calls
            parts = {"compute": compute, "memory": memory, "dispatch": dispatch}
            assert fit.time_us == pytest.approx(max(compute, memory) + dispatch, rel=1e-12)
            assert parts[fit.bound] == pytest.approx(max(parts.values()), rel=1e-12)
            assert fit.why.startswith(f"{fit.bound}: ")
            slower = fit.time_us / best
            assert fit.verdict == ("good" if slower <= GOOD else "fair" if slower <= FAIR else "poor")


def test_tokenization_is_for_the_cpu():
    verdicts = {fit.kind: fit.verdict for fit in GPT2_SPEC.rows[0].fits}
    assert verdicts == {"cpu": "good", "npu": "-", "gpu": "-"}


def test_estimates_agree_with_a_sum_by_hand():
    free = replace(SERVER, dispatch_us=1e-9)
    specification = specify(GPT2, batch=1, length=128, devices=[free])
    prefill, decode = specification.estimates
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert decode.bound == "memory" and prefill.bound == "compute"
    # Decoding reads all but the unused table rows, and the cache: the rest is small.
    weights = 4 * (124_439_808 - (1024 - 1) * 768)
    cache = 2 * 12 * 129 * 768 * 4
    assert decode.time_ms == pytest.approx((weights + cache) / 36e9 * 1e3, rel=0.01)
    assert decode.tokens_per_second == pytest.approx(1e3 / decode.time_ms)
    assert prefill.time_ms >= 2 * specification.totals.matrix_macs / 0.224e12 * 1e3
    assert prefill.tokens_per_second == pytest.approx(128e3 / prefill.time_ms)


@settings(max_examples=40)
@given(factor=st.floats(1.01, 100), peak=st.floats(0.01, 1e4), bandwidth=st.floats(1, 1e4))
def test_memory_time_scales_with_bandwidth_and_compute_time_with_the_peak(factor, peak, bandwidth):
    def device(peak: float, bandwidth: float) -> Machine:
        peaks = dict.fromkeys(("fp32", "fp16", "int8"), peak)
        return replace(SERVER, bandwidth_gb_per_s=bandwidth, peak_tera_ops=peaks)

    row = GPT2_SPEC.rows[12]
    base = times_us(row, device(peak, bandwidth))[1]
    wider = times_us(row, device(peak, bandwidth * factor))[1]
    faster = times_us(row, device(peak * factor, bandwidth))[1]
    assert base["memory"] / wider["memory"] == pytest.approx(factor)
    assert base["compute"] / faster["compute"] == pytest.approx(factor)
    assert base["compute"] == wider["compute"] and base["memory"] == faster["memory"]


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (2_359_296, "B", "2.36 MB"),
        (145_824_153_600, "MACs", "146 G MACs"),
        (12, "B", "12 B"),
        (0, "B", "0 B"),
        (1e15, "operations", "1 P operations"),
    ],
)
def test_short(number, unit, text):
    assert short(number, unit) == text
