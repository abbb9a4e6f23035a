"""Statistics on disk: one safetensors file for each part of the pass, and an index that is always true.

Every file is written under another name and renamed when it is whole, and the index, which says how many
parts are done, comes after them: a run that is killed anywhere goes on with the part that it was at. The key
in the index covers the weights, the tokens, what was asked for and the versions; nothing is reused under
another key. Between two parts the hidden states lie in a plain file: mapped pages would count as the
process's memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.quantization.layout import Evidence

FORMAT_VERSION = 1
INDEX = "index.json"
ARRAYS = {
    "second_moment": "second_moment_II",
    "peak": "peak_I",
    "mean": "mean_I",
    "mean_magnitude": "mean_magnitude_I",
    "sample": "sample_TI",
}
Finished = tuple[Mapping[str, NDArray[np.float32]], Mapping[str, Any]]  # what `running.finish` gives


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """Where the statistics of a matrix lie."""

    part: int
    entry: str  # the first matrix that reads this input; others share it


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsFile:
    """The finished statistics of one model and one text."""

    folder: Path
    key: str
    way: str  # how the model was run: "blocks", or "whole" and the reason
    wanted: Mapping[str, frozenset[str]]
    located: Mapping[str, Located]
    unreached: tuple[str, ...]  # matrices that no token came to
    num_tokens: int

    def read(self, matrix: str) -> Evidence:
        """What was seen of one matrix's input; an unreached one has no rows."""
        if matrix not in self.wanted:
            raise KeyError(f"no statistics of '{matrix}' were asked for")
        wants = self.wanted[matrix]
        values: Mapping[str, Any] = {"num_rows": 0}
        arrays: dict[str, NDArray[np.float32]] = {}
        if matrix in self.located:
            place = self.located[matrix]
            with safe_open(part_path(self.folder, place.part), framework="numpy") as file:
                values = json.loads(file.metadata()["values"])[place.entry]
                for want, name in ARRAYS.items():
                    if want in wants:
                        arrays[name] = file.get_tensor(f"{place.entry}.{name}")
        ranges = values.get("quantiles") if "histogram" in wants else None
        return Evidence(
            num_rows=values["num_rows"],
            second_moment_II=arrays.get("second_moment_II"),
            peak_I=arrays.get("peak_I"),
            mean_I=arrays.get("mean_I"),
            mean_magnitude_I=arrays.get("mean_magnitude_I"),
            low=values.get("low") if "range" in wants else None,
            high=values.get("high") if "range" in wants else None,
            quantiles=None if ranges is None else {name: (ends[0], ends[1]) for name, ends in ranges.items()},
            sample_TI=arrays.get("sample_TI"),
        )


def open_statistics(folder: Path) -> StatisticsFile:
    """Finished statistics, without any of their tensors."""
    index = read_index(folder)
    if not index or not index["is_finished"]:
        raise InputError(
            "the folder holds no finished statistics" if index else "the folder holds no statistics",
            where=str(folder),
            next_step="run the calibration again; it goes on where it was interrupted",
        )
    return StatisticsFile(
        folder=folder,
        key=index["key"],
        way=index["way"],
        wanted={name: frozenset(wants) for name, wants in index["wanted"].items()},
        located={name: Located(part=part, entry=entry) for name, (part, entry) in index["located"].items()},
        unreached=tuple(index["unreached"]),
        num_tokens=index["num_tokens"],
    )


def read_evidence(folder: Path, matrix: str) -> Evidence:
    """What calibration saw of one matrix's input."""
    return open_statistics(folder).read(matrix)


def part_path(folder: Path, part: int) -> Path:
    """The statistics that one part of the pass collected."""
    return folder / f"part_{part:04d}.safetensors"


def hidden_path(folder: Path, part: int) -> Path:
    """The hidden states that a part reads."""
    return folder / f"hidden_{part:04d}.bin"


def read_index(folder: Path) -> dict[str, Any]:
    """The index, or nothing where there is none that this version can read."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(index, dict) and index.get("format_version") == FORMAT_VERSION
    return index if is_ours else {}


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Replace the index in one step."""
    with _replacing(folder / INDEX) as file:
        file.write(json.dumps({"format_version": FORMAT_VERSION, **index}, sort_keys=True).encode())


def write_part(folder: Path, part: int, entries: Mapping[str, Finished]) -> None:
    """Write the statistics of one part."""
    arrays = {
        f"{entry}.{name}": array for entry, (found, _) in entries.items() for name, array in found.items()
    }
    described = json.dumps({entry: values for entry, (_, values) in entries.items()})
    unfinished = part_path(folder, part).with_suffix(".unfinished")
    save_file(arrays, unfinished, metadata={"values": described})
    unfinished.replace(part_path(folder, part))


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        yield file
    unfinished.replace(path)


@contextmanager
def writing_hidden(folder: Path, part: int) -> Iterator[IO[bytes]]:
    """A file for the hidden states that a part will read; it appears when it is whole."""
    with _replacing(hidden_path(folder, part)) as file:
        yield file


def append_hidden(file: IO[bytes], hidden: Tensor) -> None:
    """Add the hidden states of a few windows."""
    file.write(hidden.detach().contiguous().view(torch.uint8).numpy().data)


def read_hidden(folder: Path, part: int, first: int, like: Tensor) -> Tensor:
    """The hidden states from window `first` on, of the shape and kind of `like`."""
    num_bytes = like.numel() * like.element_size()
    begin = first * (num_bytes // len(like))
    raw = np.fromfile(hidden_path(folder, part), np.uint8, num_bytes, offset=begin)
    return torch.from_numpy(raw).view(like.dtype).reshape(like.shape)


def clear_hidden(folder: Path, *, keep: int | None = None) -> None:
    """Remove hidden states that no part will read any more."""
    kept = None if keep is None else hidden_path(folder, keep)
    for path in folder.glob("hidden_*.bin"):
        if path != kept:
            path.unlink()


def clear(folder: Path) -> None:
    """Remove all that a calibration wrote, finished or not, and nothing else."""
    (folder / INDEX).unlink(missing_ok=True)  # first: without it the rest means nothing
    for pattern in ("hidden_*.bin", "part_*.safetensors", "*.unfinished"):
        for path in folder.glob(pattern):
            path.unlink()


def key_of(
    module: nn.Module,
    tokens_BT: NDArray[np.int64],
    wanted: Mapping[str, frozenset[str]],
    blocks: Sequence[str],
    settings: Sequence[int],
) -> str:
    """A hash of all that decides the statistics: every weight, every token, what is asked for, versions."""
    config: Any = getattr(module, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    facts = {
        "format_version": FORMAT_VERSION,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "config": {key: value for key, value in described.items() if key != "_name_or_path"},
        "modules": repr(module),
        "shape": list(tokens_BT.shape),
        "wanted": {name: sorted(wants) for name, wants in sorted(wanted.items())},
        "blocks": list(blocks),
        "settings": list(settings),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(np.ascontiguousarray(tokens_BT, np.int64).data)
    seen: set[int] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse a disk that is too small before hours are spent on it."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise InputError(
            f"calibration needs {num_bytes / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free",
            where=str(folder),
            next_step="choose a folder on a larger disk, or a method that needs no second moments",
        )
