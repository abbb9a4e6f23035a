"""Weights that other quantizers packed: GPTQ, AWQ, compressed-tensors in 4 bits, and bitsandbytes.

The value of a weight is scale x (code - zero) of its group of inputs, computed in float32, where it is exact:
the half precision in which kernels multiply would round it. Codes are returned around zero, as a grid has
them, so that 0 is the middle of what the file holds.

- GPTQ: `qweight` [in / per, out], `qzeros` [groups, out / per], less one in its first format, `g_idx` [in]
- AWQ: `qweight` [in, out / per] and `qzeros`, whose eight columns lie in the order of `AWQ_ORDER`
- compressed-tensors: `weight_packed` [out, in / per], `weight_scale` [out, groups], `weight_zero_point`
- bitsandbytes: codes of a table with a scale for 64 values, which may be codes themselves; or INT8 with `SCB`
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import reading
from quantkit.model.weights.headers import Groups, StoredTensor
from quantkit.model.weights.scales import weight_settings
from quantkit.model.weights.tensors import DTYPES, read_rows

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
WORD = 32  # bits of an int32, which holds several codes
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the codes of a word, from the lowest bits
STATE = ".quant_state.bitsandbytes__"
INT8_STEP = np.float32(7.874015718698502e-3)  # 1 / 127, by which bitsandbytes multiplies
NEXT_STEP = "copy or download config.json and weights again; they belong to different models"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedWeight:
    """Integers with a scale, and a zero point, for a group of inputs."""

    form: str  # "gptq", "awq" or "rows"
    shape: tuple[int, int]
    bits: int
    group: int
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None  # None: 0
    adds_one: bool = False  # to stored zero points
    group_of_input: StoredTensor | None = None  # None: groups lie in order

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        parts = (self.codes, self.scales, self.zeros, self.group_of_input)
        return tuple(part for part in parts if part is not None)

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(part) for part in self.parts)

    @property
    def described(self) -> str:
        return f"{self.bits} bits in groups of {self.group}"

    def read(self, start: int, count: int) -> Floats:
        codes_OI = self._codes(start, count)
        scales_OG, zeros_OG = self._steps(start, count)
        places_I = self.places()
        values = codes_OI.astype(np.float32)
        if zeros_OG is not None:
            values -= zeros_OG[:, places_I]
        values *= scales_OG[:, places_I]
        return values

    def groups(self, start: int, count: int) -> Groups | None:
        """Scales and zero points of some rows; None where groups are out of order."""
        if not np.array_equal(self.places(), np.arange(self.shape[1]) // self.group):
            return None
        scales_OG, zeros_OG = self._steps(start, count)
        zeros = None if zeros_OG is None or not zeros_OG.any() else zeros_OG.astype(np.int8)
        return Groups(bits=self.bits, size=self.group, scales_OG=scales_OG, zeros_OG=zeros)

    def places(self) -> NDArray[np.int64]:
        """The group of every input."""
        if self.group_of_input is None:
            return np.asarray(np.arange(self.shape[1]) // self.group, np.int64)
        places_I = _numbers(self.group_of_input).astype(np.int64)
        num_groups = -(-self.shape[1] // self.group)
        if places_I.min(initial=0) < 0 or places_I.max(initial=0) >= num_groups:
            raise InputError(
                f"'{self.group_of_input.name}' names groups that are none of {num_groups}",
                where=str(self.group_of_input.file),
                next_step=NEXT_STEP,
            )
        return places_I

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _codes(self, start: int, count: int) -> Ints:
        """Codes [O, I] of some rows, around 0."""
        if self.form == "rows":
            words = _numbers(self.codes, start, count)
            return np.asarray(_unpacked(words, self.bits)[:, : self.shape[1]] - self._middle, np.int32)
        if self.form == "gptq":
            codes_IO = _unpacked(_column_range(self.codes, start, start + count).T, self.bits).T
        else:
            per = WORD // self.bits
            first, last = start // per, -(-(start + count) // per)
            words = _column_range(self.codes, first, last)
            codes_IO = self._columns(words)[:, start - first * per :][:, :count]
        return np.asarray(np.ascontiguousarray(codes_IO.T) - self._middle, np.int32)

    def _steps(self, start: int, count: int) -> tuple[Floats, Ints | None]:
        """(scales [O, groups], zero points [O, groups] or None) of some rows, around 0."""
        rows = slice(start, start + count)
        if self.form == "rows":
            scales_OG = read_rows(self.scales, start, count)
            if self.zeros is None:
                return scales_OG, None
            stored = _numbers(self.zeros)
            if self.zeros.dtype != "I32":
                return scales_OG, stored[rows].astype(np.int32)
            return scales_OG, _unpacked(stored.T, self.bits).T[rows] - self._middle
        assert self.zeros is not None
        scales_GO = read_rows(self.scales, 0, self.scales.shape[0])
        zeros_GO = self._columns(_numbers(self.zeros))
        if self.adds_one:  # the sum stays in the bits of a code
            zeros_GO = (zeros_GO + 1) & ((1 << self.bits) - 1)
        return np.ascontiguousarray(scales_GO.T[rows]), zeros_GO.T[rows] - self._middle

    def _columns(self, words: Ints) -> Ints:
        """The codes of words that hold several columns."""
        codes = _unpacked(words, self.bits)
        if self.form == "gptq":
            return codes
        order = np.argsort(AWQ_ORDER)
        return codes.reshape(len(codes), -1, len(order))[:, :, order].reshape(len(codes), -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableWeight:
    """Codes of bitsandbytes: each of 4 bits is a value of a table, times the scale of its block."""

    shape: tuple[int, int]
    kind: str  # "nf4" or "fp4"
    block: int
    codes: StoredTensor  # the first of two in the upper half of a byte
    table: StoredTensor
    scales: StoredTensor
    nested: tuple[StoredTensor, StoredTensor] | None = None  # (table, scales) of the scales, which are codes
    nested_block: int = 0
    offset: float = 0.0  # of nested scales

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.table, self.scales, *(self.nested or ()))
        return sum(_num_bytes(part) for part in parts)

    @property
    def described(self) -> str:
        return f"{self.kind} in blocks of {self.block}"

    def groups(self, start: int, count: int) -> Groups | None:
        return None

    def read(self, start: int, count: int) -> Floats:
        columns = self.shape[1]
        first, last = start * columns, (start + count) * columns
        raw = _span(self.codes, first // 2, -(-last // 2))
        codes = np.stack([raw >> 4, raw & 15], axis=-1).reshape(-1)[first % 2 :][: last - first]
        blocks = np.arange(first, last) // self.block
        table = _numbers(self.table).astype(np.float32).reshape(-1)
        return (table[codes] * self._scales()[blocks]).reshape(count, columns)

    def _scales(self) -> Floats:
        stored = _numbers(self.scales).reshape(-1)
        if self.nested is None:
            return stored.astype(np.float32)
        table, scales = (_numbers(part).astype(np.float32).reshape(-1) for part in self.nested)
        outer = scales[np.arange(len(stored)) // self.nested_block]
        return np.asarray(table[stored] * outer + np.float32(self.offset), np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScaledWeight:
    """INT8 of bitsandbytes: the largest value of a row stands for 127."""

    shape: tuple[int, int]
    codes: StoredTensor
    largest: StoredTensor

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.codes) + _num_bytes(self.largest)

    @property
    def described(self) -> str:
        return "8 bits with a scale a row"

    def groups(self, start: int, count: int) -> Groups | None:
        return None

    def read(self, start: int, count: int) -> Floats:
        largest_O = _numbers(self.largest)[start : start + count].astype(np.float32)
        products_OI = _numbers(self.codes, start, count).astype(np.float32) * largest_O[:, None]
        return np.asarray(products_OI * INT8_STEP, np.float32)


NUMBERS: dict[str, Any] = {"I32": "<i4", "I64": "<i8", "U8": np.uint8, "I8": np.int8}


def _num_bytes(tensor: StoredTensor) -> int:
    width = np.dtype(NUMBERS.get(tensor.dtype, DTYPES.get(tensor.dtype, np.uint8))).itemsize
    return math.prod(tensor.shape) * int(width)


def _numbers(tensor: StoredTensor, start: int = 0, count: int | None = None) -> NDArray[Any]:
    """Stored rows as they are, or floats of any type as float32."""
    rows = (tensor.shape or (1,))[0]
    count = rows - start if count is None else count
    if tensor.dtype in DTYPES:
        return read_rows(tensor, start, count)
    per_row = math.prod(tensor.shape[1:])
    return _span(tensor, start * per_row, (start + count) * per_row).reshape(count, *tensor.shape[1:])


def _span(tensor: StoredTensor, start: int, end: int) -> NDArray[Any]:
    """Values of the flat tensor."""
    dtype = np.dtype(NUMBERS[tensor.dtype])
    with tensor.file.open("rb", buffering=0) as file:
        return np.fromfile(file, dtype, end - start, offset=tensor.offset + start * dtype.itemsize)


def _column_range(tensor: StoredTensor, start: int, end: int) -> Ints:
    """Columns of a matrix of words, read row by row."""
    rows, columns = tensor.shape
    words = np.empty((rows, end - start), np.int32)
    with tensor.file.open("rb", buffering=0) as file:
        for row in range(rows):
            file.seek(tensor.offset + 4 * (row * columns + start))
            words[row] = np.frombuffer(file.read(4 * (end - start)), "<i4")
    return words


def _unpacked(words: NDArray[Any], bits: int) -> Ints:
    """The codes of words along the last axis, from the lowest bits."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.int32)


