"""Roofline times of rows and of whole passes (Williams et al., 2009).

A time is the longer of arithmetic at peak and traffic at full bandwidth, plus the operator's dispatch. It
is a lower bound for comparing steps and devices, not a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.plan.cost.forward import forward_rows
from quantkit.plan.cost.rows import MATRIX_PROCESSING, Fit, Pass, Row
from quantkit.plan.machines import Machine

GOOD, FAIR = 2.0, 10.0  # largest slowdown relative to the fastest device
# Steps without a roofline, and the reason.
NOT_TIMED = {
    "tokenization": "tokenization runs on the CPU, outside the model",
    "other": "the operator of these parameters is not known",
}
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The roofline time of a whole pass on one device."""

    phase: str  # "prefill": the whole context at once; "decode": one token after it
    device: str
    tokens: int  # per sequence
    time_ms: float
    tokens_per_second: float  # over all sequences of the batch
    bound: str  # the largest part of the time


def times_us(row: Row, device: Machine) -> tuple[str, dict[str, float]]:
    """The data type that a row is computed in on a device, and the three parts of its time."""
    peaks = device.peak_tera_ops
    preferred: tuple[str, ...] = ("fp32", "fp16", "int8")
    if row.processing in MATRIX_PROCESSING:  # matrix units do not run elementwise steps
        if device.kind != "cpu":
            preferred = ("fp16", "fp32", "int8")
        if row.weight_bits in (4, 8):
            # 4-bit weights are widened: 4-bit arithmetic would need 4-bit activations too.
            preferred = ("int8", *preferred)
    dtype = next(name for name in (*preferred, *peaks) if name in peaks)
    return dtype, {
        "compute": row.flops / (peaks[dtype] * 1e6),
        "memory": row.moved_bytes / (device.bandwidth_gb_per_s * 1e3),
        "dispatch": device.dispatch_us * row.calls,
    }


def fits_of(row: Row, devices: Sequence[Machine]) -> tuple[Fit, ...]:
    """Roofline time of a row on each device, rated relative to the fastest."""
    reason = NOT_TIMED.get(row.processing, "" if row.calls else "the result is in a cache")
    if reason:
        return tuple(_untimed(row, device, reason) for device in devices)
    fits = []
    for device in devices:
        dtype, parts = times_us(row, device)
        bound = max(parts, key=lambda part: parts[part])
        fits.append(
            Fit(
                device=device.name,
                kind=device.kind,
                time_us=max(parts["compute"], parts["memory"]) + parts["dispatch"],
                bound=bound,
                verdict="-",
                dtype=dtype,
                why=_why(row, device, dtype, bound, parts),
            )
        )
    best = min((fit.time_us for fit in fits), default=0.0)
    return tuple(replace(fit, verdict=_verdict(fit.time_us, best)) for fit in fits)


def _untimed(row: Row, device: Machine, reason: str) -> Fit:
    verdict = "good" if row.processing == "tokenization" and device.kind == "cpu" else "-"
    return Fit(
        device=device.name, kind=device.kind, time_us=0.0, bound="-", verdict=verdict, dtype="-", why=reason
    )


def _verdict(time_us: float, best_us: float) -> str:
    if time_us <= GOOD * best_us:
        return "good"
    return "fair" if time_us <= FAIR * best_us else "poor"


def _why(row: Row, device: Machine, dtype: str, bound: str, parts: Mapping[str, float]) -> str:
    if bound == "compute":
        work = short(row.flops, "operations")
        return f"compute: {work} at {device.peak_tera_ops[dtype]:g} T/s in {dtype}"
    if bound == "memory":
        is_weights = row.weight_traffic_bytes > row.input_bytes + row.output_bytes
        amount, what = (row.weight_traffic_bytes, "weights") if is_weights else (row.moved_bytes, "traffic")
        return f"memory: {short(amount, 'B')} of {what} at {device.bandwidth_gb_per_s:g} GB/s"
    work_us = max(parts["compute"], parts["memory"])
    return f"dispatch: {parts['dispatch']:g} us of dispatch for {work_us:.2g} us of work"


def short(number: float, unit: str = "") -> str:
    """Three digits with a decimal prefix: 146G, 2.36 MB, 146 G MACs."""
    size, prefix = next(((size, prefix) for size, prefix in UNITS if number >= size), UNITS[-1])
    gap = " " if prefix and len(unit) > 1 else ""
    return f"{number / size:.3g}{' ' if unit else ''}{prefix}{gap}{unit}"


def estimates_of(run: Pass, devices: Sequence[Machine], *, decodes: bool) -> list[Estimate]:
    """Times of the whole context, and of one token after it, on each device."""
    context = run.past + run.length
    phases = {"prefill": replace(run, length=context, past=0)}
    if decodes:
        phases["decode"] = replace(run, length=1, past=context)
    estimates = []
    for phase, phase_run in phases.items() if devices else ():
        rows = [row for row in forward_rows(phase_run) if row.calls and row.processing not in NOT_TIMED]
        for device in devices:
            spent = dict.fromkeys(("compute", "memory", "dispatch"), 0.0)
            for row in rows:
                _, parts = times_us(row, device)
                work = "compute" if parts["compute"] >= parts["memory"] else "memory"
                spent[work] += parts[work]
                spent["dispatch"] += parts["dispatch"]
            seconds = sum(spent.values()) / 1e6
            estimates.append(
                Estimate(
                    phase=phase,
                    device=device.name,
                    tokens=phase_run.length,
                    time_ms=seconds * 1e3,
                    tokens_per_second=phase_run.batch * phase_run.length / seconds,
                    bound=max(spent, key=lambda part: spent[part]),
                )
            )
    return estimates
