"""The size rule: a projection is quantized if max(in_features, out_features) >= min_dim.

The rule applies to logical projections, so fused and unfused checkpoints of a model get equal plans.
Embedding tables are not counted; a tied lm_head is. The counting formula of the literature, (attention + FFN
projections) x layers + output layers, is compared with the counted projections, and the plan explains every
difference.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence

from quantkit.errors import InputError, did_you_mean
from quantkit.model.model_map import ATTENTION_ROLES, FFN_ROLES, ROUTING_ROLES, Block, Layer, ModelMap, Role
from quantkit.plan.plan import Count, FormulaCheck, LayerPlan, Plan

DEFAULT_MIN_DIM = 256  # smaller projections save little and are often routers
ROLE_GROUPS: dict[str, tuple[Role, ...]] = {"attention": ATTENTION_ROLES, "ffn": FFN_ROLES}


def parse_min_dim(text: str) -> int:
    """The value of `--min-dim`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise InputError(
            f"'{text}' is no size",
            where="--min-dim",
            allowed="a whole number from 1 up",
            next_step="768 quantizes every projection of GPT-2, 1 every projection of any model",
        )
    return value


def choose(
    model_map: ModelMap,
    *,
    min_dim: int = DEFAULT_MIN_DIM,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Plan:
    """The plan of a model; `include` and `exclude` restrict the rule by role or name glob."""
    if min_dim < 1:
        raise InputError(f"{min_dim} is no size", where="min_dim", allowed="a whole number from 1 up")
    for flag, patterns in (("include", include), ("exclude", exclude)):
        check_patterns(model_map, patterns, flag)
    layers = tuple(_plan_layer(layer, min_dim, include, exclude) for layer in model_map.layers)
    chosen = {layer.name for layer in layers if layer.quantized}
    weights = {layer.name: layer.num_weights for layer in model_map.layers}
    running = model_map.at_inference
    return Plan(
        model=model_map.name,
        min_dim=min_dim,
        include=tuple(include),
        exclude=tuple(exclude),
        layers=layers,
        projections=Count(total=len(running.layers), quantized=len(chosen)),
        matrices=Count(
            total=len(running.matrices),
            quantized=len({layer.matrix for layer in layers if layer.quantized}),
        ),
        parameters=Count(total=running.num_parameters, quantized=sum(weights[name] for name in chosen)),
        formula=_check_formula(model_map, chosen),
        warnings=_warn(model_map, layers, min_dim),
    )


def matches(layer: Layer, pattern: str) -> bool:
    """Whether a pattern (role, group of roles, name or name glob) matches a projection."""
    if pattern in ROLE_GROUPS:
        return layer.role in ROLE_GROUPS[pattern]
    if pattern in set(Role):
        return layer.role == pattern
    names = (layer.name, layer.matrix, *layer.aliases)
    return pattern in names or any(fnmatch.fnmatchcase(name, pattern) for name in names)


def check_patterns(model_map: ModelMap, patterns: Sequence[str], flag: str) -> None:
    """Raise for a pattern without a match: it is a typing error that would change the result silently."""
    for pattern in patterns:
        if not any(matches(layer, pattern) for layer in model_map.layers):
            roles = sorted({layer.role.value for layer in model_map.layers})
            raise InputError(
                f"'{pattern}' matches no projection of {model_map.name}",
                where=f"--{flag}",
                allowed=f"a role ({', '.join((*ROLE_GROUPS, *roles))}) or a glob on names",
                next_step=did_you_mean(pattern, (*ROLE_GROUPS, *roles))
                or f"'quantkit inspect {model_map.name}' lists the names",
            )


def _plan_layer(layer: Layer, min_dim: int, include: Sequence[str], exclude: Sequence[str]) -> LayerPlan:
    largest = max(layer.in_features, layer.out_features)
    excluded_by = next((pattern for pattern in exclude if matches(layer, pattern)), None)
    is_included = not include or any(matches(layer, pattern) for pattern in include)
    if not layer.calls:
        quantized, reason = False, "not run at inference: a training loss alone reads it"
    elif excluded_by is not None:
        quantized, reason = False, f"excluded by '{excluded_by}'"
    elif not is_included:
        quantized, reason = False, "not in --include"
    elif layer.role in ROUTING_ROLES:
        quantized, reason = False, "it routes tokens to experts: always float"
    else:
        quantized = largest >= min_dim
        sign = ">=" if quantized else "<"
        reason = f"max({layer.in_features}, {layer.out_features}) = {largest} {sign} {min_dim}"
    if layer.tied_to:
        reason += f"; one table with {layer.tied_to}"
    return LayerPlan(
        name=layer.name,
        role=layer.role,
        in_features=layer.in_features,
        out_features=layer.out_features,
        matrix=layer.matrix,
        quantized=quantized,
        reason=reason,
    )


def _warn(model_map: ModelMap, layers: tuple[LayerPlan, ...], min_dim: int) -> tuple[str, ...]:
    warnings = []
    chosen = [layer for layer in layers if layer.quantized]
    if not layers:
        warnings.append(f"{model_map.name} has no linear layer: there is nothing to quantize")
    elif not chosen:
        largest = max(max(layer.in_features, layer.out_features) for layer in layers)
        warnings.append(
            f"nothing is quantized: no projection that may be chosen reaches min_dim {min_dim} "
            f"(the largest dimension of the model is {largest})"
        )
    by_matrix: dict[str, set[bool]] = {}
    for layer in layers:
        by_matrix.setdefault(layer.matrix, set()).add(layer.quantized)
    split = [matrix for matrix, states in by_matrix.items() if len(states) > 1]
    if split:
        warnings.append(f"{len(split)} fused matrices are quantized in part only: {', '.join(split[:3])}")
    return tuple(warnings)


def _check_formula(model_map: ModelMap, chosen: set[str]) -> FormulaCheck:
    """The formula beside the counted projections; the differences add up to the gap."""
    layers = [layer for layer in model_map.layers if layer.name in chosen]
    outputs, walked = sum(layer.role is Role.LM_HEAD for layer in layers), len(layers)
    depth = sum(block.calls for block in model_map.blocks)
    counts = {block.name: _count_block(block, layers) for block in model_map.blocks}
    attention, ffn = (
        Counter(count[:2] for count in counts.values()).most_common(1)[0][0] if counts else (0, 0)
    )
    if counts:
        gaps = _block_gaps(model_map.blocks, counts, (attention, ffn)) + _outer_gaps(layers)
        differences = tuple(f"{gap:+d}: {cause}" for gap, cause in gaps if gap)
    else:
        differences = (
            f"the roles of '{model_map.model_type}' are not known, so the formula does not apply: "
            f"{walked} projections are counted",
        )
    predicted = (attention + ffn) * depth + outputs
    return FormulaCheck(
        attention_per_block=attention,
        ffn_per_block=ffn,
        num_blocks=depth,
        num_outputs=outputs,
        predicted=predicted,
        walked=walked,
        agrees=predicted == walked and not differences,
        differences=differences,
    )


def _count_block(block: Block, layers: list[Layer]) -> tuple[int, int, int, int]:
    """Quantized projections of a block: self attention, FFN, cross attention, others."""
    in_block = [layer for layer in layers if layer.block == block.name]
    attention = [layer for layer in in_block if layer.role in ATTENTION_ROLES]
    cross = sum(layer.is_cross_attention for layer in attention)
    ffn = sum(layer.role in FFN_ROLES for layer in in_block)
    return len(attention) - cross, ffn, cross, len(in_block) - len(attention) - ffn


def _block_gaps(
    blocks: tuple[Block, ...], counts: dict[str, tuple[int, int, int, int]], typical: tuple[int, int]
) -> list[tuple[int, str]]:
    """Counted projections minus the formula's, by cause, within blocks; `typical` is attention and FFN."""
    shared = [block for block in blocks if block.calls > 1]
    depth = sum(block.calls for block in shared)
    decoders = [count[2] for count in counts.values() if count[2]]
    atypical = {name: count for name, count in counts.items() if count[:2] != typical}
    return [
        (
            -(depth - len(shared)) * sum(typical),
            f"{len(shared)} shared block(s) run {depth} times but are stored and quantized once",
        ),
        (
            sum(decoders),
            f"cross-attention projections in {len(decoders)} decoder blocks, which the formula leaves out",
        ),
        (
            sum(sum(count[:2]) - sum(typical) for count in atypical.values()),
            f"{len(atypical)} block(s) differ from the usual one: {', '.join(list(atypical)[:3])}",
        ),
        (
            sum(count[3] for count in counts.values()),
            "projections in blocks that are neither attention nor FFN",
        ),
    ]


def _outer_gaps(layers: list[Layer]) -> list[tuple[int, str]]:
    outer = [layer.name for layer in layers if layer.block is None and layer.role is not Role.LM_HEAD]
    names = ", ".join(outer[:3])
    return [(len(outer), f"projection(s) outside of the blocks that are no output layer: {names}")]
