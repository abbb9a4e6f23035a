"""How a machine takes a row, and a whole pass: the roofline (Williams et al., 2009).

A time is the longer of arithmetic at peak and traffic at full bandwidth, plus the start of the operator.
It is a lower bound for comparing steps and devices, not a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.plan.cost.forward import forward_rows
from quantkit.plan.cost.rows import MATRIX_PROCESSING, Fit, Pass, Row
from quantkit.plan.machines import Machine

GOOD, FAIR = 2.0, 10.0  # times the fastest device
# Steps that no roofline describes.
NOT_TIMED = {
    "tokenization": "text is read on the CPU, outside the model",
    "other": "what reads these parameters is not known",
}
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The roofline time of a whole pass on one device."""

    phase: str  # "prefill": the whole context at once; "decode": one token after it
    device: str
    tokens: int  # of each sequence
    time_ms: float
    tokens_per_second: float  # of all sequences together
    bound: str  # what most of the time goes into


def times_us(row: Row, device: Machine) -> tuple[str, dict[str, float]]:
    """The data type that a device would use, and the three parts of its time."""
    peaks = device.peak_tera_ops
    if row.processing not in MATRIX_PROCESSING:
        wanted: tuple[str, ...] = ("fp32", "fp16", "int8")  # matrix units do not run element by element
    elif row.weight_bits in (4, 8):
        # 4-bit weights are widened: 4-bit arithmetic would need 4-bit activations too.
        wanted = ("int8", "fp16", "fp32") if device.kind != "cpu" else ("int8", "fp32", "fp16")
    else:
        wanted = ("fp16", "fp32", "int8") if device.kind != "cpu" else ("fp32", "fp16", "int8")
    dtype = next(name for name in (*wanted, *peaks) if name in peaks)
    return dtype, {
        "compute": row.flops / (peaks[dtype] * 1e6),
        "memory": row.moved_bytes / (device.bandwidth_gb_per_s * 1e3),
        "dispatch": device.dispatch_us * row.calls,
    }


def fits_of(row: Row, devices: Sequence[Machine]) -> tuple[Fit, ...]:
    """How each device takes a row, judged beside the fastest of them."""
    reason = NOT_TIMED.get(row.processing, "" if row.calls else "a cache holds its result")
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
    return f"dispatch: {parts['dispatch']:g} us to start it for {work_us:.2g} us of work"


def short(number: float, unit: str) -> str:
    """Three digits and a decimal prefix; words stand apart from it, symbols do not."""
    size, prefix = next(((size, prefix) for size, prefix in UNITS if number >= size), UNITS[-1])
    gap = " " if prefix and len(unit) > 1 else ""
    return f"{number / size:.3g} {prefix}{gap}{unit}"


def estimates_of(run: Pass, devices: Sequence[Machine], *, decodes: bool) -> list[Estimate]:
    """The whole context at once, and one token after it, on each device."""
    context = run.past + run.length
    phases = {"prefill": replace(run, length=context, past=0)}
    if decodes:
        phases["decode"] = replace(run, length=1, past=context)
    estimates = []
    for phase, asked in phases.items() if devices else ():
        rows = [row for row in forward_rows(asked) if row.calls and row.processing not in NOT_TIMED]
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
                    tokens=asked.length,
                    time_ms=seconds * 1e3,
                    tokens_per_second=asked.batch * asked.length / seconds,
                    bound=max(spent, key=lambda part: spent[part]),
                )
            )
    return estimates
