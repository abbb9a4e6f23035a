"""The quantized checkpoint: a safetensors file that is written in one pass, as the weights come.

All shapes follow from the plan, so the header is written first and every tensor then goes to its place in
the file as soon as it is known; memory holds a few rows. The same file is the external data of a large
`model.onnx`: the graph points into it by offset, so that no weight is stored twice. See docs/format.md.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.quantization.layout import DTYPES, Checkpoint, Part, Slot, TensorSpec

FORMAT_VERSION = 3
ALIGNMENT = 64  # of the first tensor, and of every tensor whose size allows: a cache line


def _lay_out(specs: Sequence[TensorSpec]) -> list[tuple[TensorSpec, int]]:
    """Tensors with their offsets from the first; sizes of whole cache lines go first, odd sizes last."""
    ordered = sorted(specs, key=lambda spec: (spec.num_bytes % ALIGNMENT != 0, spec.num_bytes % 4 != 0))
    placed, offset = [], 0
    for spec in ordered:
        placed.append((spec, offset))
        offset += spec.num_bytes
    return placed


def reserve_checkpoint(path: Path, specs: Sequence[TensorSpec], description: Mapping[str, Any]) -> Checkpoint:
    """Write the header; the tensors are a hole in the file, and read as zeros."""
    placed = _lay_out(specs)
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "quantkit",
            "format_version": str(FORMAT_VERSION),
            "quantkit": json.dumps(description, sort_keys=True),
        }
    }
    for spec, offset in placed:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % ALIGNMENT)  # the format allows trailing spaces
    start = 8 + len(header)
    slots = {
        spec.name: Slot(spec=spec, offset=start + offset, length=spec.num_bytes) for spec, offset in placed
    }
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(start + sum(slot.length for slot in slots.values()))
    return Checkpoint(path=path, slots=slots, description=description)


def write_checkpoint(
    path: Path,
    specs: Sequence[TensorSpec],
    parts: Iterable[Part],
    description: Mapping[str, Any],
) -> Checkpoint:
    """Write tensors that come in parts; the parts of a tensor come in order."""
    checkpoint = reserve_checkpoint(path, specs, description)
    slots = checkpoint.slots
    written = dict.fromkeys(slots, 0)
    with path.open("r+b") as file:
        for name, part in parts:
            slot = slots[name]
            assert part.dtype == DTYPES[slot.spec.dtype], (name, part.dtype)
            file.seek(slot.offset + written[name])
            data = np.ascontiguousarray(part)
            file.write(data.data)
            written[name] += data.nbytes
    unfinished = [name for name, slot in slots.items() if written[name] != slot.length]
    assert not unfinished, f"not written in full: {unfinished[:3]}"
    return checkpoint
