"""The page of `quantkit inspect`: what a model is made of, and what the rule does with each projection."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from quantkit.model.model_map import Block, Layer, ModelMap, Role, to_json
from quantkit.plan.plan import LayerPlan, Plan
from quantkit.report.tables import Page, Table


def inspection_json(model_map: ModelMap, plan: Plan) -> dict[str, Any]:
    """Everything, for a program: the map and the plan, one entry a projection."""
    planned = {layer.name: layer for layer in plan.layers}
    document: dict[str, Any] = to_json(model_map)
    document["layers"] = [
        {**to_json(layer), "quantized": planned[layer.name].quantized, "reason": planned[layer.name].reason}
        for layer in model_map.layers
    ]
    document |= {
        "min_dim": plan.min_dim,
        "include": list(plan.include),
        "exclude": list(plan.exclude),
        "projections": to_json(plan.projections),
        "matrices": to_json(plan.matrices),
        "parameters": to_json(plan.parameters),
        "formula": to_json(plan.formula),
        "warnings": list(plan.warnings),
    }
    return document


def inspection_page(model_map: ModelMap, plan: Plan, *, lists_all: bool = False) -> Page:
    """The page for a person; blocks that are alike are shown once unless all are asked for."""
    return Page(
        head=tuple(_describe(model_map)),
        tables=(_layer_table(model_map, plan, lists_all),),
        foot=(*_totals(plan), *_formula(plan), *(f"note: {note}" for note in model_map.notes)),
        warnings=plan.warnings,
    )


def _describe(model_map: ModelMap) -> Iterable[str]:
    family = f"family {model_map.family}" if model_map.family else "no family row"
    yield (f"{model_map.name}: {model_map.architecture}, {family}, {model_map.num_parameters:,} parameters")
    for text, blocks in _alike(model_map):
        depth = sum(block.calls for block in blocks)
        shared = f" ({len(blocks)} stored, shared)" if depth > len(blocks) else ""
        yield f"  {depth} x {text}{shared}"
    tables = ", ".join(f"{t.kind} {t.num_rows:,} x {t.num_columns}" for t in model_map.embeddings[:4])
    head = "tied to the token table" if model_map.has_tied_head else "not tied"
    yield f"  tables: {tables or 'none'}; head {head}"


def _alike(model_map: ModelMap) -> Iterable[tuple[str, list[Block]]]:
    groups: dict[str, list[Block]] = {}
    for block in model_map.blocks:
        groups.setdefault(_describe_block(model_map, block), []).append(block)
    return groups.items()


def _describe_block(model_map: ModelMap, block: Block) -> str:
    parts = [f"{block.stack} block: {block.norm_placement} {block.norm_kind}, {block.residual} residual"]
    for attention in block.attentions:
        heads = f"{attention.num_heads} heads of {attention.head_dim}"
        if attention.num_kv_heads != attention.num_heads:
            heads += f" on {attention.num_kv_heads} KV"
        extras = [
            "cross" if attention.is_cross else f"{attention.position} positions",
            f"window {attention.window}" if attention.window else "",
            f"softcap {attention.softcap:g}" if attention.softcap else "",
            "QK norm" if attention.has_query_key_norm else "",
        ]
        parts.append(f"attention {heads} ({', '.join(extra for extra in extras if extra)})")
    down = _ffn_of(model_map, block)
    if block.ffn:
        shared = f", stored once and run {down.calls} times" if down and down.aliases else ""
        parts.append(f"{block.ffn.kind} FFN {block.ffn.display_name} {block.ffn.hidden_features}{shared}")
    else:
        parts.append(f"the FFN of {down.block}" if down else "no FFN")
    return "; ".join(parts)


def _ffn_of(model_map: ModelMap, block: Block) -> Layer | None:
    """The way down of a block's FFN, its own or one that it shares."""
    downs = [layer for layer in model_map.layers if layer.role is Role.FFN_DOWN]
    names = ((layer, (layer.name, *layer.aliases)) for layer in downs)
    return next((layer for layer, each in names if any(n.startswith(f"{block.name}.") for n in each)), None)


def _layer_table(model_map: ModelMap, plan: Plan, lists_all: bool) -> Table:
    rows: Counter[tuple[str, ...]] = Counter()
    for layer, planned in zip(model_map.layers, plan.layers, strict=True):
        rows[_row(layer, planned, lists_all)] += 1
    return Table(
        title="Projections",
        columns=("#", "name", "role", "in", "out", "INT8", "why"),
        rows=tuple((f"{count}", *row) for row, count in rows.items()),
        numeric=("#", "in", "out"),
        whole=("name", "role"),
    )


def _row(layer: Layer, planned: LayerPlan, lists_all: bool) -> tuple[str, ...]:
    name = layer.name
    if layer.block and not lists_all:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer.block) + layer.name[len(layer.block) :]
    if layer.calls > 1:
        name += f" (runs {layer.calls}x)"
    role = f"cross {layer.role}" if layer.is_cross_attention else str(layer.role)
    is_chosen = "yes" if planned.quantized else "no"
    reason = planned.reason.split(" = ")[-1]  # the columns beside it show both sizes
    return name, role, f"{layer.in_features}", f"{layer.out_features}", is_chosen, reason


def _totals(plan: Plan) -> Iterable[str]:
    share = plan.parameters.quantized / plan.parameters.total if plan.parameters.total else 0.0
    yield (
        f"min_dim {plan.min_dim}: {plan.projections.quantized} of {plan.projections.total} projections "
        f"({plan.matrices.quantized} of {plan.matrices.total} matrices) are quantized, "
        f"{share:.1%} of the parameters"
    )


def _formula(plan: Plan) -> Iterable[str]:
    check = plan.formula
    verdict = "agrees with the walk" if check.agrees else f"but the walk finds {check.walked}"
    yield (
        f"formula: ({check.attention_per_block} attention + {check.ffn_per_block} FFN) x "
        f"{check.num_blocks} layers + {check.num_outputs} output = {check.predicted}, {verdict}"
    )
    yield from (f"  {difference}" for difference in check.differences)
