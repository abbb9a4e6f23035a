"""The layer-by-layer specification: what each step of a model costs, what bounds it, what would help.

Costs come from shapes alone, so a model of any size answers from its config. The rows are made in
`cost_rows`, put in order in `cost_pass` and held against machines in `cost_fit`; here they are summed,
advised upon and grouped. docs/specification.md defines every column and states the assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from quantkit.errors import InputError
from quantkit.model.model_map import ModelMap, Role
from quantkit.plan.cost.forward import forward_rows
from quantkit.plan.cost.roofline import Estimate, estimates_of, fits_of, short
from quantkit.plan.cost.rows import GROUPS, Pass, Row, stored_bytes
from quantkit.plan.machines import Machine

WEIGHT_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
CACHE_BITS = {"fp32": 32, "fp16": 16, "int8": 8}
INT8 = WEIGHT_BITS["int8"]
LARGE_TABLE_BYTES = 1_000_000
WORTH_SAYING = 1.2  # advice that saves less is noise

# What would help a step without a matrix of its own, by its name or else by its processing.
FUSE_ATTENTION = "fuse scores, softmax and V: no L x T matrix in memory"
ADVICE = {
    "query norm": "fuse with attention",
    "key norm": "fuse with attention",
    "head scale": "fold into the norm before it",
    "position bias": FUSE_ATTENTION,
    "attention softcap": FUSE_ATTENTION,
    "add": "fuse with the norm beside it",
    "norm": "fuse with the sum beside it",
    "activation": "fuse into the projection before it",
    "multiply": "fuse with the activation",
    "rotate": "fuse with attention",
    "scale": "fold into the table",
    "softcap": "fuse into the projection before it",
    "scores": FUSE_ATTENTION,
    "softmax": FUSE_ATTENTION,
    "attention x V": FUSE_ATTENTION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over all rows; shares are of the whole, by group."""

    parameters: int
    parameters_by_group: dict[str, int]
    parameter_shares: dict[str, float]
    matrix_macs: int
    macs_by_group: dict[str, int]
    compute_shares: dict[str, float]  # of the matrix MACs
    flops: int  # those of the matrices and of everything else
    weight_bytes: int  # stored, at the bits asked for
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Specification:
    """One forward pass of a model, step by step, and what it amounts to."""

    model: str
    batch: int
    length: int
    past: int
    encoder_length: int | None
    activation_bytes: int
    devices: tuple[str, ...]
    rows: tuple[Row, ...]
    totals: Totals
    memory_bytes: dict[str, int]  # all weights at one width, in plain bits
    kv_cache_bytes: dict[str, int]  # after this pass
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Rows to show once; `count` blocks have the same ones."""

    label: str
    count: int
    rows: tuple[Row, ...]


def specify(
    model_map: ModelMap,
    *,
    batch: int,
    length: int,
    past: int = 0,
    encoder_length: int | None = None,
    weight_bits: Mapping[str, int] | None = None,
    activation_bytes: int = 4,
    devices: Sequence[Machine] = (),
) -> Specification:
    """Every step of a pass over `length` tokens that see `past` earlier ones.

    `weight_bits` names layers or tables that are stored in fewer than 32 bits; a table and the projection
    tied to it are one. An encoder reads `encoder_length` tokens, by default as many as the decoder has seen.
    """
    whole, model_map = model_map, model_map.at_inference
    run = Pass(
        model=model_map,
        batch=batch,
        length=length,
        past=past,
        encoder_length=past + length if encoder_length is None else encoder_length,
        activation_bytes=activation_bytes,
        bits=weight_bits or {},
    )
    _check(run, encoder_length)
    rows = tuple(
        replace(row, advice=_advice(row, run), fits=fits_of(row, devices)) for row in forward_rows(run)
    )
    cache = _cache_elements(run)
    memory = {name: stored_bytes(model_map.num_parameters, bits) for name, bits in WEIGHT_BITS.items()}
    totals = _totals(rows)
    return Specification(
        model=model_map.name,
        batch=batch,
        length=length,
        past=past,
        encoder_length=run.encoder_length if model_map.is_encoder_decoder else None,
        activation_bytes=activation_bytes,
        devices=tuple(device.name for device in devices),
        rows=rows,
        totals=totals,
        memory_bytes=memory,
        kv_cache_bytes={name: stored_bytes(cache, bits) for name, bits in CACHE_BITS.items()},
        estimates=tuple(estimates_of(run, devices, decodes=_is_causal(model_map))),
        notes=(
            *_notes(run, totals, cache * activation_bytes, devices),
            *_left_out(whole.num_parameters - model_map.num_parameters),
        ),
    )


def group_rows(specification: Specification) -> tuple[RowGroup, ...]:
    """Rows in order; blocks that differ only in names and numbers are one group, where the first stands."""
    alike: dict[tuple[Row, ...], list[list[Row]]] = {}
    for _, piece in groupby(specification.rows, key=lambda row: (row.block, row.block or row.index)):
        rows = list(piece)
        alike.setdefault(tuple(_without_names(row) for row in rows), []).append(rows)
    stacks = {row.stack for row in specification.rows if row.block is not None}
    return tuple(
        RowGroup(label=_label(blocks, len(stacks) > 1), count=len(blocks), rows=tuple(blocks[0]))
        for blocks in alike.values()
    )


def _without_names(row: Row) -> Row:
    if row.block is None:
        return row
    return replace(row, index=0, name="", block=None, block_index=None, modules=())


def _label(blocks: Sequence[Sequence[Row]], with_stack: bool) -> str:
    first = blocks[0][0]
    if first.block is None:
        return first.name
    indices = sorted(row[0].block_index or 0 for row in blocks)
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    label = f"{'block' if len(indices) == 1 else 'blocks'} {spans}"
    label = f"{first.stack} {label}" if with_stack else label
    if len(indices) > 1:
        return f"{label} ({len(indices)}x)"
    return f"{label} (run {first.calls} times)" if first.calls > 1 else label


def _totals(rows: Sequence[Row]) -> Totals:
    parameters = {group: sum(row.parameters for row in rows if row.group == group) for group in GROUPS}
    macs = {group: sum(row.macs for row in rows if row.group == group) for group in GROUPS}
    return Totals(
        parameters=sum(parameters.values()),
        parameters_by_group=parameters,
        parameter_shares=_shares(parameters),
        matrix_macs=sum(macs.values()),
        macs_by_group=macs,
        compute_shares=_shares(macs),
        flops=sum(row.flops for row in rows),
        weight_bytes=sum(row.weight_bytes for row in rows),
        moved_bytes=sum(row.moved_bytes for row in rows),
    )


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    return {group: count / total if total else 0.0 for group, count in counts.items()}


def _cache_elements(run: Pass) -> int:
    """Keys and values that the next token will want: the whole context, a window of it, or the encoder's."""
    total = 0
    for block in run.model.blocks:
        for attention in block.attentions:
            if attention.is_cross:
                kept = run.encoder_length
            elif attention.is_causal:
                kept = min(run.past + run.length, attention.window or run.past + run.length)
            else:
                continue
            total += 2 * run.batch * attention.num_kv_heads * attention.head_dim * kept * block.calls
    return total


