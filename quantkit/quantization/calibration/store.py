"""Statistics on disk: one safetensors file for each part of the pass, and an index of finished parts.

Every file is written under another name and renamed when it is whole, and the index is written after the
parts that it lists: a run that is killed anywhere continues with the part that it was at, and one on workers
with the groups of windows that stand. The key in the
index covers the weights, the tokens, the requested statistics and the versions of libraries; nothing is
reused under another key. The index holds a checksum of itself and of every file that it relies on; a damaged
calibration is made again. Between two parts the hidden states lie in a plain file: mapped pages would count
as the process's memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.files import read_json, reading
from quantkit.model.model_map import Layer
from quantkit.model.weights.torch_model import values_of
from quantkit.quantization.calibration.running import Finished
from quantkit.quantization.calibration.statistics import FIELDS, InputStatistics
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.runtime.manifest import sum_of

FORMAT_VERSION = 5  # 5: panels of 256
INDEX = "index.json"
VALUES = {"range", "histogram"}  # statistics that are no arrays
GROUP_FILES = ("group_*.json", "sums_*.bin", "claim_*.json")  # of `groups` and `claims`
BEGIN_SECONDS = 10
READS = 4  # of an index that another process writes
AGAIN = "run the calibration again"
PLAIN_FIELDS = ("key", "num_tokens", "kind", "reason", "done", "is_finished")  # of `StatisticsFile`


BLOCKS, WHOLE, APART = "blocks", "whole", "apart"  # apart: whole, and no input counts as shared
WAYS = (BLOCKS, WHOLE, APART)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsFile:
    """The statistics of one model and one text, as far as they are collected."""

    folder: Path
    key: str
    requested: Mapping[str, frozenset[str]]  # matrix -> names of statistics
    num_tokens: int
    located: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # matrix -> (part, its input's name)
    kind: str = BLOCKS  # one of `WAYS` to run the model
    reason: str | None = None  # why the model is not run block by block
    done: int = 0  # finished parts
    is_finished: bool = False

    @property
    def way(self) -> str:
        return BLOCKS if self.kind == BLOCKS else f"{WHOLE}: {self.reason}"

    @property
    def unreached(self) -> tuple[str, ...]:
        """Matrices that no token came to."""
        return tuple(matrix for matrix in self.requested if matrix not in self.located)

    def tokens_by_matrix(self) -> dict[str, int]:
        """Tokens that came to each matrix."""
        tokens = dict.fromkeys(self.requested, 0)
        for part in {part for part, _ in self.located.values()}:
            path = _part_path(self.folder, part)
            with reading(path, "not a part of statistics", next_step=AGAIN), safe_open(path, "numpy") as file:
                values = json.loads(file.metadata()["values"])
            here = {matrix: entry for matrix, (number, entry) in self.located.items() if number == part}
            tokens |= {matrix: values[entry]["num_rows"] for matrix, entry in here.items()}
        return tokens

    def read(self, matrix: str) -> InputStatistics:
        """Statistics of one matrix's input; of an unreached matrix there are no rows."""
        if matrix not in self.requested:
            raise KeyError(f"no statistics of '{matrix}' were requested")
        if matrix not in self.located:
            return InputStatistics(num_rows=0)
        names = self.requested[matrix]
        part, entry = self.located[matrix]
        path = _part_path(self.folder, part)
        with reading(path, "not a part of statistics", next_step=AGAIN):
            with safe_open(path, framework="numpy") as file:
                values = json.loads(file.metadata()["values"])[entry]
                arrays = {FIELDS[name]: file.get_tensor(f"{entry}.{FIELDS[name]}") for name in names - VALUES}
            ranges = (values.get("quantiles") if "histogram" in names else None) or {}
            return InputStatistics(
                num_rows=values["num_rows"],
                low=values.get("low") if "range" in names else None,
                high=values.get("high") if "range" in names else None,
                quantiles={name: (ends[0], ends[1]) for name, ends in ranges.items()} or None,
                **arrays,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixStatistics:
    """The statistics of a projection's matrix, read when they are asked for; workers are sent this record."""

    file: StatisticsFile
    left_out: frozenset[str] = frozenset()  # matrices that count as not reached

    def __call__(self, layer: Layer) -> InputStatistics | None:
        if layer.matrix in self.left_out or layer.matrix not in self.file.located:
            return None
        return self.file.read(layer.matrix)


def resume(
    folder: Path,
    key: str,
    requested: Mapping[str, frozenset[str]],
    num_tokens: int,
    *,
    is_shared: bool = False,
) -> StatisticsFile:
    """The statistics of an earlier run with this key, finished or not; without one the folder is emptied.

    In a shared folder the index is written at once, so that no process empties what another one has begun.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = _earlier(folder, tries=READS if is_shared else 1)
    if file is not None and file.key == key:
        remove_torn(folder)
        return file
    fresh = StatisticsFile(folder=folder, key=key, requested=requested, num_tokens=num_tokens)
    if not is_shared:
        clear(folder)
        return fresh
    begun = folder / f"begun_{key[:16]}"
    with suppress(FileExistsError):
        begun.touch(exist_ok=False)
        clear(folder)
        write_index(fresh)
        begun.unlink()
        return fresh
    return _begun_elsewhere(begun, fresh)


def _earlier(folder: Path, *, tries: int) -> StatisticsFile | None:
    """The statistics of an earlier run; another process may replace files while they are read."""
    for left in reversed(range(tries)):
        try:
            return read_index(folder)
        except InputError as error:
            if not left:
                print(f"quantkit: statistics are made again: {error}", file=sys.stderr)
        time.sleep(0.5 if left else 0)
    return None


def _begun_elsewhere(begun: Path, fresh: StatisticsFile) -> StatisticsFile:
    """Wait until another process has emptied the folder and written the index; begin where it has died."""
    for _ in range(BEGIN_SECONDS):
        time.sleep(1)
        file = read_index(fresh.folder)
        if file is not None and file.key == fresh.key:
            return file
    begun.unlink(missing_ok=True)
    return resume(fresh.folder, fresh.key, fresh.requested, fresh.num_tokens, is_shared=True)


def remove_torn(folder: Path) -> None:
    """Remove the unfinished files of processes of this host that have ended."""
    for path in folder.glob("*.unfinished"):
        host, _, process = path.name.removesuffix(".unfinished").rpartition(".")[2].rpartition("-")
        if host == platform.node().replace(".", "-") and not psutil.pid_exists(int(process)):
            path.unlink(missing_ok=True)


def _part_path(folder: Path, part: int) -> Path:
    return folder / f"part_{part:04d}.safetensors"


def has_part(folder: Path, part: int) -> bool:
    """Whether the statistics of a part stand: merged, or among those that the index calls done."""
    try:
        return _part_path(folder, part).exists() or int(read_json(folder / INDEX)["done"]) > part
    except (InputError, LookupError):
        return False


def entries_of(folder: Path, part: int) -> tuple[str, ...]:
    """The names of the inputs whose statistics a part holds."""
    path = _part_path(folder, part)
    with reading(path, "not a part of statistics", next_step=AGAIN), safe_open(path, "numpy") as file:
        return tuple(json.loads(file.metadata()["values"]))


def hidden_path(folder: Path, part: int, group: int = 0) -> Path:
    """The file of the hidden states that a part reads, of one group of windows."""
    return folder / f"hidden_{part:04d}_{group:04d}.bin"


def has_hidden(folder: Path, part: int, num_groups: int) -> bool:
    """Whether a part has all that it reads; the first one reads tokens."""
    return not part or all(hidden_path(folder, part, group).exists() for group in range(num_groups))


def read_index(folder: Path) -> StatisticsFile | None:
    """The statistics in a folder; None where there are none of this version. Damaged ones raise."""
    if not (folder / INDEX).exists():
        return None
    index = read_json(folder / INDEX, next_step=AGAIN)
    if index.get("format_version") != FORMAT_VERSION:
        return None
    with reading(folder / INDEX, "damaged statistics", next_step=AGAIN):
        if index.pop("checksum", "") != _checksum(index):
            raise ValueError("the index differs from its checksum")
        for name, value in index["sums"].items():
            if sum_of(folder / name) != value:
                raise ValueError(f"{name} differs from its checksum")
        return StatisticsFile(
            folder=folder,
            requested={matrix: frozenset(names) for matrix, names in index["wanted"].items()},
            located={matrix: (int(part), str(entry)) for matrix, (part, entry) in index["located"].items()},
            **{name: index[name] for name in PLAIN_FIELDS},
        )


def _checksum(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def write_index(file: StatisticsFile) -> None:
    """Replace the index in one step."""
    kept = sorted(file.folder.glob("part_*.safetensors"))
    kept += [] if file.is_finished else sorted(file.folder.glob(f"hidden_{file.done:04d}_*.bin"))
    known = read_json(file.folder / INDEX)["sums"] if (file.folder / INDEX).exists() else {}
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "wanted": {matrix: sorted(names) for matrix, names in file.requested.items()},
        "located": file.located,
        **{name: getattr(file, name) for name in PLAIN_FIELDS},
        "sums": {},
    }
    for path in kept:
        with suppress(FileNotFoundError):  # another process that fills this folder needs it no more
            index["sums"][path.name] = known.get(path.name) or sum_of(path)
    index["checksum"] = _checksum(index)
    with replacing(file.folder / INDEX) as unfinished:
        unfinished.write_text(json.dumps(index), encoding="utf-8")


def write_part(folder: Path, part: int, entries: Mapping[str, Finished]) -> None:
    arrays = {
        f"{entry}.{name}": array for entry, (named, _) in entries.items() for name, array in named.items()
    }
    values = json.dumps({entry: values for entry, (_, values) in entries.items()})
    with replacing(_part_path(folder, part)) as unfinished:
        save_file(arrays, unfinished, metadata={"values": values})


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside, that becomes this one if the block ends without an error; several may write one."""
    unfinished = path.with_suffix(f".{platform.node().replace('.', '-')}-{os.getpid()}.unfinished")
    yield unfinished
    unfinished.replace(path)


def write_hidden(folder: Path, part: int, batches: Iterable[Tensor], group: int = 0) -> None:
    """Write the hidden states that a part will read; the file appears when it is whole."""
    with replacing(hidden_path(folder, part, group)) as unfinished, unfinished.open("wb") as file:
        for hidden_BTH in batches:
            file.write(hidden_BTH.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def read_hidden(folder: Path, part: int, first: int, like: Tensor, group: int = 0) -> Tensor:
    """The hidden states from window `first` of a group on, of the shape and dtype of `like`."""
    num_bytes = like.numel() * like.element_size()
    begin = first * (num_bytes // len(like))
    raw = np.fromfile(hidden_path(folder, part, group), np.uint8, num_bytes, offset=begin)
    return torch.from_numpy(raw).view(like.dtype).reshape(like.shape)


def clear_hidden(folder: Path, *, keep: int | None = None) -> None:
    """Remove the hidden states of finished parts."""
    for path in folder.glob("hidden_*.bin"):
        if keep is None or _part_of(path) < keep:
            path.unlink(missing_ok=True)  # another host may have been faster


def _part_of(path: Path) -> int:
    """The part in the name of a file of a group."""
    return int(path.name.split("_")[1])


def clear_groups(folder: Path, *, keep: int | None = None) -> None:
    """Remove the groups' sums of finished parts."""
    for pattern in GROUP_FILES:
        for path in folder.glob(pattern):
            if keep is None or _part_of(path) < keep:
                path.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove the files of a calibration, finished or not, and nothing else."""
    (folder / INDEX).unlink(missing_ok=True)  # first: without it the rest means nothing
    for pattern in ("hidden_*.bin", *GROUP_FILES, "part_*.safetensors", "*.unfinished"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def key_of(
    module: nn.Module,
    tokens_BT: Tokens,
    requested: Mapping[str, frozenset[str]],
    blocks: Sequence[str],
    settings: Sequence[int],
) -> str:
    """A hash of every weight, every token, the requested statistics, the settings and the versions."""
    config: Any = getattr(module, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    facts = {
        "format_version": FORMAT_VERSION,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "config": {key: value for key, value in described.items() if key != "_name_or_path"},
        "modules": repr(module),
        "shape": list(tokens_BT.shape),
        "wanted": {name: sorted(names) for name, names in sorted(requested.items())},
        "blocks": list(blocks),
        "settings": list(settings),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(np.ascontiguousarray(tokens_BT).data)
    for name, dtype, shape, chunks in values_of(module):
        digest.update(f"{name} {dtype} {shape}".encode())
        for rows in chunks:
            flat = rows.cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()
