"""The order of the rows: one forward pass of a `ModelMap`, from text to logits.

Rows follow the order of computation, not of storage: norms stand where their placement puts them, and the
projections of one self attention are one row whether or not a checkpoint fuses them. What no rule here
places is still listed, so that nothing of the map is left out of the sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from quantkit.model.model_map import (
    ATTENTION_ROLES,
    FFN_ROLES,
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
    FULL_BITS,
    Pass,
    Place,
    Row,
    formula_text,
    last_name,
    make_row,
    matmul,
    norm_row,
    stored_bytes,
)

POSITION_BIASES = (PositionKind.ALIBI, PositionKind.RELATIVE)


def forward_rows(run: Pass) -> tuple[Row, ...]:
    """Every row of one pass: each layer and norm of the map stands in exactly one of them."""
    model, end = run.model, place(run, run.stacks[-1])
    in_blocks = {block.name for block in model.blocks}
    layers = [layer for layer in model.layers if layer.block not in in_blocks]
    norms = [norm for norm in model.norms if norm.block not in in_blocks]
    ids = (run.batch, run.length)
    rows = [
        make_row(
            end, "embeddings", "tokenization", "tokenization", ids, formula="text to B*L ids", input_shape=()
        )
    ]
    for stack in run.stacks:
        at, label = place(run, stack), f" ({stack})" if model.is_encoder_decoder else ""
        own = [norm for norm in norms if not model.is_encoder_decoder or _stack_of(norm.name) == stack]
        early = [norm for norm in own if _is_embedding_norm(model, norm)]
        doors = [layer for layer in layers if _widens(model, layer) and stack == run.stacks[0]]
        rows += _embedding_rows(at, label)
        rows += [norm_row(at, norm, f"embedding norm{label}") for norm in early]
        rows += [matmul(at, "other", last_name(layer.name), [layer]) for layer in doors]
        for block in model.blocks:
            if block.stack == stack:
                rows += _block_rows(replace(at, block=block))
        if model.is_encoder_decoder:
            rows += [norm_row(at, norm, f"final norm{label}") for norm in own if norm not in early]
    seen = {module for row in rows for module in row.modules}
    rows += _head_rows(
        end,
        [layer for layer in layers if layer.name not in seen],
        [norm for norm in norms if norm.name not in seen],
    )
    return tuple(replace(row, index=index) for index, row in enumerate(rows))


def place(run: Pass, stack: str | None) -> Place:
    """The start of a stack; the encoder of an encoder-decoder has its own length and runs only once."""
    if stack == "encoder" and run.model.is_encoder_decoder:
        return Place(run=run, tokens=run.encoder_length, past=0, is_cached=run.past > 0, stack=stack)
    return Place(run=run, tokens=run.length, past=run.past, stack=stack)


def attended(attention: Attention, at: Place) -> tuple[int, int]:
    """How many keys a query sees at most, and how many distinct keys the queries of a sequence read."""
    if attention.is_cross:
        return at.run.encoder_length, at.run.encoder_length
    total = at.past + at.tokens
    if attention.window is None:
        return total, total
    return min(attention.window, total), min(attention.window - 1 + at.tokens, total)


def _embedding_rows(at: Place, label: str) -> list[Row]:
    run, model = at.run, at.run.model
    tables = [table for table in model.embeddings if _is_read_by(model, table, at.stack)]
    tables = [table for kind in EmbeddingKind for table in tables if table.kind is kind]
    rows = [_gather(at, table, label) for table in tables]
    summed = [row for row, table in zip(rows, tables, strict=True) if table.kind is not EmbeddingKind.OTHER]
    shape = (run.batch, at.tokens, summed[0].output_shape[-1] if summed else 0)
    if model.embedding_scale and summed:
        rows.append(make_row(at, "embeddings", f"embedding scale{label}", "scale", shape))
    if len(summed) > 1:
        name, read = f"embedding sum{label}", sum(math.prod(row.output_shape) for row in summed)
        count = len(summed)
        rows.append(make_row(at, "embeddings", name, "add", shape, operands=count, input_elements=read))
    return rows


def _gather(at: Place, table: Embedding, label: str) -> Row:
    """A table lookup; a table that both stacks read is stored, and counted, once."""
    run, model = at.run, at.run.model
    attention = next((item for block in model.blocks for item in block.attentions), None)
    shape: tuple[int, ...] = (run.batch, at.tokens, table.num_columns)
    if table.kind is EmbeddingKind.POSITION:
        shape = (1, at.tokens, table.num_columns)
    elif table.kind is EmbeddingKind.OTHER and attention and attention.position in POSITION_BIASES:
        shape = (1, table.num_columns, at.tokens, at.past + at.tokens)  # one bias a head for every pair
    sharers = [layer.name for layer in model.layers if layer.tied_to == table.name]
    bits = next((run.bits[name] for name in (table.name, *sharers) if name in run.bits), FULL_BITS)
    is_counted = _stack_of(table.name) is not None or at.stack == run.stacks[0]
    size = table.num_new_parameters if is_counted else 0
    is_named = table.kind is not EmbeddingKind.OTHER
    return make_row(
        at,
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


def _block_rows(at: Place) -> list[Row]:
    """One block: its sublayers with their norms and residual sums, then any projection without a role."""
    model, block = at.run.model, at.block
    assert block is not None
    layers = [layer for layer in model.layers if layer.block == block.name]
    norms = [norm for norm in model.norms if norm.block == block.name]
    head_norms = [norm for norm in norms if _is_query_key_norm(block, norm)]
    sublayers: list[Attention | FeedForward] = [*block.attentions, *([block.ffn] if block.ffn else [])]
    readers = [_layers_of(sublayer, layers) for sublayer in sublayers]
    slots = _norm_slots(block, readers, [norm for norm in norms if norm not in head_norms])
    shape = (at.run.batch, at.tokens, model.hidden_size or (layers[0].in_features if layers else 0))
    is_parallel = block.residual is Residual.PARALLEL
    rows: list[Row] = []
    for index, (sublayer, own) in enumerate(zip(sublayers, readers, strict=True)):
        rows += [norm_row(at, norm) for norm in slots["before", index]]
        if isinstance(sublayer, FeedForward):
            rows += _ffn_rows(at, sublayer, own)
        else:
            rows += _attention_rows(at, sublayer, own, head_norms)
        rows += [norm_row(at, norm) for norm in slots["output", index]]
        if not is_parallel:
            rows.append(make_row(at, "other", "residual add", "add", shape, operands=2))
        rows += [norm_row(at, norm) for norm in slots["sum", index]]
    if is_parallel:
        rows.append(make_row(at, "other", "residual add", "add", shape, operands=1 + len(sublayers)))
    seen = {module for row in rows for module in row.modules}
    rows += [
        matmul(at, "other", last_name(layer.name), [layer]) for layer in layers if layer.name not in seen
    ]
    return rows + [norm_row(at, norm) for norm in norms if norm.name not in seen]


def _norm_slots(
    block: Block, readers: Sequence[Sequence[Layer]], norms: Sequence[Norm]
) -> dict[tuple[str, int], list[Norm]]:
    """Where each norm stands: before a sublayer, on its output, or after its residual sum."""
    slots: dict[tuple[str, int], list[Norm]] = defaultdict(list)
    unread = []
    for norm in norms:
        targets = [index for index, own in enumerate(readers) if _feeds(norm, own)]
        # A post-norm that feeds the first sublayer feeds that of the next depth: it ends this one.
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
    at: Place, attention: Attention, layers: Sequence[Layer], norms: Sequence[Norm]
) -> list[Row]:
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    keys, distinct = attended(attention, at)
    queries, scores = (at.run.batch, heads, at.tokens, width), (at.run.batch, heads, at.tokens, keys)
    cached = at.run.batch * kv_heads * distinct * width
    calls = layers[0].calls if layers else None
    label = "cross attention " if attention.is_cross else ""
    rows = _attention_inputs(at, attention, layers, label)
    for norm in norms if attention.has_query_key_norm and not attention.is_cross else ():
        is_query = last_name(norm.name).startswith("q")
        shape = (at.run.batch, heads if is_query else kv_heads, at.tokens, width)
        rows.append(norm_row(at, norm, "query norm" if is_query else "key norm", shape))

    step = partial(make_row, at, "attention", calls=calls)
    if attention.position is PositionKind.ROPE and not attention.is_cross:
        turned = (at.run.batch, heads + kv_heads, at.tokens, attention.rotary_dim or width)
        rows.append(step("rotary position", "rotate", turned))
    product = partial(step, formula=formula_text("B*H*L*T*h", *scores, width), macs=math.prod(scores) * width)
    read = math.prod(queries) + cached
    rows.append(product(f"{label}scores", "scores", scores, input_shape=queries, input_elements=read))
    if attention.softcap:
        rows.append(step("attention softcap", "softcap", scores))
    if attention.position in POSITION_BIASES and not attention.is_cross:
        read = math.prod(scores) + math.prod(scores[1:])  # one bias for the whole batch
        rows.append(step("position bias", "add", scores, operands=2, input_elements=read))
    rows.append(step(f"{label}softmax", "softmax", scores))
    read = math.prod(scores) + cached
    name = f"{label or 'attention '}x V"
    rows.append(product(name, "attention x V", queries, input_shape=scores, input_elements=read))
    out = [layer for layer in layers if layer.role is Role.ATTENTION_OUT]
    return rows + ([matmul(at, "attention", f"{label}output projection", out)] if out else [])


def _attention_inputs(at: Place, attention: Attention, layers: Sequence[Layer], label: str) -> list[Row]:
    query = [layer for layer in layers if layer.role is Role.ATTENTION_QUERY]
    key_value = [layer for layer in layers if layer.role in (Role.ATTENTION_KEY, Role.ATTENTION_VALUE)]
    if attention.is_cross:
        # The encoder's output never changes: later passes find these keys and values in the cache.
        source = replace(at, tokens=at.run.encoder_length, is_cached=at.run.past > 0)
        rows = [matmul(at, "attention", f"{label}query projection", query)] if query else []
        return rows + (
            [matmul(source, "attention", f"{label}key/value projection", key_value)] if key_value else []
        )
    both = query + key_value
    shapes = {(layer.in_features, layer.out_features) for layer in both}
    is_square = len(both) == 3 and len(shapes) == 1 and both[0].in_features == both[0].out_features
    symbols = "B*L*d*3d" if is_square else "B*L*d*(q+k+v)"
    return [matmul(at, "attention", "QKV projection", both, symbols)] if both else []


def _ffn_rows(at: Place, ffn: FeedForward, layers: Sequence[Layer]) -> list[Row]:
    """The linears of the FFN around its activation; a block that borrows another's FFN has none."""
    if not layers:
        return []
    wide = next((layer for layer in layers if layer.role in (Role.FFN_GATE, Role.FFN_UP)), layers[0])
    shape, calls = (at.run.batch, at.tokens, wide.out_features), wide.calls
    by_role = {role: [layer for layer in layers if layer.role is role] for role in FFN_ROLES}
    names = {Role.FFN_GATE: "FFN gate", Role.FFN_UP: "FFN up", Role.FFN_DOWN: "FFN down"}

    def linears(*roles: Role) -> list[Row]:
        chosen = [layer for role in roles for layer in by_role[role]]
        return [matmul(at, "ffn", names.get(layer.role, last_name(layer.name)), [layer]) for layer in chosen]

    rows = linears(Role.FFN_GATE, Role.FFN_UP)
    name = f"activation {ffn.activation.value}"
    rows.append(make_row(at, "ffn", name, "activation", shape, kind=ffn.activation.value, calls=calls))
    if ffn.kind is FfnKind.GATED:
        rows.append(make_row(at, "ffn", "gating multiply", "multiply", shape, operands=2, calls=calls))
    return rows + linears(Role.FFN_LATENT, Role.FFN_DOWN)


