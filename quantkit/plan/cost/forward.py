"""The order of the rows: one forward pass of a `ModelMap`, from text to logits.

Rows follow the order of computation, not of storage: norms are where their placement puts them, and the
projections of one self attention are one row whether or not a checkpoint fuses them. Modules that no rule
places get rows at the end, so the sums cover the whole map.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from quantkit.model.model_map import (
    ATTENTION_ROLES,
    FFN_ROLES,
    ROUTING_ROLES,
    SUMMED_KINDS,
    Attention,
    Block,
    Embedding,
    EmbeddingKind,
    FeedForward,
    FfnKind,
    Layer,
    ModelMap,
    Norm,
    NormPlacement,
    PositionKind,
    Residual,
    Role,
)
from quantkit.plan.cost.rows import (
    Pass,
    Row,
    Scope,
    experts_row,
    formula_text,
    last_name,
    make_row,
    matmul,
    norm_row,
    stored_bytes,
)

Module = TypeVar("Module", Layer, Norm)
EXPERT = re.compile(r"\.experts\.\d+\.")
POSITION_BIASES = (PositionKind.ALIBI, PositionKind.RELATIVE)


def forward_rows(run: Pass) -> tuple[Row, ...]:
    """Every row of one pass. Each projection and norm of the map is in exactly one of them."""
    model, end = run.model, _scope(run, run.stacks[-1])
    in_blocks = {block.name for block in model.blocks}
    layers = [layer for layer in model.layers if layer.block not in in_blocks]
    norms = [norm for norm in model.norms if norm.block not in in_blocks]
    ids = (run.batch, run.length)
    name, formula = "tokenization", "text to B*L ids"
    if model.picture:
        formula = "pictures to B*L patches"
    rows = [make_row(end, "embeddings", name, name, ids, formula=formula, input_shape=())]
    for stack in run.stacks:
        scope, label = _scope(run, stack), f" ({stack})" if model.is_encoder_decoder else ""
        of_stack = [norm for norm in norms if not model.is_encoder_decoder or _stack_of(norm.name) == stack]
        embedding_norms = [norm for norm in of_stack if _is_embedding_norm(model, norm)]
        widening = [layer for layer in layers if _widens(model, layer) and stack == run.stacks[0]]
        rows += _embedding_rows(scope, label)
        rows += [norm_row(scope, norm, f"embedding norm{label}") for norm in embedding_norms]
        patches = model.picture.num_tokens - len(model.picture.first) if model.picture else 0
        rows += _other_rows(replace(scope, tokens=patches) if patches else scope, widening)
        for block in model.blocks:
            if block.stack == stack:
                rows += _block_rows(replace(scope, block=block))
        if model.is_encoder_decoder:
            rows += [
                norm_row(scope, norm, f"final norm{label}")
                for norm in of_stack
                if norm not in embedding_norms
            ]
    rows += _head_rows(end, _unplaced(layers, rows), _unplaced(norms, rows))
    return tuple(replace(row, index=index) for index, row in enumerate(rows))


def _scope(run: Pass, stack: str | None) -> Scope:
    """Token counts of a stack; the encoder of an encoder-decoder has its own length and runs once."""
    if stack == "encoder" and run.model.is_encoder_decoder:
        return Scope(run=run, tokens=run.encoder_length, past=0, is_cached=run.past > 0, stack=stack)
    return Scope(run=run, tokens=run.length, past=run.past, stack=stack)


def _unplaced(modules: Sequence[Module], rows: Sequence[Row]) -> list[Module]:
    placed = {name for row in rows for name in row.modules}
    return [module for module in modules if module.name not in placed]


def _other_rows(scope: Scope, layers: Sequence[Layer]) -> list[Row]:
    """A row for each projection, and one for the same projection of all experts."""
    groups: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[EXPERT.sub(".experts.*.", layer.name)].append(layer)
    rows = []
    for name, group in groups.items():
        first, is_expert = group[0], name != group[0].name and len(group) == scope.run.model.num_experts
        if not is_expert:
            rows += [matmul(scope, "other", last_name(layer.name), [layer]) for layer in group]
            continue
        rows.append(
            experts_row(
                scope,
                last_name(name),
                tuple(layer.name for layer in group),
                in_features=first.in_features,
                out_features=first.out_features,
                biases=first.out_features if first.has_bias else 0,
            )
        )
    return rows


def _unmapped_rows(scope: Scope) -> list[Row]:
    """Experts and routers that are plain parameters, then one row of all other parameters."""
    model = scope.run.model
    hidden, stored = model.hidden_size or 0, model.num_experts
    rows, others = [], []
    for parameter in model.unmapped:
        shape, name = parameter.shape, last_name(parameter.name)
        if len(shape) == 3 and shape[0] == stored and hidden in shape[1:]:
            wide = math.prod(shape[1:]) // hidden
            sizes = (wide, hidden) if "down" in name else (hidden, wide)
            rows.append(
                experts_row(scope, name, (parameter.name,), in_features=sizes[0], out_features=sizes[1])
            )
        elif shape == (stored, hidden) and ".experts." not in parameter.name:
            macs = scope.run.batch * scope.tokens * math.prod(shape)
            numbers = (scope.run.batch, scope.tokens, *shape)
            router = partial(make_row, scope, "ffn", "router", "matmul", scope.shape(shape[0]))
            rows.append(
                router(
                    formula=formula_text("B*L*experts*d", *numbers),
                    input_shape=scope.shape(hidden),
                    modules=(parameter.name,),
                    macs=macs,
                    parameters=math.prod(shape),
                )
            )
        else:
            others.append(parameter)
    count = sum(math.prod(parameter.shape) for parameter in others)
    if count:
        biases = sum(math.prod(each.shape) for each in others if ".experts." in each.name)
        share = (model.num_active_experts or stored or 1) / (stored or 1)
        rows.append(
            make_row(
                scope,
                "other",
                "other parameters",
                "other",
                (),
                formula=f"{count} parameters",
                modules=tuple(parameter.name for parameter in others),
                parameters=count,
                active_parameters=count - biases + round(biases * share),
            )
        )
    return rows


def _num_keys(attention: Attention, scope: Scope) -> tuple[int, int]:
    """Most keys of one query, and distinct keys of all queries of a sequence."""
    if attention.is_cross:
        return scope.run.encoder_length, scope.run.encoder_length
    total = scope.past + scope.tokens
    if attention.window is None:
        return total, total
    if not attention.is_causal:  # to both sides
        return min(2 * attention.window - 1, total), total
    return min(attention.window, total), min(attention.window - 1 + scope.tokens, total)


def _embedding_rows(scope: Scope, label: str) -> list[Row]:
    model = scope.run.model
    tables = [table for table in model.embeddings if _is_read_by(model, table, scope.stack)]
    tables = [table for kind in EmbeddingKind for table in tables if table.kind is kind]
    rows = [_gather(scope, table, label) for table in tables]
    summed = [row for row, table in zip(rows, tables, strict=True) if table.kind in SUMMED_KINDS]
    shape = scope.shape(summed[0].output_shape[-1] if summed else 0)
    if model.embedding_scale and summed:
        rows.append(make_row(scope, "embeddings", f"embedding scale{label}", "scale", shape))
    if len(summed) > 1:
        name, read = f"embedding sum{label}", sum(math.prod(row.output_shape) for row in summed)
        count = len(summed)
        rows.append(make_row(scope, "embeddings", name, "add", shape, operands=count, input_elements=read))
    return rows


def _gather(scope: Scope, table: Embedding, label: str) -> Row:
    """A table lookup; a table of both stacks is stored, and counted, once."""
    run, model = scope.run, scope.run.model
    attention = next((item for block in model.blocks for item in block.attentions), None)
    is_named = table.kind in SUMMED_KINDS
    is_bias = table.kind is EmbeddingKind.POSITION_BIAS
    shape: tuple[int, ...] = scope.shape(table.num_columns)
    if table.kind is EmbeddingKind.POSITION:
        shape = (1, *shape[1:])
    elif is_bias or (not is_named and attention and attention.position in POSITION_BIASES):
        shape = (1, table.num_columns, scope.tokens, scope.past + scope.tokens)  # a bias per head and pair
    bits = run.bits_of(table.name, *(layer.name for layer in model.layers if layer.tied_to == table.name))
    is_counted = _stack_of(table.name) is not None or scope.stack == run.stacks[0]
    size = table.num_new_parameters if is_counted else 0
    return make_row(
        scope,
        "embeddings",
        (f"{table.kind.value.replace('_', ' ')} embedding" if is_named else last_name(table.name)) + label,
        "gather",
        shape,
        formula=formula_text("rows*columns", table.num_rows, table.num_columns),
        input_shape=shape[:2] if is_named else shape[-2:],
        modules=(table.name,),
        parameters=size,
        weight_bytes=stored_bytes(size, bits),
        weight_reads=stored_bytes(math.prod(shape), bits),
        weight_bits=bits,
    )


def _block_rows(scope: Scope) -> list[Row]:
    """Rows of one block: sublayers with norms and residual sums, then projections without a role."""
    model, block = scope.run.model, scope.block
    assert block is not None
    layers = [layer for layer in model.layers if layer.block == block.name]
    norms = [norm for norm in model.norms if norm.block == block.name]
    head_norms = [norm for norm in norms if _is_query_key_norm(block, norm)]
    sublayers: list[Attention | FeedForward] = [*block.attentions, *([block.ffn] if block.ffn else [])]
    readers = [_layers_of(sublayer, layers) for sublayer in sublayers]
    slots = _norm_slots(block, readers, [norm for norm in norms if norm not in head_norms])
    shape = scope.shape(model.hidden_size or (layers[0].in_features if layers else 0))
    is_parallel = block.residual is Residual.PARALLEL
    rows: list[Row] = []
    for index, (sublayer, projections) in enumerate(zip(sublayers, readers, strict=True)):
        rows += [norm_row(scope, norm) for norm in slots["before", index]]
        if isinstance(sublayer, FeedForward):
            rows += (_mixture_rows if block.mixture else _ffn_rows)(scope, sublayer, projections)
        else:
            rows += _attention_rows(scope, sublayer, projections, head_norms)
        rows += [norm_row(scope, norm) for norm in slots["output", index]]
        if block.residual_scale != 1:
            rows.append(make_row(scope, "other", "residual scale", "scale", shape))
        if not is_parallel:
            rows.append(make_row(scope, "other", "residual add", "add", shape, operands=2))
        rows += [norm_row(scope, norm) for norm in slots["sum", index]]
    if is_parallel:
        rows.append(make_row(scope, "other", "residual add", "add", shape, operands=1 + len(sublayers)))
    rows += _other_rows(scope, _unplaced(layers, rows))
    return rows + [norm_row(scope, norm) for norm in _unplaced(norms, rows)]


def _norm_slots(
    block: Block, readers: Sequence[Sequence[Layer]], norms: Sequence[Norm]
) -> dict[tuple[str, int], list[Norm]]:
    """Norms by place: before a sublayer, on its output, or after its residual sum."""
    slots: dict[tuple[str, int], list[Norm]] = defaultdict(list)
    unread = []
    for norm in norms:
        targets = [index for index, layers in enumerate(readers) if _feeds(norm, layers)]
        # A post-norm that feeds the first sublayer feeds the next block's: it ends this block.
        if targets and not (targets[0] == 0 and block.norm_placement is NormPlacement.POST):
            slots["before", targets[0]].append(norm)
        else:
            unread.append(norm)
    indices = list(range(len(readers)))
    if block.norm_placement is NormPlacement.PRE:
        where, free = "before", [index for index in indices if ("before", index) not in slots]
    else:
        where = "sum" if block.norm_placement is NormPlacement.POST else "output"
        free = indices[-len(unread) :]
    for index, norm in zip(free, unread, strict=False):
        slots[where, index].append(norm)
    return slots


def _attention_rows(
    scope: Scope, attention: Attention, layers: Sequence[Layer], norms: Sequence[Norm]
) -> list[Row]:
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    keys, distinct_keys = _num_keys(attention, scope)
    queries, scores = _per_head(scope, heads, width), _per_head(scope, heads, keys)
    cached = scope.run.batch * kv_heads * distinct_keys * width
    label = "cross attention " if attention.is_cross else ""
    rows = _attention_inputs(scope, attention, layers, label)
    for norm in norms if attention.has_query_key_norm and not attention.is_cross else ():
        is_query = last_name(norm.name).startswith("q")
        shape = _per_head(scope, heads if is_query else kv_heads, width)
        rows.append(norm_row(scope, norm, "query norm" if is_query else "key norm", shape))

    step = partial(make_row, scope, "attention", calls=layers[0].calls if layers else None)
    if attention.position is PositionKind.ROPE and not attention.is_cross:
        rotated = _per_head(scope, heads + kv_heads, attention.rotary_dim or width)
        rows.append(step("rotary position", "rotate", rotated))
    product = partial(step, formula=formula_text("B*H*L*T*h", *scores, width), macs=math.prod(scores) * width)
    read = math.prod(queries) + cached
    rows.append(product(f"{label}scores", "scores", scores, input_shape=queries, input_elements=read))
    rows += _distance_rows(scope, attention, step)
    if attention.softcap:
        rows.append(step("attention softcap", "softcap", scores))
    has_bias = attention.position in POSITION_BIASES or bool(scope.run.model.position_biases)
    if has_bias and not attention.is_cross:
        read = math.prod(scores) + math.prod(scores[1:])  # one bias for the whole batch
        rows.append(step("position bias", "add", scores, operands=2, input_elements=read))
    rows.append(step(f"{label}softmax", "softmax", scores))
    read = math.prod(scores) + cached
    name = f"{label or 'attention '}x V"
    rows.append(product(name, "attention x V", queries, input_shape=scores, input_elements=read))
    return rows + _projection(scope, f"{label}output projection", _with_roles(layers, Role.ATTENTION_OUT))


def _distance_rows(scope: Scope, attention: Attention, step: Callable[..., Row]) -> list[Row]:
    """Disentangled attention: the block projects a table of distances, whose rows meet queries and keys."""
    distances = scope.run.model.distance_scores
    if distances is None:
        return []
    heads, width, kinds = attention.num_heads, attention.head_dim, distances.has_keys + distances.has_queries
    table = (kinds, 2 * distances.reach, heads * width)
    size = (*table, heads * width)
    scores = _per_head(scope, heads, 2 * distances.reach * kinds)
    read = kinds * scope.run.batch * heads * scope.tokens * width + math.prod(table)
    text = formula_text("B*H*L*r*h", *scores, width)
    return [
        step(
            "distance keys and queries",
            "scores",
            table,
            formula=formula_text("n*r*d*d", *size),
            macs=math.prod(size),
        ),
        step(
            "distance scores",
            "scores",
            scores,
            formula=text,
            macs=math.prod(scores) * width,
            input_elements=read,
        ),
        step("add distance scores", "add", _per_head(scope, heads, scope.tokens), operands=1 + kinds),
    ]


def _attention_inputs(scope: Scope, attention: Attention, layers: Sequence[Layer], label: str) -> list[Row]:
    query = _with_roles(layers, Role.ATTENTION_QUERY)
    key_value = _with_roles(layers, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
    if attention.is_cross:
        # The encoder's output is constant: later passes read these keys and values from the cache.
        source = replace(scope, tokens=scope.run.encoder_length, is_cached=scope.run.past > 0)
        return [
            *_projection(scope, f"{label}query projection", query),
            *_projection(source, f"{label}key/value projection", key_value),
        ]
    projections = query + key_value
    sizes = {size for layer in projections for size in (layer.in_features, layer.out_features)}
    symbols = "B*L*d*3d" if len(projections) == 3 and len(sizes) == 1 else "B*L*d*(q+k+v)"
    return _projection(scope, "QKV projection", projections, symbols)


def _projection(scope: Scope, name: str, layers: Sequence[Layer], symbols: str = "B*L*in*out") -> list[Row]:
    return [matmul(scope, "attention", name, layers, symbols)] if layers else []


def _per_head(scope: Scope, heads: int, width: int) -> tuple[int, int, int, int]:
    return scope.run.batch, heads, scope.tokens, width


def _with_roles(layers: Sequence[Layer], *roles: Role) -> list[Layer]:
    return [layer for layer in layers if layer.role in roles]


def _mixture_rows(scope: Scope, ffn: FeedForward, layers: Sequence[Layer]) -> list[Row]:
    """The router, the experts and the expert that every token uses."""
    experts = [layer for layer in layers if layer.expert is not None]
    rows = [matmul(scope, "ffn", "router", [layer]) for layer in _with_roles(layers, Role.ROUTER)]
    shape = scope.shape((scope.run.model.num_active_experts or 1) * ffn.hidden_features)
    for role in FFN_ROLES:
        same = _with_roles(experts, role)
        if role is Role.FFN_DOWN:
            rows += _activation_rows(scope, ffn, shape)
        if same:
            rows.append(
                experts_row(
                    scope,
                    last_name(same[0].name),
                    tuple(layer.name for layer in same),
                    in_features=same[0].in_features,
                    out_features=same[0].out_features,
                    biases=same[0].out_features if same[0].has_bias else 0,
                )
            )
    gates = [matmul(scope, "ffn", "shared gate", [layer]) for layer in _with_roles(layers, Role.SHARED_GATE)]
    return rows + _ffn_rows(scope, ffn, [layer for layer in layers if layer not in experts]) + gates


def _activation_rows(scope: Scope, ffn: FeedForward, shape: tuple[int, ...], calls: int = 1) -> list[Row]:
    name = f"activation {ffn.activation.value}"
    rows = [make_row(scope, "ffn", name, "activation", shape, kind=ffn.activation.value, calls=calls)]
    if ffn.kind is FfnKind.GATED:
        rows.append(make_row(scope, "ffn", "gating multiply", "multiply", shape, operands=2, calls=calls))
    return rows


def _ffn_rows(scope: Scope, ffn: FeedForward, layers: Sequence[Layer]) -> list[Row]:
    """Projections of the FFN around its activation; none where another block's FFN is shared."""
    layers = _with_roles(layers, *FFN_ROLES)
    if not layers:
        return []
    wide = next((layer for layer in layers if layer.role in (Role.FFN_GATE, Role.FFN_UP)), layers[0])
    shape, calls = scope.shape(wide.out_features), wide.calls
    names = {Role.FFN_GATE: "FFN gate", Role.FFN_UP: "FFN up", Role.FFN_DOWN: "FFN down"}

    def linears(*roles: Role) -> list[Row]:
        chosen = [layer for role in roles for layer in _with_roles(layers, role)]
        return [
            matmul(scope, "ffn", names.get(layer.role, last_name(layer.name)), [layer]) for layer in chosen
        ]

    rows = linears(Role.FFN_GATE, Role.FFN_UP) + _activation_rows(scope, ffn, shape, calls)
    return rows + linears(Role.FFN_LATENT, Role.FFN_DOWN)


