"""What the verbs do, each on one screen: the stages of quantkit in the order in which data flows.

    Recipe -> model -> ModelMap -> Plan -> Specification

Only this module sees several stages at once; the stages do not know each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from quantkit.errors import InputError
from quantkit.model.model_map import ModelMap
from quantkit.plan.cost.specification import Specification, specify
from quantkit.plan.machines import FILE_ENDING, MACHINES, THIS, Machine, machine, read_machine
from quantkit.plan.plan import Plan
from quantkit.plan.select import choose

DEFAULT_DEVICES = ("laptop-cpu", "gpu-900gbs", "laptop-npu")  # one of each kind: CPU, GPU, NPU
INT8_BITS = 8


def inspect(
    model: str,
    *,
    min_dim: int,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> tuple[ModelMap, Plan]:
    """Map a model and plan it; no weights are read."""
    from quantkit.model.inspect import inspect as walk

    model_map = walk(model, trust_remote_code=trust_remote_code)
    return model_map, choose(model_map, min_dim=min_dim, include=include, exclude=exclude)


def specification(
    model_map: ModelMap,
    plan: Plan | None,
    *,
    batch: int = 1,
    length: int | None = None,
    past: int = 0,
    devices: Sequence[str] = (),
) -> Specification:
    """Cost every step; with a plan, planned projections and the tables they share are INT8."""
    positions = model_map.max_positions or 1024
    return specify(
        model_map,
        batch=batch,
        length=min(1024, positions) if length is None else length,
        past=past,
        weight_bits=planned_bits(model_map, plan) if plan else None,
        devices=[find_machine(name) for name in devices or DEFAULT_DEVICES],
    )


def planned_bits(model_map: ModelMap, plan: Plan) -> Mapping[str, int]:
    """8 bits for each planned projection; a tied table follows its projection."""
    chosen = {layer.name for layer in plan.layers if layer.quantized}
    layers = [layer for layer in model_map.layers if layer.name in chosen]
    tables = {table.name for table in model_map.embeddings}
    tied = [layer.tied_to for layer in layers if layer.tied_to in tables]
    return dict.fromkeys([*chosen, *(name for name in tied if name)], INT8_BITS)


def find_machine(name: str) -> Machine:
    """A row of the machine table or of a user's file, or the measured running machine."""
    if name.endswith(FILE_ENDING):
        return read_machine(Path(name).expanduser())
    return measure_this_machine() if name == THIS else machine(name)


def measure_this_machine() -> Machine:
    """Measure once for this processor and these versions, then read the cache."""
    from quantkit.export.probes import build_probe_models
    from quantkit.runtime.machine import throughput
    from quantkit.runtime.machine.facts import read_cpu, read_memory

    key = throughput.machine_key()
    measured = throughput.read_cache(key)
    if measured is None:
        models = build_probe_models()
        measured = throughput.measure_throughput(**{f.name: getattr(models, f.name) for f in fields(models)})
        if not measured.is_disturbed:
            throughput.write_cache(key, measured)
    cpu = read_cpu()
    shape = next(row for row in MACHINES.values() if row.kind == "cpu")
    disturbed = "; other programs ran beside the measurement" if measured.is_disturbed else ""
    return replace(
        shape,
        name=THIS,
        description=f"{cpu.model}, {measured.num_threads} threads",
        bandwidth_gb_per_s=measured.bandwidth_gb_per_s,
        peak_tera_ops={"fp32": measured.fp32_tera_ops, "int8": measured.int8_tera_ops},
        memory_gb=read_memory().total_bytes / 1e9,
        dispatch_us=measured.dispatch_us,
        source=f"measured with onnxruntime{disturbed}",
    )


def require_spec_flags(*, wants_spec: bool, used: Sequence[str]) -> None:
    """Flags that only the specification reads would otherwise be ignored in silence."""
    if used and not wants_spec:
        raise InputError(
            f"{', '.join(used)} only shape the specification",
            where="inspect",
            next_step="add --spec",
        )