def _head_rows(at: Place, layers: Sequence[Layer], norms: Sequence[Norm]) -> list[Row]:
    """What follows the blocks: final norm, projections without a role, logits, unmapped parameters."""
    model = at.run.model
    heads = [layer for layer in layers if layer.role is Role.LM_HEAD]
    others = [layer for layer in layers if layer.role is not Role.LM_HEAD]
    name = "final norm" if model.blocks else ""
    first = [norm for norm in norms if not others or _feeds(norm, others)]
    rows = [norm_row(at, norm, name) for norm in first]
    rows += [matmul(at, "other", last_name(layer.name), [layer]) for layer in others]
    rows += [norm_row(at, norm, name and "head norm") for norm in norms if norm not in first]
    if model.head_scale and heads:
        shape = (at.run.batch, at.tokens, heads[0].in_features)
        rows.append(make_row(at, "head", "head scale", "scale", shape))
    rows += [matmul(at, "head", "lm_head", [layer], "B*L*d*V") for layer in heads]
    if model.final_softcap and heads:
        rows.append(make_row(at, "head", "logit softcap", "softcap", rows[-1].output_shape))
    left = sum(math.prod(parameter.shape) for parameter in model.unmapped)
    if left:
        size, names = stored_bytes(left, FULL_BITS), tuple(parameter.name for parameter in model.unmapped)
        step = partial(make_row, at, "other", modules=names, parameters=left)
        formula = f"{left} parameters"
        rows.append(
            step("other parameters", "other", (), formula=formula, weight_bytes=size, weight_reads=size)
        )
    return rows


def _layers_of(sublayer: Attention | FeedForward, layers: Sequence[Layer]) -> list[Layer]:
    if isinstance(sublayer, FeedForward):
        return [layer for layer in layers if layer.role in FFN_ROLES]
    attention = [layer for layer in layers if layer.role in ATTENTION_ROLES]
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
    """Whether a projection leads from narrower embeddings to the hidden size."""
    columns = {table.num_columns for table in model.embeddings if table.kind is EmbeddingKind.TOKEN}
    is_door = layer.in_features in columns and layer.out_features == model.hidden_size
    return is_door and layer.role is Role.OTHER and model.hidden_size not in columns


def _is_read_by(model: ModelMap, table: Embedding, stack: str | None) -> bool:
    """Whether a stack looks tokens up here; a tied table is read through the one that holds it."""
    own = _stack_of(table.name)
    if not model.is_encoder_decoder:
        return table.tied_to is None
    if table.tied_to and _stack_of(table.tied_to) in (None, own):
        return False
    return own in (None, stack)


def _stack_of(name: str) -> str | None:
    """The stack that a module outside of blocks belongs to, None for one that serves both."""
    return next((part for part in name.split(".") if part in ("encoder", "decoder")), None)
