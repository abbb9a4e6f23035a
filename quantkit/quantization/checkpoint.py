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

from quantkit.errors import InputError
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


def write_checkpoint(
    path: Path,
    specs: Sequence[TensorSpec],
    parts: Iterable[Part],
    description: Mapping[str, Any],
) -> Checkpoint:
    """Write tensors that come in parts; the parts of a tensor come in order."""
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
    written = dict.fromkeys(slots, 0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(start + sum(slot.length for slot in slots.values()))
        for name, part in parts:
            slot = slots[name]
            assert part.dtype == DTYPES[slot.spec.dtype], (name, part.dtype)
            file.seek(slot.offset + written[name])
            data = np.ascontiguousarray(part)
            file.write(data.data)
            written[name] += data.nbytes
    unfinished = [name for name, slot in slots.items() if written[name] != slot.length]
    assert not unfinished, f"not written in full: {unfinished[:3]}"
    return Checkpoint(path=path, slots=slots, description=description)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a quantized checkpoint, and refuse any other file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length)) if length < path.stat().st_size else {}
        metadata = entries.pop("__metadata__", {})
        version = int(metadata.get("format_version", 0)) if metadata.get("format") == "quantkit" else 0
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"not a safetensors file ({error})", where=str(path)) from error
    if not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            "not a quantized checkpoint of a version that this quantkit reads",
            where=str(path),
            allowed=f"format 'quantkit', version 1 to {FORMAT_VERSION}",
            next_step="write it again with 'quantkit quantize', or update quantkit",
        )
    try:
        slots = {name: _slot(name, entry, start=8 + length) for name, entry in entries.items()}
        description = json.loads(metadata["quantkit"])
    except (ValueError, TypeError, LookupError) as error:
        raise InputError(f"its header is damaged ({error!r})", where=str(path)) from error
    if any(slot.offset + slot.length > path.stat().st_size for slot in slots.values()):
        raise InputError("the file is shorter than its header says", where=str(path))
    return Checkpoint(path=path, slots=slots, description=description)


def _slot(name: str, entry: Mapping[str, Any], *, start: int) -> Slot:
    spec = TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))
    first, last = entry["data_offsets"]
    if first < 0 or last - first != spec.num_bytes:
        raise ValueError(f"the place of '{name}' does not fit its shape")
    return Slot(spec=spec, offset=start + first, length=last - first)