def _is_causal(model: ModelMap) -> bool:
    return any(item.is_causal and not item.is_cross for block in model.blocks for item in block.attentions)


def _advice(row: Row, run: Pass) -> str:
    """What would help, as a short list; empty where nothing would."""
    if not row.calls:
        return ""
    if row.processing == "gather":
        return _table_advice(row, run.model)
    if row.processing != "matmul":
        return ADVICE.get(row.name, ADVICE.get(row.processing, ""))
    advice = []
    tokens = row.output_shape[1]
    if row.group == "head" and tokens > 1 and _is_causal(run.model):
        advice.append(f"compute only the last logits: {short(row.macs - row.macs // tokens, 'MACs')} fewer")
    bits = row.weight_bits or 0
    if bits > INT8:
        left = row.moved_bytes - row.weight_traffic_bytes * (bits - INT8) / bits
        factor = row.moved_bytes / left
        gain = f"{factor:.1f}x fewer bytes" if factor > WORTH_SAYING else "INT8 arithmetic"
        advice.append(f"quantize: {gain}")
    if row.name == "QKV projection" and row.stack == "decoder" and not run.past:
        advice.append("cache keys and values for the tokens to come")
    if "key/value" in row.name:
        advice.append("cache: every decoded token reads the same")
    return "; ".join(advice)