def _head_rows(scope: Scope, layers: Sequence[Layer], norms: Sequence[Norm]) -> list[Row]:
    """Rows after the blocks: final norm, projections without a role, logits, unmapped parameters."""
    model = scope.run.model
    heads = [layer for layer in layers if layer.role is Role.LM_HEAD]
    others = [layer for layer in layers if layer.role is not Role.LM_HEAD]
    name = "final norm" if model.blocks else ""
    first = [norm for norm in norms if not others or _feeds(norm, others)]
    rows = [norm_row(scope, norm, name) for norm in first]
    rows += _other_rows(replace(scope, tokens=1) if model.head_reads_one_token else scope, others)
    rows += [norm_row(scope, norm, name and "head norm") for norm in norms if norm not in first]
    if model.head_scale and heads:
        rows.append(make_row(scope, "head", "head scale", "scale", scope.shape(heads[0].in_features)))
    rows += [matmul(scope, "head", "lm_head", [layer], "B*L*d*V") for layer in heads]
    if model.logit_scale and heads:
        rows.append(make_row(scope, "head", "logit scale", "scale", rows[-1].output_shape))
    if model.final_softcap and heads:
        rows.append(make_row(scope, "head", "logit softcap", "softcap", rows[-1].output_shape))
    return rows + _unmapped_rows(scope)


