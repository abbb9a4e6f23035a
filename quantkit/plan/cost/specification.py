"""The layer-by-layer specification: operations, bytes, roofline times and advice for every step.

Costs come from shapes alone, so a model of any size is specified from its config. `rows` counts one step,
`forward` orders the steps, `roofline` times them and `advice` comments on them. docs/specification.md defines
every column and states the assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.errors import InputError
from quantkit.model.model_map import ModelMap, Role
from quantkit.plan.cost.advice import advise
from quantkit.plan.cost.forward import forward_rows
from quantkit.plan.cost.roofline import Estimate, estimates_of, fits_of, short
from quantkit.plan.cost.rows import GROUPS, Pass, Row, stored_bytes
from quantkit.plan.machines import Machine

WEIGHT_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
CACHE_BITS = {"fp32": 32, "fp16": 16, "int8": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over all rows, and shares of each group."""

    parameters: int
    active_parameters: int  # that one token uses
    parameters_by_group: dict[str, int]
    parameter_shares: dict[str, float]
    matrix_macs: int
    macs_by_group: dict[str, int]
    compute_shares: dict[str, float]  # of the matrix MACs
    flops: int  # of matrices and of all other steps
    weight_bytes: int  # stored, at the given weight bits
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Specification:
    """One forward pass of a model, step by step, with totals."""

    model: str
    batch: int
    length: int
    past: int
    encoder_length: int | None
    activation_bytes: int
    devices: tuple[str, ...]
    rows: tuple[Row, ...]
    totals: Totals
    memory_bytes: dict[str, int]  # all weights, by data type, in plain bits
    kv_cache_bytes: dict[str, int]  # after this pass
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...]


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
    """Costs of a pass over `length` tokens after `past` cached tokens.

    `weight_bits` holds the bits of projections and tables that are stored in fewer than 32; a table and the
    projection tied to it share an entry. An encoder reads `encoder_length` tokens, or `past + length`.
    """
    num_parameters, model_map = model_map.num_parameters, model_map.at_inference
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
        replace(row, advice=advise(row, run), fits=fits_of(row, devices)) for row in forward_rows(run)
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
        estimates=tuple(estimates_of(run, devices, decodes=run.is_causal)),
        notes=tuple(
            _notes(
                run,
                totals,
                training_parameters=num_parameters - model_map.num_parameters,
                cache_bytes=cache * activation_bytes,
                devices=devices,
            )
        ),
    )


def _totals(rows: Sequence[Row]) -> Totals:
    parameters = {group: sum(row.parameters for row in rows if row.group == group) for group in GROUPS}
    macs = {group: sum(row.macs for row in rows if row.group == group) for group in GROUPS}
    return Totals(
        parameters=sum(parameters.values()),
        active_parameters=sum(row.active_parameters for row in rows),
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
    """Elements of the KV cache after the pass: the context, a window of it, or the encoder's states."""
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


def _notes(
    run: Pass, totals: Totals, *, training_parameters: int, cache_bytes: int, devices: Sequence[Machine]
) -> list[str]:
    """Assumptions and limits that apply to this pass."""
    model, num_positions = run.model, run.past + run.length
    windows = [item.window for block in model.blocks for item in block.attentions if item.window]
    gap = model.num_parameters - totals.parameters
    required = totals.weight_bytes + cache_bytes
    too_small = ", ".join(device.name for device in devices if required > device.memory_gb * 1e9)
    notes = (
        (True, "FLOPs of matrices are 2 x MACs; other steps count a constant per element"),
        (True, "bytes of quantized weights are plain bits, without scales"),
        (run.is_causal, "the causal mask is not credited: scores count the full square"),
        (
            any(window < num_positions for window in windows),
            "a sliding window counts min(window, past + length) keys per query, an upper bound",
        ),
        (
            model.num_experts and model.num_active_experts,
            f"{model.num_active_experts} of {model.num_experts} experts run for each token: "
            f"{totals.active_parameters:,} of {totals.parameters:,} parameters are active",
        ),
        (
            model.num_experts and not model.num_active_experts,
            "config.json does not say how many experts run for each token: all are counted, an upper bound",
        ),
        (not model.blocks, "the blocks are unknown: attention scores and caches are not counted"),
        (
            any(layer.role is Role.OTHER for layer in model.layers),
            "projections without a role are counted at every position, an upper bound",
        ),
        (
            any(block.calls > 1 for block in model.blocks),
            "a shared block is stored once, and computed and read at each of its calls",
        ),
        (
            model.is_encoder_decoder and run.past,
            "the encoder and its keys and values are in the cache: their rows cost nothing in this pass",
        ),
        (
            model.max_positions and num_positions > model.max_positions,
            f"the model has {model.max_positions} positions, {num_positions} are used",
        ),
        (gap, f"{gap:+,} parameters of the model are in no row"),
        (too_small, f"weights and cache ({short(required, 'B')}) exceed the memory of {too_small}"),
        (
            training_parameters,
            f"{training_parameters:,} parameters of projections that only training runs are not counted",
        ),
    )
    return [note for applies, note in notes if applies]


def _check(run: Pass, encoder_length: int | None) -> None:
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
    if run.past and not run.is_causal:
        raise InputError(f"{run.past}", where="past", allowed="0, because this model has no causal attention")
    if encoder_length and not run.model.is_encoder_decoder:
        raise InputError("the model is not an encoder-decoder", where="encoder_length", allowed="nothing")
    names = {layer.name for layer in run.model.layers} | {table.name for table in run.model.embeddings}
    for name, bits in run.bits.items():
        if name not in names:
            raise InputError(f"no projection or table is called {name!r}", where="weight_bits")
        if bits not in WEIGHT_BITS.values():
            allowed = ", ".join(str(width) for width in WEIGHT_BITS.values())
            raise InputError(f"{bits!r} bits for {name}", where="weight_bits", allowed=allowed)
