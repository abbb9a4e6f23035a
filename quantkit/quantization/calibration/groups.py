"""The sums of one group of windows and one part of the pass, on disk until all groups of the part are merged.

A mark is written last and holds a checksum of the sums and of the hidden states that the group leaves for the
next part: a group with a mark stands whole, and is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.quantization.calibration import running, store
from quantkit.runtime.manifest import sum_of


def _mark(folder: Path, part: int, group: int) -> Path:
    return folder / f"group_{part:04d}_{group:04d}.json"


def _sums(folder: Path, part: int, group: int) -> Path:
    return folder / f"sums_{part:04d}_{group:04d}.safetensors"


def write_group(folder: Path, part: int, group: int, sums: Mapping[str, running.Running]) -> None:
    """Write the sums, then the mark; the hidden states for the next part lie there already."""
    arrays = {
        f"{name}/{field}": tensor
        for name, one in sums.items()
        for field, tensor in running.arrays_of(one).items()
    }
    described = {name: [one.width, sorted(one.names)] for name, one in sums.items()}
    path = _sums(folder, part, group)
    with store.replacing(path) as unfinished:
        save_file(arrays, unfinished, metadata={"inputs": json.dumps(described)})
    files = [path, store.hidden_path(folder, part + 1, group)]
    checks = {file.name: sum_of(file) for file in files if file.exists()}
    with store.replacing(_mark(folder, part, group)) as unfinished:
        unfinished.write_text(json.dumps(checks), encoding="utf-8")


def has_group(folder: Path, part: int, group: int) -> bool:
    return _mark(folder, part, group).exists()


def is_whole(folder: Path, part: int, group: int) -> bool:
    """Whether a group of an earlier run stands undamaged."""
    if not has_group(folder, part, group):
        return False
    try:
        checks = read_json(_mark(folder, part, group))
        return all(sum_of(folder / name) == check for name, check in checks.items())
    except (InputError, OSError):
        return False


def forget(folder: Path, part: int, group: int) -> None:
    _mark(folder, part, group).unlink(missing_ok=True)


def read_group(folder: Path, part: int, group: int) -> dict[str, running.Running]:
    with safe_open(_sums(folder, part, group), framework="pt") as file:
        described = json.loads(file.metadata()["inputs"])
        fields: dict[str, list[str]] = {name: [] for name in described}
        keys = file.keys()
        for key in keys:
            name, _, field = key.rpartition("/")
            fields[name].append(field)
        return {
            name: running.from_arrays(
                width,
                frozenset(names),
                {field: file.get_tensor(f"{name}/{field}") for field in fields[name]},
            )
            for name, (width, names) in described.items()
        }


def merge_into(totals: dict[str, running.Running], sums: Mapping[str, running.Running]) -> None:
    """Add the sums of the next group."""
    for name, one in sums.items():
        totals[name] = running.merged(totals.get(name), one)