def _layers_of(sublayer: Attention | FeedForward, layers: Sequence[Layer]) -> list[Layer]:
    if isinstance(sublayer, FeedForward):
        return _with_roles(layers, *FFN_ROLES, *ROUTING_ROLES)
    attention = _with_roles(layers, *ATTENTION_ROLES)
    return [layer for layer in attention if layer.is_cross_attention == sublayer.is_cross]


def _feeds(norm: Norm, layers: Sequence[Layer]) -> bool:
    return any(layer.name in norm.feeds or layer.matrix in norm.feeds for layer in layers)


def _is_query_key_norm(block: Block, norm: Norm) -> bool:
    has_them = any(attention.has_query_key_norm for attention in block.attentions)
    return has_them and last_name(norm.name).startswith(("q", "k"))


def _is_embedding_norm(model: ModelMap, norm: Norm) -> bool:
    first = {block.name for block in model.blocks if block.index == 0}
    inputs = [layer for layer in model.layers if layer.block in first and not layer.is_cross_attention]
    return "embed" in norm.name.lower() or _feeds(norm, inputs)


def _widens(model: ModelMap, layer: Layer) -> bool:
    """Whether a projection widens embeddings, or patches of a picture, to the hidden size."""
    if model.picture and layer.name == model.picture.patches:
        return True
    columns = {table.num_columns for table in model.embeddings if table.kind is EmbeddingKind.TOKEN}
    fits = layer.in_features in columns and layer.out_features == model.hidden_size
    return fits and layer.role is Role.OTHER and model.hidden_size not in columns


def _is_read_by(model: ModelMap, table: Embedding, stack: str | None) -> bool:
    """Whether a stack reads this table; a tied table is read through the table that stores it."""
    table_stack = _stack_of(table.name)
    if stack is None or not model.is_encoder_decoder:
        return table.tied_to is None
    if table.tied_to and _stack_of(table.tied_to) in (None, table_stack):
        return False
    return table_stack in (None, stack)


def _stack_of(name: str) -> str | None:
    """The stack of a module outside of blocks; None for a module of both stacks."""
    return next((part for part in name.split(".") if part in ("encoder", "decoder")), None)
