"""Bytes, multiply-adds and least time of a prompt and of a token, by group of layers.

The least time of a step is the longer of its arithmetic and its traffic on the machine, as in `roofline`, but
without the start of operators. Bytes of quantized weights are plain bits, without scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.model.model_map import ModelMap
from quantkit.plan.cost.roofline import NOT_TIMED, times_us
from quantkit.plan.cost.specification import specify
from quantkit.plan.machines import Machine

SHOWN_AS = {"attention": "attention", "ffn": "FFN", "head": "lm_head"}
REST = "rest"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCost:
    group: str
    moved_bytes: int
    macs: int
    flops: int
    floor_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCost:
    """A prompt, or one token after it."""

    phase: str
    num_tokens: int
    past: int  # cached tokens
    measured_ms: float
    groups: tuple[GroupCost, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRoofline:
    """Measured rates of the machine, and the costs of the model on it."""

    machine: str
    bandwidth_gb_per_s: float
    peak_tera_ops: dict[str, float]  # 1 MAC is 2
    phases: tuple[PhaseCost, ...]


def phase_cost(
    phase: str,
    model_map: ModelMap,
    bits: Mapping[str, int],
    machine: Machine,
    *,
    num_tokens: int,
    past: int,
    measured_ms: float,
) -> PhaseCost:
    spec = specify(model_map, batch=1, length=num_tokens, past=past, weight_bits=bits)
    sums = {name: [0, 0, 0, 0.0] for name in (*SHOWN_AS.values(), REST)}
    for row in spec.rows:
        if not row.calls or row.processing in NOT_TIMED:
            continue
        _, parts = times_us(row, machine)
        spent_ms = max(parts["compute"], parts["memory"]) / 1e3
        group = sums[SHOWN_AS.get(row.group, REST)]
        for place, value in enumerate((row.moved_bytes, row.macs, row.flops, spent_ms)):
            group[place] += value
    groups = tuple(
        GroupCost(
            group=name, moved_bytes=int(moved), macs=int(macs), flops=int(flops), floor_ms=float(floor_ms)
        )
        for name, (moved, macs, flops, floor_ms) in sums.items()
        if moved
    )
    return PhaseCost(phase=phase, num_tokens=num_tokens, past=past, measured_ms=measured_ms, groups=groups)
