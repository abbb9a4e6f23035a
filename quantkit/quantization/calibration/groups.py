"""The sums of one group of windows and one part of the pass, on disk until all groups of the part are merged.

Sums lie one behind the other in a plain file, so that they are written and read without a copy. A mark is
written last: the places of the sums, and a checksum of them and of the hidden states that the group leaves
for the next part. A group with a mark stands whole, and is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.quantization.calibration import running, store
from quantkit.runtime.manifest import sum_of


def _mark(folder: Path, part: int, group: int) -> Path:
    return folder / f"group_{part:04d}_{group:04d}.json"


def _sums(folder: Path, part: int, group: int) -> Path:
    return folder / f"sums_{part:04d}_{group:04d}.bin"


def write_group(folder: Path, part: int, group: int, sums: Mapping[str, running.Running]) -> None:
    """Write the sums, then the mark; the hidden states for the next part lie there already."""
    path, inputs = _sums(folder, part, group), {}
    with store.replacing(path) as unfinished, unfinished.open("wb") as file:
        for name, one in sums.items():
            places = {}
            for field, tensor in running.arrays_of(one).items():
                array = tensor.numpy()
                places[field] = [array.dtype.str, array.shape, file.tell()]
                file.write(array.data if array.size else b"")
            inputs[name] = {"width": one.width, "names": sorted(one.names), "places": places}
    files = [path, store.hidden_path(folder, part + 1, group)]
    checks = {file.name: sum_of(file) for file in files if file.exists()}
    with store.replacing(_mark(folder, part, group)) as unfinished:
        unfinished.write_text(json.dumps({"checks": checks, "inputs": inputs}), encoding="utf-8")


def has_group(folder: Path, part: int, group: int) -> bool:
    return _mark(folder, part, group).exists()


def is_whole(folder: Path, part: int, group: int) -> bool:
    """Whether a group of an earlier run stands undamaged."""
    if not has_group(folder, part, group):
        return False
    try:
        checks = read_json(_mark(folder, part, group))["checks"]
        return all(sum_of(folder / name) == check for name, check in checks.items())
    except (InputError, OSError, LookupError):
        return False


def forget(folder: Path, part: int, group: int) -> None:
    _mark(folder, part, group).unlink(missing_ok=True)


def read_group(folder: Path, part: int, group: int) -> dict[str, running.Running]:
    path = _sums(folder, part, group)
    mark = json.loads(_mark(folder, part, group).read_text(encoding="utf-8"))
    sums = {}
    for name, described in mark["inputs"].items():
        tensors = {
            field: torch.from_numpy(
                np.fromfile(path, dtype, int(np.prod(shape)), offset=offset).reshape(shape)
            )
            for field, (dtype, shape, offset) in described["places"].items()
        }
        sums[name] = running.from_arrays(described["width"], frozenset(described["names"]), tensors)
    return sums


def merge_into(totals: dict[str, running.Running], sums: Mapping[str, running.Running]) -> None:
    """Add the sums of the next group."""
    for name, one in sums.items():
        totals[name] = running.merged(totals.get(name), one)
