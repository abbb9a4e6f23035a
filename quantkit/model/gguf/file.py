"""The header of a GGUF file: metadata, and the type, shape and place of every tensor.

The header is parsed here and not by the package `gguf`, whose reader maps the whole file, believes its counts
and takes seconds for a vocabulary. Every count and length is compared with the bytes that are left before it
is used, so a hostile header costs no more than its own bytes. Dequantization is the package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import reading, require_regular

Floats = NDArray[np.float32]
SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20  # a vocabulary of 260,000 tokens with its merges takes about 15 MB
MAX_DIMENSIONS = 4
LEAST_ENTRY_BYTES = 13  # of a key of one letter with one byte
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
SCALARS = (
    "<B",
    "<b",
    "<H",
    "<h",
    "<I",
    "<i",
    "<f",
    "<?",
    "",
    "",
    "<Q",
    "<q",
    "<d",
)  # by the number of a type
STRING, ARRAY = 8, 9
COPY_AGAIN = "copy or download the file again; compare its size and hash with the source's"
INSTALL = "pip install 'quantkit-onnx[gguf]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor of the file; the shape has rows first, as in numpy."""

    name: str
    file: Path
    kind: str  # the name of its type, such as "Q4_K"
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def row_bytes(self) -> int:
        block, size = block_of(self.kind)
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def rows(self, start: int, count: int) -> Floats:
        """Rows [count, columns] of a matrix, or of a vector its only one, dequantized."""
        return dequantized(self.raw(start, count), self.kind)

    def raw(self, start: int, count: int) -> NDArray[np.uint8]:
        """The bytes of some rows."""
        size = self.row_bytes
        raw = np.fromfile(self.file, np.uint8, count * size, offset=self.offset + start * size)
        return raw.reshape(count, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def quants() -> Any:
    """The package that knows the types of GGUF."""
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            "GGUF files are read with the package gguf, which is not installed",
            where="GGUF",
            next_step=INSTALL,
        ) from error
    return gguf


@cache
def block_of(kind: str) -> tuple[int, int]:
    """(values of a block, its bytes) of a type."""
    gguf = quants()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(block), int(size)


def dequantized(raw: NDArray[np.uint8], kind: str) -> Floats:
    """The values of rows of bytes in float32."""
    gguf = quants()
    with np.errstate(all="ignore"):  # numbers that are none are reported by whoever reads them
        values: Floats = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return np.array(values, np.float32)  # a copy: some types give views of the bytes


def read_gguf(path: Path) -> GgufFile:
    """The header of a file; no tensor is read."""
    quants()
    with reading(path, "not a complete GGUF file", next_step=COPY_AGAIN):
        require_regular(path)
        with path.open("rb") as file:
            return _parsed(_Bytes(file, min(path.stat().st_size, MAX_HEADER_BYTES)), path)


class _Bytes:
    """The bytes of a header, with what is left of them."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.place = file, size, 0

    @property
    def left(self) -> int:
        return self.size - self.place

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError(f"{count:,} bytes are announced, and {self.left:,} are left")
        content = self.file.read(count)
        if len(content) != count:
            raise ValueError("the file ends within its header")
        self.place += count
        return content

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        if not 0 <= kind < len(SCALARS):
            raise ValueError(f"{kind} is no type of metadata")
        return self.number(SCALARS[kind])

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == ARRAY or not 0 <= kind < len(SCALARS):
            raise ValueError(f"an array of type {kind}")
        if count * (8 if kind == STRING else struct.calcsize(SCALARS[kind])) > self.left:
            raise ValueError(f"an array of {count:,} values, and {self.left:,} bytes are left")
        if kind == STRING:
            return [self.text() for _ in range(count)]
        form = f"<{count}{SCALARS[kind][1]}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))


def _parsed(header: _Bytes, path: Path) -> GgufFile:
    if header.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = header.number("<I")
    if version not in VERSIONS:
        raise InputError(
            f"the file has version {version} of GGUF",
            where=str(path),
            allowed=", ".join(map(str, VERSIONS)) + ", in little-endian bytes",
            next_step="convert it again with a present llama.cpp",
        )
    num_tensors, num_entries = header.number("<Q"), header.number("<Q")
    if (num_tensors + num_entries) * LEAST_ENTRY_BYTES > header.left:
        raise ValueError(f"{num_tensors:,} tensors and {num_entries:,} keys are announced")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = header.text()
        if key in metadata:
            raise ValueError(f"'{key}' is there twice")
        metadata[key] = header.value(header.number("<I"))
    entries = [_tensor_entry(header) for _ in range(num_tensors)]
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise ValueError(f"{ALIGNMENT_KEY} is {alignment!r}")
    start = -(-header.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"the tensor '{name}' is there twice")
        tensors[name] = GgufTensor(
            name=name,
            file=path.resolve(),
            kind=_kind(name, shape, kind, path),
            shape=shape,
            offset=start + offset,
        )
    _require_apart(tensors, path.stat().st_size)
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _tensor_entry(header: _Bytes) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with rows first, number of its type, offset from the first tensor)."""
    name, num_dimensions = header.text(), header.number("<I")
    if not 0 < num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"the tensor '{name}' has {num_dimensions} dimensions")
    shape = tuple(reversed([int(header.number("<Q")) for _ in range(num_dimensions)]))
    return name, shape, header.number("<I"), header.number("<Q")


def _kind(name: str, shape: tuple[int, ...], number: int, path: Path) -> str:
    """The name of a tensor's type, checked with its shape."""
    kind = _readable(number)
    if kind is None:
        raise InputError(
            f"'{name}' is stored in type {number} of GGUF, which is not read",
            where=str(path),
            allowed="types that the package gguf dequantizes, such as Q4_0, Q4_K, Q8_0, IQ4_XS and BF16",
            next_step="take another file of this model, or install a newer gguf",
        )
    if min(shape) < 1 or shape[-1] % block_of(kind)[0]:
        raise ValueError(f"the tensor '{name}' of {list(shape)} has no whole blocks of {kind}")
    return kind


@cache
def _readable(number: int) -> str | None:
    """The name of a type, or None where nothing dequantizes it."""
    try:
        kind: str = quants().GGMLQuantizationType(number).name
        dequantized(np.zeros((1, block_of(kind)[1]), np.uint8), kind)
    except (ValueError, NotImplementedError, KeyError):
        return None
    return kind


def _require_apart(tensors: Mapping[str, GgufTensor], size: int) -> None:
    """Refuse tensors that share bytes or end outside of the file."""
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for tensor in ordered:
        if tensor.offset + tensor.num_bytes > size:
            raise ValueError(f"the tensor '{tensor.name}' ends after byte {size:,}, the last of the file")
    for first, second in pairwise(ordered):
        if first.offset + first.num_bytes > second.offset:
            raise ValueError(f"the tensors '{first.name}' and '{second.name}' share bytes")
