"""The layout of a quantized model: its packs, tables and tensors, before and after they are written.

A *pack* holds the projections that one MatMul multiplies: a single one, or query, key and value of a block,
because one MatMul of three is faster than three. A *table* is an embedding. The layout follows from the map
and the plan alone, so that sizes and offsets are known before a weight is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.model.model_map import (
    ATTENTION_ROLES,
    Embedding,
    EmbeddingKind,
    Layer,
    ModelMap,
    Norm,
    Role,
    Rows,
)
from quantkit.plan.formats import (
    BLOCKS,
    FLOAT,
    Format,
    Grid,
    Scheme,
    fitted_to_head,
    format_for,
    in_blocks,
    with_little_padding,
)
from quantkit.plan.plan import Plan
from quantkit.plan.select import matches
from quantkit.quantization.grid import Floats, decode, from_bytes, from_halves

DTYPES: dict[str, Any] = {  # as safetensors spells them
    "F32": np.float32,
    "F16": np.float16,
    "I8": np.int8,
    "U8": np.uint8,
    "U16": np.uint16,
    "I64": np.int64,
}
Part = tuple[str, NDArray[Any]]  # some rows of a tensor, after its earlier ones
HALVES = ("high", "low")  # of codes of 16 bits
LARGEST_GROUP_BLOCK = 64  # of a block-diagonal weight whose scheme has no blocks
PACKED_ROLES = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
assert set(PACKED_ROLES) < set(ATTENTION_ROLES)


def run_starts(rows: Rows) -> range:
    """First rows of the runs of a projection's rows in its stored matrix."""
    return range(rows.start, rows.start + rows.stride * rows.count, rows.stride)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a quantized checkpoint."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(np.dtype(DTYPES[self.dtype]).itemsize)


