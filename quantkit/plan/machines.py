"""TABLE: peak bandwidth and arithmetic of machines, the two slopes of the roofline (Williams et al., 2009).

Times from peaks are lower bounds, for comparing layers and devices. Every row names the source of its figures
and its assumptions. A measured machine and a machine in a user's JSON file have the same record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, did_you_mean
from quantkit.files import read_json

KINDS = ("cpu", "gpu", "npu")
DTYPES = ("fp32", "fp16", "int8", "int4")
THIS = "this"  # the running machine, which is measured
FILE_ENDING = ".json"  # of a file with a machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One processing unit with its memory."""

    name: str
    kind: str  # one of KINDS
    description: str
    bandwidth_gb_per_s: float  # 1 GB = 1e9 bytes
    peak_tera_ops: Mapping[
        str, float
    ]  # dtype -> 1e12 operations per second; 1 MAC is 2; absent: not supported
    memory_gb: float
    dispatch_us: float  # start of one operator; an order of magnitude, assumed unless measured
    source: str


NAMES = tuple(field.name for field in fields(Machine))
TEXTS = ("name", "kind", "description", "source")
NUMBERS = ("bandwidth_gb_per_s", "memory_gb", "dispatch_us")

MACHINES: dict[str, Machine] = {
    row.name: row
    for row in (
        Machine(
            name="server-2core-vnni",
            kind="cpu",
            description="two Zen 4 server cores with AVX512-VNNI, as rented in a cloud",
            bandwidth_gb_per_s=36.0,
            # 2 cores at 3.5 GHz; per core and cycle 2 x 8 FP32 FMA = 32 operations, 2 x 32 INT8 MAC = 128
            peak_tera_ops={"fp32": 0.224, "int8": 0.896},
            memory_gb=8.0,
            dispatch_us=3.0,
            source="bandwidth measured (read); peaks derived from 256-bit units at an assumed 3.5 GHz; "
            "memory and dispatch assumed",
        ),
        Machine(
            name="laptop-cpu",
            kind="cpu",
            description="AMD Ryzen 7 7840U: eight Zen 4 cores, DDR5-5600 on 128 bits",
            bandwidth_gb_per_s=89.6,
            # 8 cores at the base clock of 3.3 GHz, sustained at 28 W: 8 x 3.3 x 32 and x 128
            peak_tera_ops={"fp32": 0.845, "int8": 3.38},
            memory_gb=32.0,
            dispatch_us=3.0,
            source="AMD data sheet (cores, base clock, DDR5-5600); peaks and bandwidth derived from it; "
            "memory and dispatch assumed",
        ),
        Machine(
            name="phone-npu",
            kind="npu",
            description="Snapdragon 8 Gen 3 class: Hexagon NPU, LPDDR5X at 4800 MHz on 64 bits",
            bandwidth_gb_per_s=76.8,
            peak_tera_ops={"fp16": 11.25, "int8": 45.0},
            memory_gb=12.0,
            dispatch_us=10.0,
            source="bandwidth derived from Qualcomm's memory clock; 45 TOPS from the press, not from "
            "Qualcomm; FP16 assumed at a quarter of it; memory and dispatch assumed",
        ),
        Machine(
            name="laptop-npu",
            kind="npu",
            description="Intel Core Ultra 200V: NPU 4, LPDDR5X-8533 on 128 bits",
            bandwidth_gb_per_s=136.5,
            peak_tera_ops={"fp16": 24.0, "int8": 48.0},
            memory_gb=32.0,
            dispatch_us=10.0,
            source="Intel (48 INT8 TOPS; 2048 INT8 and 1024 FP16 MACs a cycle in each engine); "
            "bandwidth derived from the memory; dispatch assumed",
        ),
        Machine(
            name="h100",
            kind="gpu",
            description="NVIDIA H100 SXM5, 80 GB HBM3",
            bandwidth_gb_per_s=3350.0,
            peak_tera_ops={"fp32": 67.0, "fp16": 989.4, "int8": 1978.9},
            memory_gb=80.0,
            dispatch_us=5.0,
            source="NVIDIA data sheet, tensor cores without sparsity, FP32 on CUDA cores; dispatch assumed",
        ),
        Machine(
            name="gpu-900gbs",
            kind="gpu",
            description="a 900 GB/s GPU: NVIDIA V100 SXM2, 16 GB HBM2",
            bandwidth_gb_per_s=900.0,
            peak_tera_ops={"fp32": 15.7, "fp16": 125.0, "int8": 62.8},
            memory_gb=16.0,
            dispatch_us=5.0,
            source="NVIDIA data sheet (FP32, FP16 tensor cores); INT8 derived: dp4a is four times FP32; "
            "dispatch assumed",
        ),
    )
}


def machine(name: str) -> Machine:
    if name not in MACHINES:
        raise InputError(
            f"no machine is called {name!r}",
            where="device",
            allowed=f"{', '.join((*MACHINES, THIS))}, or a {FILE_ENDING} file with one",
            next_step=did_you_mean(name, (*MACHINES, THIS)),
        )
    return MACHINES[name]


def read_machine(path: Path) -> Machine:
    """The machine in a user's file."""
    values = read_json(
        path, allowed=f"JSON with {', '.join(NAMES)}", next_step="docs/specification.md shows one"
    )
    return from_json(values, where=str(path))


def from_json(values: Any, *, where: str = "machine") -> Machine:
    """The machine of a JSON record. A damaged record raises: a wrong peak makes every verdict wrong."""
    if not isinstance(values, Mapping) or set(values) != set(NAMES):
        raise InputError(f"not a machine record{_difference(values)}", where=where, allowed=", ".join(NAMES))
    for name in TEXTS:
        if not isinstance(values[name], str) or not values[name].isprintable():
            raise InputError(f"{name} is {values[name]!r}", where=where, allowed="a line of text")
    if values["kind"] not in KINDS:
        raise InputError(f"unknown kind {values['kind']!r}", where=where, allowed=", ".join(KINDS))
    peaks = values["peak_tera_ops"]
    if not isinstance(peaks, Mapping) or not peaks or not set(peaks) <= set(DTYPES):
        raise InputError(
            "peak_tera_ops must map data types to numbers", where=where, allowed=", ".join(DTYPES)
        )
    for name, number in {**{name: values[name] for name in NUMBERS}, **peaks}.items():
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not 0 < number < float("inf"):
            raise InputError(f"{name} is {number!r}", where=where, allowed="a positive number")
    return Machine(**{**values, "peak_tera_ops": dict(peaks)})


def _difference(values: Any) -> str:
    """Missing and unknown keys of a record."""
    if not isinstance(values, Mapping):
        return ""
    missing, unknown = (
        ", ".join(sorted(keys)) for keys in (set(NAMES) - set(values), set(values) - set(NAMES))
    )
    return f" (missing: {missing})" if missing else f" (unknown: {unknown})"
