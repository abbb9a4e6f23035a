"""Reads a written checkpoint by its header alone, as any reader of safetensors could."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from quantkit.quantization.layout import Checkpoint, Slot, TensorSpec


def stored_scale(scale: float) -> float:
    """The scale of a block as it is stored: the next float16 that is no smaller."""
    half = np.float16(scale)
    return float(half if float(half) >= scale else np.nextafter(half, np.float16(np.inf)))


def open_checkpoint(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    metadata = entries.pop("__metadata__")
    slots = {}
    for name, entry in entries.items():
        spec = TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))
        first, last = entry["data_offsets"]
        slots[name] = Slot(spec=spec, offset=8 + length + first, length=last - first)
    return Checkpoint(path=path, slots=slots, description=json.loads(metadata["quantkit"]))