def planned_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A tensor's place in the file."""

    spec: TensorSpec
    offset: int  # from the start of the file
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An opened quantized checkpoint."""

    path: Path
    slots: Mapping[str, Slot]
    description: Mapping[str, Any]

    def read(self, name: str) -> NDArray[Any]:
        slot = self.slots[name]
        values = np.fromfile(
            self.path, DTYPES[slot.spec.dtype], math.prod(slot.spec.shape), offset=slot.offset
        )
        return values.reshape(slot.spec.shape)

    def weight_OI(self, name: str, grid: Grid, columns: int, rows: slice = slice(None)) -> Floats:
        """The decoded weights of a pack or table, or of some rows of it."""

        def stored(part: str) -> NDArray[Any]:
            slot = self.slots[f"{name}.{part}"]
            return np.memmap(self.path, DTYPES[slot.spec.dtype], "r", slot.offset, slot.spec.shape)

        values_OI = self._integers_OI(stored, name, grid, columns, rows)
        if f"{name}.outlier_columns" in self.slots:
            values_OI[:, self.read(f"{name}.outlier_columns")] = stored("outlier_weight_IO")[:, rows].T
        return values_OI

    def _integers_OI(
        self,
        stored: Callable[[str], NDArray[Any]],
        name: str,
        grid: Grid,
        columns: int,
        rows: slice,
    ) -> Floats:
        scales = stored("scales")[rows].astype(np.float32)
        if grid.in_halves:
            codes_OI = from_halves(*(stored(half)[rows] for half in HALVES))
            return np.asarray(codes_OI * scales[:, None], np.float32)
        if grid.block is None and f"{name}.codes_IO" in self.slots:
            return np.ascontiguousarray((stored("codes_IO")[:, rows] * scales).T, np.float32)
        codes, zeros = from_bytes(stored("codes")[rows], grid.bits, grid.block or columns), None
        if not grid.is_symmetric:
            zeros = from_bytes(stored("zeros")[rows], grid.bits, grid.num_blocks(columns))
        return decode(codes, scales, columns, zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Projections that are multiplied together, in the order of their rows."""

    name: str
    layers: tuple[Layer, ...]
    format: Format | None  # None: left as it was
    table: str | None = None  # the embedding whose float table replaces weights of its own
    adds_bias: bool = False  # extra bias from bias correction

    @property
    def grid(self) -> Grid | None:
        return self.format.grid if self.format else None

    @property
    def in_features(self) -> int:
        """Columns of the stored weight; a block-diagonal weight has the columns of one block."""
        return self.layers[0].in_features // self.num_groups

    @property
    def num_groups(self) -> int:
        """Blocks on the diagonal, stored one above the other; 1 for a dense weight."""
        return self.layers[0].num_groups

    @property
    def input_factors(self) -> str | None:
        """The vector that the input is multiplied by."""
        return self.layers[0].input_factors

    @property
    def num_outliers(self) -> int:
        """Input columns that are multiplied in float, beside the integer product of the others."""
        return self.format.num_outliers(self.in_features) if self.format else 0

    @property
    def out_features(self) -> int:
        return sum(layer.out_features for layer in self.layers)

    @property
    def has_bias(self) -> bool:
        """Whether the pack stores a bias; projections without one then add zeros."""
        return self.adds_bias or any(layer.has_bias for layer in self.layers)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Stored tensors: weights, scales, bias, and the factors and the grid of the input."""
        weights = _matrix_tensors(self.name, self.out_features, self.in_features, self.grid)
        bits = self.format.input_bits if self.format else None
        return (
            *(() if self.table else weights),
            *self._outlier_tensors(),
            *([_floats(f"{self.name}.bias", self.out_features)] if self.has_bias else []),
            *([_floats(f"{self.name}.input_factors", self.in_features)] if self.input_factors else []),
            *([_floats(f"{self.name}.input_scale")] if bits else []),
            *([TensorSpec(name=f"{self.name}.input_zero", dtype=f"U{bits}", shape=())] if bits else []),
        )

    def _outlier_tensors(self) -> tuple[TensorSpec, ...]:
        number = self.num_outliers
        if not number:
            return ()
        columns = TensorSpec(name=f"{self.name}.outlier_columns", dtype="I64", shape=(number,))
        shape = (number, self.out_features)
        return (columns, TensorSpec(name=f"{self.name}.outlier_weight_IO", dtype="F16", shape=shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """An embedding: a table of its own, or rows of the pack whose weights it shares."""

    table: Embedding
    grid: Grid | None
    shares: str | None = None  # the pack, or the other table, that holds it

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Stored tensors; a shared table has none."""
        if self.shares:
            return ()
        rows, columns = self.table.num_rows, self.table.num_columns
        if self.grid is None:
            return (_floats(f"{self.table.name}.weight", rows, columns),)
        return _block_tensors(self.table.name, rows, columns, self.grid)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All packs, tables and other tensors of a quantized model."""

    packs: tuple[Pack, ...]
    tables: tuple[TableEntry, ...]
    norms: tuple[Norm, ...]
    norm_biases: frozenset[str]
    loose: tuple[tuple[str, tuple[int, ...]], ...] = ()  # other parameters

    def tensors(self) -> tuple[TensorSpec, ...]:
        specs = [spec for pack in self.packs for spec in pack.tensors()]
        specs += [spec for entry in self.tables for spec in entry.tensors()]
        for norm in self.norms:
            specs.append(_floats(f"{norm.name}.weight", norm.features))
            if norm.name in self.norm_biases:
                specs.append(_floats(f"{norm.name}.bias", norm.features))
        specs.extend(_floats(name, *shape) for name, shape in self.loose)
        return tuple(specs)

    def pack_of(
        self, role: Role, block: str | None = None, expert: int | None = None, *, is_cross: bool = False
    ) -> Pack | None:
        """The pack with a projection of this role, in this block or outside of blocks."""
        return self._by_role.get((role, block, expert, is_cross))

    @cached_property
    def _by_role(self) -> Mapping[tuple[Role, str | None, int | None, bool], Pack]:
        packs: dict[tuple[Role, str | None, int | None, bool], Pack] = {}
        for pack in self.packs:
            for layer in pack.layers:
                key = (layer.role, pack.layers[0].block, layer.expert, layer.is_cross_attention)
                packs.setdefault(key, pack)
        return packs


def _floats(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="F32", shape=shape)


def _matrix_tensors(name: str, rows: int, columns: int, grid: Grid | None) -> tuple[TensorSpec, ...]:
    if grid is None:
        return (_floats(f"{name}.weight_IO", columns, rows),)
    if grid.in_halves:
        halves = [TensorSpec(name=f"{name}.{half}", dtype="I8", shape=(rows, columns)) for half in HALVES]
        return (*halves, _floats(f"{name}.scales", rows))
    if grid.block is None:  # the operator for per-channel weights reads them transposed
        codes = TensorSpec(name=f"{name}.codes_IO", dtype="I8", shape=(columns, rows))
        return (codes, _floats(f"{name}.scales", rows))
    return _block_tensors(name, rows, columns, grid)


def _block_tensors(name: str, rows: int, columns: int, grid: Grid) -> tuple[TensorSpec, ...]:
    blocks, size = grid.num_blocks(columns), grid.block or columns
    codes = TensorSpec(name=f"{name}.codes", dtype="U8", shape=(rows, blocks, -(-size * grid.bits // 8)))
    zeros = TensorSpec(name=f"{name}.zeros", dtype="U8", shape=(rows, -(-blocks * grid.bits // 8)))
    scales = TensorSpec(name=f"{name}.scales", dtype="F16" if grid.block else "F32", shape=(rows, blocks))
    return (codes, scales) if grid.is_symmetric else (codes, scales, zeros)


def formats_of(
    model_map: ModelMap, scheme: Scheme, own: Mapping[str, str] | None = None
) -> dict[str, Format]:
    """The format of every projection; `own` maps patterns to schemes, of which the last match counts."""
    formats = {layer.name: scheme.format_of(layer.role) for layer in model_map.layers}
    for pattern, name in (own or {}).items():
        for layer in model_map.layers:
            if name != FLOAT and matches(layer, pattern):
                formats[layer.name] = format_for(name, layer.role)
    return {
        layer.name: fitted_to_head(formats[layer.name], layer.role, layer.in_features)
        for layer in model_map.layers
    }


def for_groups(chosen: Format, layer: Layer) -> Format:
    """The format of a layer; a block-diagonal weight gets blocks that divide the inputs of a head evenly.

    Weights with one scale a row are stored transposed, where the rows of a head do not lie together.
    """
    if layer.num_groups == 1:
        return chosen
    width, largest = layer.in_features // layer.num_groups, chosen.grid.block or LARGEST_GROUP_BLOCK
    fitting = [size for size in BLOCKS if size <= largest and width % size == 0]
    return in_blocks((*fitting, 16)[0], bits=chosen.grid.bits, is_symmetric=chosen.grid.is_symmetric)


def contents_of(
    model_map: ModelMap,
    plan: Plan,
    formats: Mapping[str, Format] | Format,
    *,
    table_grid: Grid | None = None,
    packs_attention: bool = True,
    adds_biases: bool = False,
) -> Contents:
    """The layout of a quantized model: planned projections in their formats, tables beside or inside them.

    Without `packs_attention`, packs are the original's matrices, with their rows in stored order.
    """
    planned = {layer.name for layer in plan.layers if layer.quantized}
    model_map = model_map.at_inference
    layers = {layer.name: layer for layer in model_map.layers}

    def format_of(name: str) -> Format | None:
        if name not in planned:
            return None
        return for_groups(formats if isinstance(formats, Format) else formats[name], layers[name])

    if table_grid is None:
        table_grid = formats.grid if isinstance(formats, Format) else Grid(block=128)
    pack_layers = _pack if packs_attention else _pack_as_stored
    packs = pack_layers(model_map, {layer.name: format_of(layer.name) for layer in model_map.layers})
    if adds_biases:
        packs = tuple(replace(pack, adds_bias=pack.grid is not None) for pack in packs)
    holders = {pack.layers[0].tied_to: pack for pack in packs if pack.layers[0].tied_to and pack.grid}
    tables = []
    for table in model_map.embeddings:
        holder = holders.get(table.name)
        # A table that no projection reads follows the size rule, if anything is quantized at all.
        # A table that a float head reads stays float.
        is_large = max(table.num_rows, table.num_columns) >= plan.min_dim and bool(planned)
        is_large = is_large and table.name not in {pack.table for pack in packs}
        is_large = is_large and table.kind is not EmbeddingKind.POSITION_BIAS  # a few numbers of each head
        is_large = is_large and not (
            model_map.picture and table.kind is EmbeddingKind.POSITION
        )  # added whole
        own_grid = with_little_padding(table_grid, table.num_columns) if is_large else None
        tables.append(
            TableEntry(
                table=table,
                grid=holder.grid if holder else own_grid,
                shares=holder.name if holder else table.tied_to,
            )
        )
    with_bias = frozenset(norm.name for norm in model_map.norms if norm.num_parameters > norm.features)
    unread = {layer.output_factors for layer in model_map.layers}
    unread |= set(model_map.picture.unread) if model_map.picture else set()
    return Contents(
        packs=packs,
        tables=tuple(tables),
        norms=model_map.norms,
        norm_biases=with_bias,
        loose=(
            *((entry.name, entry.shape) for entry in model_map.unmapped if entry.name not in unread),
            *_logit_bias(model_map),
            *(model_map.sentence.tensors.items() if model_map.sentence else ()),
        ),
    )


def _logit_bias(model_map: ModelMap) -> Iterator[tuple[str, tuple[int, ...]]]:
    head = next((layer for layer in model_map.layers if layer.role is Role.LM_HEAD), None)
    if model_map.logit_bias and head:
        yield model_map.logit_bias, (1, head.out_features)


def _pack(model_map: ModelMap, formats: Mapping[str, Format | None]) -> tuple[Pack, ...]:
    groups: dict[Any, list[Layer]] = {}
    for layer in model_map.layers:
        joins = layer.role in PACKED_ROLES and layer.block and not layer.is_cross_attention
        key = (layer.block, formats[layer.name], layer.in_features) if joins else layer.name
        groups.setdefault(key, []).append(layer)
    packs: list[Pack] = []
    for members in groups.values():
        roles = tuple(member.role for member in members)
        whole = [members] if roles == PACKED_ROLES or len(members) == 1 else [[member] for member in members]
        packs.extend(_pack_of(_pack_name(part), part, formats) for part in whole)
    return tuple(packs)


def _pack_of(name: str, layers: Sequence[Layer], formats: Mapping[str, Format | None]) -> Pack:
    chosen = formats[layers[0].name]
    return Pack(name=name, layers=tuple(layers), format=chosen, table=None if chosen else layers[0].tied_to)


def _pack_as_stored(model_map: ModelMap, formats: Mapping[str, Format | None]) -> tuple[Pack, ...]:
    """Stored matrices, cut only where the format changes from one run of rows to the next."""
    packs: list[Pack] = []
    for matrix in model_map.matrices:
        runs = [
            replace(layer, rows=Rows(start=start, length=layer.rows.length, stride=layer.rows.length))
            for layer in model_map.layers
            if layer.matrix == matrix
            for start in run_starts(layer.rows)
        ]
        runs.sort(key=lambda run: run.rows.start)
        runs = [replace(run, out_features=run.rows.length) for run in runs]
        cuts = [list(part) for _, part in itertools.groupby(runs, key=lambda run: formats[run.name])]
        packs.extend(
            _pack_of(matrix if len(cuts) == 1 else f"{matrix}[{part[0].rows.start}:]", part, formats)
            for part in cuts
        )
    return tuple(packs)


def _pack_name(layers: list[Layer]) -> str:
    first = layers[0]
    if len(layers) == 1:
        return first.name
    if all(layer.matrix == first.matrix for layer in layers):
        return first.matrix
    parent = first.name.rsplit(".", 1)[0]
    return f"{parent}.{'+'.join(layer.name.rsplit('.', 1)[-1] for layer in layers)}"