Parts = Callable[[str], StoredTensor]


def with_packed(
    stored: Mapping[str, StoredTensor], quantization: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, those that hold a weight together as one."""
    method = str(quantization.get("quant_method", "")).lower()
    if method not in ASSEMBLERS:
        return dict(stored)
    mark, assemble = ASSEMBLERS[method]
    weights, used = {}, set()
    for name, tensor in stored.items():
        stem = mark(name)
        if stem is None:
            continue
        with reading(tensor.file, f"'{name}' and the tensors beside it do not fit", next_step=NEXT_STEP):
            packed = assemble(stored, stem, quantization)
        if packed is None:
            continue
        own = f"{stem}.weight"
        weights[own] = replace(tensor, name=own, shape=packed.shape, packed=packed)
        used |= {part for part in stored if part.startswith(f"{stem}.") and part != f"{stem}.bias"}
    is_expected = method != "compressed-tensors" or quantization.get("format") == "pack-quantized"
    if is_expected and not weights:
        raise InputError(
            f"config.json says that its weights are packed by {method}, and no tensor is",
            where=str(next(iter(stored.values())).file) if stored else "config.json",
            next_step=NEXT_STEP,
        )
    return {**{name: tensor for name, tensor in stored.items() if name not in used}, **weights}


def _ending(end: str) -> Callable[[str], str | None]:
    return lambda name: name.removesuffix(end) if name.endswith(end) else None


def _require(is_right: bool, fault: str) -> None:
    if not is_right:
        raise ValueError(fault)


def _gptq(stored: Mapping[str, StoredTensor], stem: str, quantization: Mapping[str, Any]) -> GroupedWeight:
    codes, scales, zeros = (stored[f"{stem}.{part}"] for part in ("qweight", "scales", "qzeros"))
    bits = int(quantization["bits"])
    per = WORD // bits
    rows, outs = codes.shape
    weight = GroupedWeight(
        form="gptq",
        shape=(outs, rows * per),
        bits=bits,
        group=_group(quantization, rows * per),
        codes=codes,
        scales=scales,
        zeros=zeros,
        adds_one=quantization.get("checkpoint_format", "gptq") != "gptq_v2",
        group_of_input=stored.get(f"{stem}.g_idx"),
    )
    _require(outs % per == 0 and zeros.shape == (scales.shape[0], outs // per), f"qzeros are {zeros.shape}")
    order = weight.group_of_input
    _require(
        order is None or (order.shape == weight.shape[1:] and order.dtype == "I32"), "g_idx does not fit"
    )
    return _checked(weight, (-(-weight.shape[1] // weight.group), outs))


def _awq(stored: Mapping[str, StoredTensor], stem: str, quantization: Mapping[str, Any]) -> GroupedWeight:
    codes, scales, zeros = (stored[f"{stem}.{part}"] for part in ("qweight", "scales", "qzeros"))
    ins, words = codes.shape
    outs = words * WORD // 4
    weight = GroupedWeight(
        form="awq",
        shape=(outs, ins),
        bits=4,
        group=_group(quantization, ins),
        codes=codes,
        scales=scales,
        zeros=zeros,
    )
    _require(zeros.shape == (scales.shape[0], words), f"qzeros are {zeros.shape}")
    return _checked(weight, (-(-ins // weight.group), outs))


def _compressed(
    stored: Mapping[str, StoredTensor], stem: str, quantization: Mapping[str, Any]
) -> GroupedWeight:
    codes, scales = stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"]
    shape = tuple(int(size) for size in _numbers(stored[f"{stem}.weight_shape"]))
    outs, ins = shape
    settings = weight_settings(quantization)[0]
    bits, zeros = int(settings["num_bits"]), stored.get(f"{stem}.weight_zero_point")
    num_groups = scales.shape[1] if len(scales.shape) == 2 else 1
    group = ins if num_groups == 1 else int(settings["group_size"])
    _require(
        outs > 0 and ins > 0 and codes.shape == (outs, -(-ins * bits // WORD)), f"codes are {codes.shape}"
    )
    _require(group > 0 and -(-ins // group) == num_groups, f"groups of {group} of {ins} inputs")
    if zeros is not None:
        packed = (-(-outs * bits // WORD), num_groups)
        fits = zeros.shape == (packed if zeros.dtype == "I32" else (outs, num_groups))
        _require(fits and zeros.dtype in ("I32", "I8"), f"zero points are {zeros.dtype} {zeros.shape}")
    weight = GroupedWeight(
        form="rows",
        shape=(outs, ins),
        bits=bits,
        group=group,
        codes=codes,
        scales=replace(scales, shape=(outs, num_groups))
        if math.prod(scales.shape) == outs * num_groups
        else scales,
        zeros=zeros,
        group_of_input=stored.get(f"{stem}.weight_g_idx"),
    )
    order = weight.group_of_input
    _require(order is None or (order.shape == (ins,) and order.dtype in ("I32", "I64")), "g_idx does not fit")
    return _checked(weight, (outs, num_groups))


def _group(quantization: Mapping[str, Any], ins: int) -> int:
    group = int(quantization.get("group_size", -1))
    return group if group > 0 else ins


def _checked(weight: GroupedWeight, scales: tuple[int, int]) -> GroupedWeight:
    _require(weight.codes.dtype == "I32", f"codes are {weight.codes.dtype}")
    _require(weight.scales.shape == scales, f"scales are {weight.scales.shape} and not {scales}")
    _require(weight.scales.dtype in DTYPES, f"scales are {weight.scales.dtype}")
    _require(weight.zeros is None or weight.zeros.dtype in ("I32", "I8"), "zero points are no integers")
    return weight


def _bitsandbytes(
    stored: Mapping[str, StoredTensor], stem: str, quantization: Mapping[str, Any]
) -> TableWeight | RowScaledWeight | None:
    weight = f"{stem}.weight"
    codes = stored[weight]
    if f"{stem}.SCB" in stored:
        largest = stored[f"{stem}.SCB"]
        _require(codes.dtype == "I8" and len(codes.shape) == 2, f"codes are {codes.dtype} {codes.shape}")
        _require(largest.shape == codes.shape[:1] and largest.dtype in DTYPES, f"SCB is {largest.shape}")
        return RowScaledWeight(shape=(codes.shape[0], codes.shape[1]), codes=codes, largest=largest)
    name = next((name for name in stored if name.startswith(weight + STATE)), None)
    if name is None:
        _require(codes.dtype in DTYPES, f"codes are {codes.dtype}, without a state")
        return None
    state = json.loads(_numbers(stored[name]).tobytes())
    outs, ins = (int(size) for size in state["shape"])
    block, num_values = int(state["blocksize"]), outs * ins
    nested = None
    scales, table = stored[f"{weight}.absmax"], stored[f"{weight}.quant_map"]
    num_blocks = -(-num_values // block)
    nested_block = int(state.get("nested_blocksize") or 0)
    if f"{weight}.nested_absmax" in stored:
        nested = (stored[f"{weight}.nested_quant_map"], stored[f"{weight}.nested_absmax"])
        _require(math.prod(nested[0].shape) == 256 and scales.dtype == "U8", "nested scales do not fit")
        _require(math.prod(nested[1].shape) == -(-num_blocks // nested_block), "nested scales do not fit")
    _require(
        codes.dtype == "U8" and math.prod(codes.shape) == -(-num_values // 2), f"codes are {codes.shape}"
    )
    _require(min(outs, ins) > 0 and math.prod(scales.shape) == num_blocks, f"scales are {scales.shape}")
    _require(
        math.prod(table.shape) == 16 and (nested is not None or scales.dtype in DTYPES), "scales are codes"
    )
    return TableWeight(
        shape=(outs, ins),
        kind=name.rpartition(STATE)[2],
        block=block,
        codes=codes,
        table=table,
        scales=scales,
        nested=nested,
        nested_block=nested_block,
        offset=float(state.get("nested_offset") or 0.0),
    )


# method -> (the stem of a tensor that stands for a packed weight, how its parts become one)
ASSEMBLERS: dict[str, tuple[Callable[[str], str | None], Callable[..., Any]]] = {
    "gptq": (_ending(".qweight"), _gptq),
    "awq": (_ending(".qweight"), _awq),
    "compressed-tensors": (_ending(".weight_packed"), _compressed),
    "bitsandbytes": (_ending(".weight"), _bitsandbytes),
}
