"""A model's weights as float32 rows, a few at a time, from any float type of a checkpoint.

Rows are read with plain file reads and not through a memory map: mapped pages count as the process's memory
until the kernel reclaims them, so quantizing 13 GB would need 13 GB in a container. Tensors with NaN or
infinite values raise an error, since one NaN makes every scale of its block NaN.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.weights.headers import Groups, StoredTensor
from quantkit.model.weights.scales import SCALE_ENDS

Floats = NDArray[np.float32]
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
SCALED_DTYPES: dict[str, Any] = {**DTYPES, "I8": np.int8, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


class TensorSource(Protocol):
    def shape(self, name: str) -> tuple[int, ...]: ...

    def has(self, name: str) -> bool: ...

    def read(self, name: str, start: int = 0, count: int | None = None) -> Floats: ...

    def source_bytes(self) -> int: ...


@runtime_checkable
class GroupSource(Protocol):
    """A source that may know how its weights are integers."""

    def groups(self, name: str, start: int = 0, count: int | None = None) -> Groups | None:
        """Scales and zero points of rows that are integers in groups of inputs; None where they are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTensors:
    """Tensors of a safetensors checkpoint, under canonical names."""

    stored: Mapping[str, StoredTensor]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    computed: Mapping[str, Floats] = field(default_factory=dict)  # by the class, and in no checkpoint

    def _find(self, name: str) -> StoredTensor | None:
        names = (name, *self.aliases.get(name, ()))
        return next((self.stored[alias] for alias in names if alias in self.stored), None)

    def _get(self, name: str) -> StoredTensor:
        tensor = self._find(name)
        if tensor is None:
            raise InputError(
                f"the checkpoint has no tensor '{name}'",
                where=str(next(iter(self.stored.values())).file.parent) if self.stored else name,
                next_step="copy or download the checkpoint again; config.json asks for this tensor",
            )
        return tensor

    def has(self, name: str) -> bool:
        return name in self.computed or self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.computed[name].shape if name in self.computed else self._get(name).shape

    def source_bytes(self) -> int:
        return sum(stored_bytes(tensor) for tensor in self.stored.values())

    def groups(self, name: str, start: int = 0, count: int | None = None) -> Groups | None:
        tensor = None if name in self.computed else self._find(name)
        if tensor is None or tensor.packed is None:
            return None
        return tensor.packed.groups(start, tensor.shape[0] - start if count is None else count)

    def read(self, name: str, start: int = 0, count: int | None = None) -> Floats:
        """Rows as float32; every value is a finite number."""
        if name in self.computed:
            return self.computed[name][start : None if count is None else start + count]
        tensor = self._get(name)
        rows = (tensor.shape or (1,))[0]
        count = rows - start if count is None else min(count, rows - start)
        values = tensor.packed.read(start, count) if tensor.packed else read_rows(tensor, start, count)
        if tensor.scale is not None:
            values *= _scale_rows(tensor, tensor.scale, start, count)
        _require_finite(values, tensor)
        return values


def stored_bytes(tensor: StoredTensor) -> int:
    """Bytes of a tensor and of its scale in the checkpoint."""
    if tensor.packed:
        return tensor.packed.num_bytes
    return math.prod(tensor.shape) * _width(tensor) + (stored_bytes(tensor.scale) if tensor.scale else 0)


def read_rows(tensor: StoredTensor, start: int, count: int) -> Floats:
    """Stored values as float32, without their scale."""
    rest = tensor.shape[1:]
    per_row = math.prod(rest)
    with tensor.file.open("rb", buffering=0) as file:
        raw = np.fromfile(
            file,
            SCALED_DTYPES[tensor.dtype],
            count * per_row,
            offset=tensor.offset + start * per_row * _width(tensor),
        )
    values = raw if tensor.dtype == "F32" else _widen(raw, tensor.dtype)
    return values.reshape(count, *rest)


def _scale_rows(tensor: StoredTensor, scale: StoredTensor, start: int, count: int) -> Floats:
    """The scale of every value in some rows of a tensor."""
    scales = read_rows(scale, 0, (scale.shape or (1,))[0])
    scales = scales.reshape(*scale.shape, *[1] * (len(tensor.shape) - len(scale.shape)))
    ranges = [np.arange(start, start + count), *(np.arange(size) for size in tensor.shape[1:])]
    blocks = [axis // block for axis, block in zip(ranges, tensor.block, strict=True)]
    return scales[np.ix_(*blocks)]


def _widen(raw: NDArray[Any], dtype: str) -> Floats:
    if dtype == "BF16":  # the upper half of a float32: shifting is several times faster than converting
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is reported by _require_finite
        return raw.astype(np.float32)


def _width(tensor: StoredTensor) -> int:
    dtypes = DTYPES if tensor.scale is None and not tensor.name.endswith(SCALE_ENDS) else SCALED_DTYPES
    if tensor.dtype not in dtypes:
        raise InputError(
            f"'{tensor.name}' is stored as {tensor.dtype}",
            where=str(tensor.file),
            allowed=", ".join(DTYPES),
            next_step="start from the float checkpoint that this one was made from",
        )
    return int(np.dtype(dtypes[tensor.dtype]).itemsize)


def _require_finite(values: Floats, tensor: StoredTensor) -> None:
    # A finite sum of squares proves that every value is finite; one cheap pass decides the usual case.
    with np.errstate(over="ignore", invalid="ignore"):
        flat = values.reshape(-1)
        if np.isfinite(np.dot(flat, flat)) or np.isfinite(values).all():
            return
    bad = int((~np.isfinite(values)).sum())
    kind = "NaN" if np.isnan(values).any() else "infinite"
    raise InputError(
        f"'{tensor.name}' holds {bad} values that are {kind} ({tensor.dtype})",
        where=str(tensor.file),
        next_step="overflow in training or in a conversion to FP16 does this; start from a sound checkpoint",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomTensors:
    """Seeded random weights: valid for size and speed, meaningless for accuracy."""

    shapes: Mapping[str, tuple[int, ...]]
    seed: int = 0
    gain_offset: float = 0.0
    num_values: int | None = None  # without counting a shared tensor under each of its names

    def has(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def source_bytes(self) -> int:
        every_name = sum(math.prod(shape) for shape in self.shapes.values())
        return 4 * (every_name if self.num_values is None else self.num_values)

    def read(self, name: str, start: int = 0, count: int | None = None) -> Floats:
        """Rows as float32, independent of the range and order of reads."""
        rows, *rest = self.shapes[name] or (1,)
        count = rows - start if count is None else min(count, rows - start)
        if not rest:  # biases are 0 and norm gains 1
            gain = 0.0 if name.endswith("bias") else 1.0 - self.gain_offset
            return np.full(count, gain, np.float32)
        seed = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        width = math.prod(rest)
        spread = np.float32(0.02 * 3**0.5)
        parts = []
        for row in range(start, start + count):  # a stream for each row: any range reads alone
            stream = np.random.Generator(
                np.random.Philox(key=int.from_bytes(seed[:8], "little"), counter=[0, 0, 0, row])
            )
            parts.append(stream.random(width, np.float32))
        return ((np.stack(parts) * 2 - 1) * spread).reshape(count, *rest)
