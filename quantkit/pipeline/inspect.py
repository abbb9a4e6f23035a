"""Inspects a model: its layers, the plan, and its costs. No weights are read.

Recipe -> model -> ModelMap -> Plan -> Specification
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.model.model_map import ModelMap
from quantkit.plan.cost.specification import Specification, specify
from quantkit.plan.machines import FILE_ENDING, MACHINES, THIS, Machine, machine, read_machine
from quantkit.plan.plan import Count, LayerPlan, Plan
from quantkit.plan.select import DEFAULT_MIN_DIM, choose

if TYPE_CHECKING:
    from torch import nn

DEFAULT_DEVICES = ("laptop-cpu", "gpu-900gbs", "laptop-npu")  # one of each kind: CPU, GPU, NPU
INT8_BITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """A model's map and plan."""

    model_map: ModelMap
    plan: Plan

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Every logical projection with its role, its sizes, and why it is quantized or not."""
        return self.plan.layers

    @property
    def projections(self) -> Count:
        return self.plan.projections

    def specification(
        self,
        *,
        batch: int = 1,
        length: int | None = None,
        past: int = 0,
        devices: Sequence[str] = DEFAULT_DEVICES,
    ) -> Specification:
        """The cost of every step, with planned projections in INT8, and the fit to devices."""
        return specification(
            self.model_map, self.plan, batch=batch, length=length, past=past, devices=devices
        )


def inspect(
    model: str | Path | nn.Module,
    *,
    min_dim: int = DEFAULT_MIN_DIM,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Inspection:
    """Map a model and plan it; no weights are read.

    Args:
        model: A folder, a well-known or Hub name, "demo", or a live transformers module.
        min_dim: Projections with max(in, out) of at least this are quantized.
        include: Roles or name globs that narrow the choice.
        exclude: Roles or name globs that stay float.
        trust_remote_code: Run code that ships with the checkpoint.

    >>> plan = inspect("gpt2", min_dim=768)
    >>> plan.projections
    Count(total=73, quantized=73)
    >>> plan.layers[0].reason
    'max(768, 768) = 768 >= 768'
    """
    from quantkit.model.inspect import inspect as map_model

    model_map = map_model(model, trust_remote_code=trust_remote_code)
    plan = choose(model_map, min_dim=min_dim, include=include, exclude=exclude)
    return Inspection(model_map=model_map, plan=plan)


def specification(
    model_map: ModelMap,
    plan: Plan | None,
    *,
    batch: int = 1,
    length: int | None = None,
    past: int = 0,
    devices: Sequence[str] = (),
) -> Specification:
    """The cost of every step; with a plan, planned projections and the tables they share are INT8."""
    positions = model_map.context or model_map.max_positions or 1024
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
    tables = {table.name for table in model_map.embeddings}
    tied = [layer.tied_to for layer in model_map.layers if layer.name in chosen and layer.tied_to in tables]
    return dict.fromkeys([*chosen, *(name for name in tied if name)], INT8_BITS)


def find_machine(name: str) -> Machine:
    """A row of the machine table or of a user's file, or this machine, measured."""
    if name.endswith(FILE_ENDING):
        return read_machine(Path(name).expanduser())
    return measure_this_machine() if name == THIS else machine(name)


def measure_this_machine() -> Machine:
    """Throughput of this machine, measured once for this processor and these versions, then cached."""
    from quantkit.export.probes import build_probe_models
    from quantkit.runtime.machine import throughput
    from quantkit.runtime.machine.cache import machine_key
    from quantkit.runtime.machine.facts import read_cpu, read_memory

    key = machine_key()
    measured = throughput.read_cache(key)
    if measured is None:
        models = build_probe_models()
        measured = throughput.measure_throughput(
            **{field.name: getattr(models, field.name) for field in fields(models)}
        )
        if not measured.is_disturbed:
            throughput.write_cache(key, measured)
    cpu = read_cpu()
    cpu_row = next(row for row in MACHINES.values() if row.kind == "cpu")
    disturbed = "; other programs ran beside the measurement" if measured.is_disturbed else ""
    return replace(
        cpu_row,
        name=THIS,
        description=f"{cpu.model}, {measured.num_threads} threads",
        bandwidth_gb_per_s=measured.bandwidth_gb_per_s,
        peak_tera_ops={"fp32": measured.fp32_tera_ops, "int8": measured.int8_tera_ops},
        memory_gb=read_memory().total_bytes / 1e9,
        dispatch_us=measured.dispatch_us,
        source=f"measured with onnxruntime{disturbed}",
    )
