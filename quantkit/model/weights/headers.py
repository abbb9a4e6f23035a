"""The headers of a safetensors checkpoint: read, checked, and compared with the model.

A header names every tensor with its type, shape and offset, so a checkpoint of any size is checked in
milliseconds and nothing is executed. Pickle files can run code when opened; they are refused.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from quantkit.errors import InputError
from quantkit.files import parse_json, read_json, reading, require_regular

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# Buffers that older versions of transformers saved and no version reads, and ranges of inputs.
SPARE = re.compile(
    r"(attn\.(masked_)?bias|attention\.(masked_)?bias|inv_freq|(position|token_type)_ids|num_batches_tracked"
    r"|\.(input|activation|output|[qkv])_(scale|zero_point))$"
)
# Training and multimodal models put these before the names of the model inside.
WRAPPERS = (
    *("module.", "_orig_mod.", "_fsdp_wrapped_module."),
    *("model.language_model.", "model.text_model.", "language_model.", "text_model."),
)
RENAMED_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # of 2018
CONVERSION = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('FOLDER')"
    ".save_pretrained('NEW_FOLDER', safe_serialization=True)\" in an environment that you trust the file in"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Scales and zero points by which some rows of a weight are integers."""

    bits: int
    size: int  # inputs of a group
    scales_OG: NDArray[np.float32]
    zeros_OG: NDArray[np.int8] | None  # None: all 0


class Packed(Protocol):
    """A weight that no plain array of numbers holds: in blocks with scales, or in several tensors."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def described(self) -> str: ...

    def read(self, start: int, count: int) -> NDArray[np.float32]:
        """Rows of the weight, in float32."""

    def groups(self, start: int, count: int) -> Groups | None:
        """How these rows are integers in groups of inputs; None where they are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Location, type and shape of one tensor of a checkpoint."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    scale: StoredTensor | None = None  # the values are multiplied by it
    block: tuple[int, ...] = ()  # values that share a scale, along each axis
    packed: Packed | None = None  # how its values are read where they are no array of `dtype`


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors checkpoint; empty when the folder holds no weights."""
    if (folder / INDEX_NAME).exists():
        return _read_indexed(folder)
    files = (
        [folder / SINGLE_NAME] if (folder / SINGLE_NAME).exists() else sorted(folder.glob("*.safetensors"))
    )
    if not files:
        _refuse_other_forms(folder)
        return {}
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(_read_file(file))
    return tensors


def _refuse_other_forms(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if "training_args" not in path.name)
    pickles = [path.name for path in files if path.suffix in PICKLE_SUFFIXES]
    if pickles:
        raise InputError(
            f"the weights are pickle files ({', '.join(pickles[:3])}), which can run code when opened",
            where=str(folder),
            allowed="safetensors checkpoints",
            next_step=f"convert it once: {CONVERSION}",
        )


def _read_file(file: Path) -> dict[str, StoredTensor]:
    """The header of one file; safetensors itself checks offsets, types and the file's length."""
    next_step = "copy or download the file again; compare its size and hash with the source's"
    with reading(file, "not a complete safetensors file", next_step=next_step):
        require_regular(file)
        with safe_open(file, framework="numpy") as handle, file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = parse_json(raw.read(length), where=file)
            return {
                name: StoredTensor(
                    name=name,
                    file=file,
                    dtype=header[name]["dtype"],
                    shape=tuple(header[name]["shape"]),
                    offset=8 + length + header[name]["data_offsets"][0],
                )
                for name in handle.keys()  # noqa: SIM118 - not a dict
            }


