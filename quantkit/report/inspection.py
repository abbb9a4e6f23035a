"""The page of `quantkit inspect`: blocks, tables and projections of a model, with the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.model.model_map import Block, Layer, ModelMap, Role, to_json
from quantkit.plan.plan import LayerPlan, Plan
from quantkit.report.tables import Page, Table


def inspection_json(model_map: ModelMap, plan: Plan) -> dict[str, Any]:
    """The map with the plan: one entry for each projection."""
    document, planned = to_json(model_map), to_json(plan)
    layers = [
        {**layer, "quantized": layer_plan["quantized"], "reason": layer_plan["reason"]}
        for layer, layer_plan in zip(document["layers"], planned["layers"], strict=True)
    ]
    keys = ("min_dim", "include", "exclude", "projections", "matrices", "parameters", "formula", "warnings")
    return {**document, "layers": layers, **{key: planned[key] for key in keys}}


def inspection_page(model_map: ModelMap, plan: Plan, *, lists_all: bool = False) -> Page:
    """The page; equal projections of all blocks are one row unless `lists_all` is set."""
    return Page(
        head=tuple(_model_lines(model_map)),
        tables=(_projections(model_map, plan, lists_all),),
        foot=(*plan_lines(to_json(plan)), *(f"note: {note}" for note in model_map.notes)),
        warnings=plan.warnings,
    )


def plan_lines(plan: Mapping[str, Any]) -> Iterable[str]:
    """Counts of a plan, and the counting formula beside them, from JSON."""
    projections, matrices, parameters = (plan[key] for key in ("projections", "matrices", "parameters"))
    share = parameters["quantized"] / parameters["total"] if parameters["total"] else 0.0
    yield (
        f"quantized: {projections['quantized']} of {projections['total']} projections "
        f"({matrices['quantized']} of {matrices['total']} matrices), {share:.1%} of the parameters, "
        f"at min_dim {plan['min_dim']}"
    )
    formula = plan.get("formula")
    if formula:
        verdict = "equal to the count" if formula["agrees"] else f"but {formula['walked']} are counted"
        yield (
            f"formula: ({formula['attention_per_block']} attention + {formula['ffn_per_block']} FFN) x "
            f"{formula['num_blocks']} layers + {formula['num_outputs']} output = {formula['predicted']}, "
            f"{verdict}"
        )
        yield from (f"  {difference}" for difference in formula["differences"])


def _model_lines(model_map: ModelMap) -> Iterable[str]:
    family = f"family {model_map.family}" if model_map.family else "no family row"
    yield f"{model_map.name}: {model_map.architecture}, {family}, {model_map.num_parameters:,} parameters"
    groups: dict[str, list[Block]] = {}
    for block in model_map.blocks:
        groups.setdefault(_block_text(model_map, block), []).append(block)
    for text, blocks in groups.items():
        depth = sum(block.calls for block in blocks)
        shared = f" ({len(blocks)} stored, shared)" if depth > len(blocks) else ""
        yield f"  {depth} x {text}{shared}"
    tables = ", ".join(f"{t.kind} {t.num_rows:,} x {t.num_columns}" for t in model_map.embeddings[:4])
    head = "tied to the token table" if model_map.has_tied_head else "not tied"
    yield f"  tables: {tables or 'none'}; head {head}"


def _block_text(model_map: ModelMap, block: Block) -> str:
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
    down = _down_projection(model_map, block)
    if block.ffn:
        shared = f", stored once and run {down.calls} times" if down and down.aliases else ""
        parts.append(f"{block.ffn.kind} FFN {block.ffn.display_name} {block.ffn.hidden_features}{shared}")
    else:
        parts.append(f"the FFN of {down.block}" if down else "no FFN")
    return "; ".join(parts)


def _down_projection(model_map: ModelMap, block: Block) -> Layer | None:
    """The down projection of a block's FFN, its own or a shared one."""
    for layer in model_map.layers:
        names = (layer.name, *layer.aliases)
        if layer.role is Role.FFN_DOWN and any(name.startswith(f"{block.name}.") for name in names):
            return layer
    return None


def _projections(model_map: ModelMap, plan: Plan, lists_all: bool) -> Table:
    """One row for equal projections, under a row with the name of their blocks."""
    groups: dict[str, Counter[tuple[str, ...]]] = {}
    for layer, planned in zip(model_map.layers, plan.layers, strict=True):
        block = layer.block or ""
        if not lists_all:
            block = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", block)
        groups.setdefault(block, Counter())[_cells(layer, planned)] += 1
    columns = ("#", "name", "role", "in", "out", "INT8", "reason")
    rows = []
    for block, counts in groups.items():
        if block:
            rows.append(("", block, *("" for _ in columns[2:])))
        rows += [(f"{count}", *cells) for cells, count in counts.items()]
    return Table(
        title="Projections",
        columns=columns,
        rows=tuple(rows),
        numeric=("#", "in", "out"),
        whole=("name", "role"),
    )


def _cells(layer: Layer, planned: LayerPlan) -> tuple[str, ...]:
    name = f"  {layer.name.removeprefix(layer.block)}" if layer.block else layer.name
    if layer.calls > 1:
        name += f" (runs {layer.calls}x)"
    role = f"cross {layer.role}" if layer.is_cross_attention else str(layer.role)
    reason = planned.reason.split(" = ")[-1]  # the columns beside it show both sizes
    is_quantized = "yes" if planned.quantized else "no"
    return name, role, f"{layer.in_features}", f"{layer.out_features}", is_quantized, reason