def _table_advice(row: Row, model: ModelMap) -> str:
    heads = [layer for layer in model.layers if layer.role is Role.LM_HEAD]
    sharers = [layer.name for layer in heads if layer.tied_to in row.modules]
    if sharers:
        return f"tie: store one table for this and {', '.join(sharers)}, quantized or not"
    if row.name.startswith("token embedding") and any(head.num_weights == row.parameters for head in heads):
        return f"tie with the lm_head if trained so: {short(row.parameters, 'parameters')} fewer"
    is_large = row.weight_bytes > LARGE_TABLE_BYTES and (row.weight_bits or 0) > INT8
    return "quantize: the table is stored whole, read by rows" if is_large else ""


def _notes(run: Pass, totals: Totals, cache_bytes: int, devices: Sequence[Machine]) -> list[str]:
    model, seen = run.model, run.past + run.length
    attentions = [item for block in model.blocks for item in block.attentions]
    gap = model.num_parameters - totals.parameters
    notes = {
        "FLOPs are 2 x MACs for matrices; other steps count a constant for each element": True,
        "bytes of quantized weights are plain bits, without scales": True,
        "the causal mask is not credited: scores count the full square": _is_causal(model),
        "a sliding window counts min(window, past + length) keys for every query, an upper bound": any(
            item.window and item.window < seen for item in attentions
        ),
        "no blocks are known here: attention scores and caches are not counted": not model.blocks,
        "projections without a role are counted at every position, an upper bound": any(
            layer.role is Role.OTHER for layer in model.layers
        ),
        "a shared block is stored once, and computed and read at each of its calls": any(
            block.calls > 1 for block in model.blocks
        ),
        "the encoder and its keys and values are in the cache: their rows cost nothing in this pass": bool(
            model.is_encoder_decoder and run.past
        ),
        f"the model knows {model.max_positions} positions, {seen} are asked for": bool(
            model.max_positions and seen > model.max_positions
        ),
        f"{gap:+,} parameters of the model are in no row": bool(gap),
    }
    needed = totals.weight_bytes + cache_bytes
    too_small = [device.name for device in devices if needed > device.memory_gb * 1e9]
    notes[f"weights and cache ({short(needed, 'B')}) exceed the memory of {', '.join(too_small)}"] = bool(
        too_small
    )
    return [note for note, holds in notes.items() if holds]


def _left_out(num_parameters: int) -> list[str]:
    """What is said of projections that no inference runs."""
    words = f"{num_parameters:,} parameters of projections that training alone runs are not counted"
    return [words] if num_parameters else []


def _check(run: Pass, encoder_length: int | None) -> None:
    """Refuse what no pass can be."""
    numbers = {
        "batch": (run.batch, 1),
        "length": (run.length, 1),
        "past": (run.past, 0),
        "encoder_length": (run.encoder_length, 1),
        "activation_bytes": (run.activation_bytes, 1),
    }
    for name, (number, least) in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise InputError(f"{number!r}", where=name, allowed=f"a whole number, at least {least}")
    if run.past and not _is_causal(run.model):
        raise InputError(
            f"{run.past}", where="past", allowed="0: this model has no causal attention to cache"
        )
    if encoder_length and not run.model.is_encoder_decoder:
        raise InputError("this model is no encoder-decoder", where="encoder_length", allowed="nothing")
    known = {layer.name for layer in run.model.layers} | {table.name for table in run.model.embeddings}
    for name, bits in run.bits.items():
        if name not in known:
            raise InputError(f"no layer or table is called {name!r}", where="weight_bits")
        if bits not in WEIGHT_BITS.values():
            allowed = ", ".join(str(width) for width in WEIGHT_BITS.values())
            raise InputError(f"{bits!r} bits for {name}", where="weight_bits", allowed=allowed)