def _read_indexed(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX_NAME
    allowed = 'JSON with an object "weight_map" of tensor name to file name'
    with reading(index, "not a safetensors index", allowed=allowed):
        entries = {str(name): str(file) for name, file in read_json(index)["weight_map"].items()}
    outside = sorted(
        {file for file in entries.values() if Path(file).name != file or file in ("", ".", "..")}
    )
    if outside:
        raise InputError(
            f"the index points outside of its folder ({', '.join(outside[:3])})",
            where=str(index),
            allowed="plain file names",
            next_step="do not use this checkpoint unless you know where it comes from",
        )
    with reading(index, "not a safetensors index", allowed=allowed):  # names may be too long for files
        missing_files = sorted({file for file in entries.values() if not (folder / file).exists()})
    if missing_files:
        raise InputError(
            f"{len(missing_files)} shards are missing ({', '.join(missing_files[:3])})",
            where=str(index),
            next_step="copy or download the missing files into the folder",
        )
    stored = {file: _read_file(folder / file) for file in sorted(set(entries.values()))}
    lost = sorted(name for name, file in entries.items() if name not in stored[file])
    if lost:
        raise InputError(
            f"{len(lost)} tensors are not in the shard that the index names ({', '.join(lost[:3])})",
            where=str(index),
            next_step="index and shards belong to different checkpoints; copy or download both again",
        )
    return {name: stored[file][name] for name, file in entries.items()}


def match(
    stored: Mapping[str, StoredTensor], expected: Mapping[str, Tensor], *, prefixes: Sequence[str]
) -> dict[str, StoredTensor]:
    """The stored tensors that are weights of the model, under the model's names.

    A weight is a float tensor of the module's state: integer buffers, masks and the tensors of other models
    in the same checkpoint are none. Either side may lack the prefix that a model with a head puts before the
    names of its base model.
    """
    weights = {name for name, tensor in expected.items() if tensor.is_floating_point()}
    matched: dict[str, StoredTensor] = {}
    for name, tensor in sorted(stored.items(), key=lambda entry: entry[0] not in weights):
        own_name = _name_in(weights, name, prefixes)
        if own_name:
            matched.setdefault(own_name, tensor)
    return {name: matched[name] for name in expected if name in matched}


def _name_in(weights: Collection[str], name: str, prefixes: Sequence[str]) -> str | None:
    """The model's name of a stored tensor; None for a tensor that is none of its weights."""
    for old, new in RENAMED_ENDS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    spellings = [name, *(p + name for p in prefixes), *(name.removeprefix(p) for p in prefixes)]
    own_name = next((spelling for spelling in spellings if spelling in weights), None)
    wrapper = next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), None)
    if own_name or wrapper is None:
        return own_name
    return _name_in(weights, name.removeprefix(wrapper), prefixes)


def absent(matched: Collection[str], expected: Mapping[str, Tensor]) -> list[str]:
    """The model's weights that the checkpoint has under no name."""
    present = {id(expected[name]) for name in matched}
    return [
        name for name, tensor in expected.items() if id(tensor) not in present and tensor.is_floating_point()
    ]


def compare(
    stored: Mapping[str, StoredTensor],
    matched: Mapping[str, StoredTensor],
    expected: Mapping[str, Tensor],
    *,
    where: str,
) -> list[str]:
    """Compare a checkpoint's headers with the module's tensors.

    Wrong shapes raise; missing and unused tensors are returned as notes.
    """
    if not stored:
        return []
    wrong = [
        f"{name} is {list(tensor.shape)} and not {list(expected[name].shape)}"
        for name, tensor in matched.items()
        if tensor.shape != tuple(expected[name].shape)
    ]
    if wrong or not matched:
        shapes = f"{len(wrong)} tensors have another shape than the config says: {'; '.join(wrong[:3])}"
        raise InputError(
            shapes if wrong else "no tensor of the checkpoint belongs to this architecture",
            where=where,
            next_step="config.json and weights belong to different models; copy or download both again",
        )
    missing = absent(matched, expected)
    used = {tensor.name for tensor in matched.values()}
    extra = [name for name in stored if name not in used and not SPARE.search(name)]
    notes = []
    if missing:
        notes.append(f"{len(missing)} tensors are missing from the checkpoint: {', '.join(missing[:3])}")
    if extra:
        notes.append(f"{len(extra)} tensors of the checkpoint are not used: {', '.join(extra[:3])}")
    return notes
