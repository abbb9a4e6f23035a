"""From a name, a folder or a live module to a `ModelMap`, without touching a weight.

`inspect` opens a name or folder as a `Source`, `inspect_source` builds its module on the meta device, and
`map_module` walks the module. Every linear becomes one `Layer` for each logical projection it holds, with
its role from the families table, its tie, its aliases and its calls in a forward pass. A module that no
table describes is mapped as `other` or listed as unmapped: the parameters of a map always add up to the
model's.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from quantkit.errors import InputError
from quantkit.files import read_json, reading
from quantkit.model import linears
from quantkit.model.blocks import KEYS, QUERIES, describe_block, distance_terms, factor_of, split_rows
from quantkit.model.config import normalise
from quantkit.model.experts import copy_with_separate_experts
from quantkit.model.families import family_of
from quantkit.model.families.schema import read_fact
from quantkit.model.load import TRANSFORMERS_MAJOR, Source, build_on_meta, open_source
from quantkit.model.model_map import (
    ATTENTION_ROLES,
    FFN_ROLES,
    Activation,
    Block,
    DistanceScores,
    Embedding,
    EmbeddingKind,
    Layer,
    ModelMap,
    Norm,
    NormKind,
    NormPlace,
    Picture,
    PositionBias,
    PositionKind,
    Role,
    UnmappedParameter,
)
from quantkit.model.names import (
    Place,
    Walk,
    calls,
    checkpoint_name,
    find_prefix,
    norm_row,
    place_of,
    readers,
)
from quantkit.model.rope import read_ropes
from quantkit.model.sentence import require_width
from quantkit.model.unknown.observe import observe, summary
from quantkit.model.unknown.probes import curve_of, norm_kind_of
from quantkit.model.weights.open import header_notes, stores

NORM_CLASS = re.compile(r"Norm", re.IGNORECASE)


def inspect(model: str | Path | nn.Module, *, trust_remote_code: bool = False) -> ModelMap:
    """Map a model by its name, its folder or its live module."""
    if isinstance(model, nn.Module):
        return map_module(copy_with_separate_experts(model), name=type(model).__name__)
    return inspect_source(open_source(model, trust_remote_code=trust_remote_code))


def inspect_source(source: Source) -> ModelMap:
    """Map a source, and check the headers of its weights where it has a folder."""
    module = build_on_meta(source)
    with reading(source.name, "its config contradicts itself", next_step="correct config.json"):
        model_map = map_module(module, name=source.name)
    if model_map.logit_bias and source.folder and not stores(source, module, model_map.logit_bias):
        model_map = replace(model_map, logit_bias=None)  # published BART leaves out a bias of zeros
    if source.sentence:
        require_width(source.sentence, model_map.hidden_size, source.name)
    return replace(
        model_map,
        picture=_at_usual_size(model_map.picture, source),
        sentence=source.sentence,
        notes=(*source.notes, *header_notes(source, module), *model_map.notes),
        used_remote_code=source.uses_remote_code,
    )


def _at_usual_size(picture: Picture | None, source: Source) -> Picture | None:
    """A picture that may have any size at the one to which the preprocessing crops or resizes."""
    path = source.folder / "preprocessor_config.json" if source.folder else None
    if picture is None or not picture.stretches or path is None or not path.exists():
        return picture
    settings = read_json(path)
    sizes = settings.get("crop_size") if settings.get("do_center_crop") else settings.get("size")
    sides = [sizes.get(side) for side in ("height", "width")] if isinstance(sizes, dict) else []
    usual = tuple(side for side in sides if type(side) is int and side >= max(picture.patch))
    return replace(picture, size=(usual[0], usual[1])) if len(usual) == 2 else picture


def map_module(module: nn.Module, *, name: str) -> ModelMap:
    """Map a live module; its weights may be on the meta device."""
    config = normalise(getattr(module, "config", None))
    family = family_of(config.model_type)
    walk = Walk(module=module, config=config, family=family, prefix=find_prefix(module, family))
    if family and read_fact(family.position, config.raw) is PositionKind.ROPE:
        walk.ropes = read_ropes(module.get_submodule(walk.prefix.rstrip(".")), family.fixed_theta)
    for path, child in module.named_modules(remove_duplicate=False):
        stored = checkpoint_name(path, family)
        walk.names[id(child)].append(stored)
        walk.modules[stored] = child
        walk.parents[stored] = module.get_submodule(path.rpartition(".")[0])
    embeddings = _map_embeddings(walk)
    layers = _map_layers(walk)
    norms = _map_norms(walk)
    blocks = _map_blocks(walk, layers)
    has_tied_head = any(layer.tied_to for layer in layers if layer.role is Role.LM_HEAD)
    scales_head = bool(family and read_fact(family.scales_tied_head, config.raw)) and (
        family is None or (family.scales_tied_head_until or math.inf) > TRANSFORMERS_MAJOR
    )
    cap: float | None = config.raw.get("final_logit_softcapping")
    root = math.sqrt(config.hidden_size) if config.hidden_size else None
    return ModelMap(
        name=name,
        model_type=config.model_type,
        architecture=type(module).__name__,
        family=family.name if family else None,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        is_encoder_decoder=config.is_encoder_decoder,
        has_tied_head=has_tied_head,
        embedding_scale=root
        if family and read_fact(family.scales_embedding, config.raw)
        else factor_of(walk, "embedding_multiplier"),
        head_scale=1 / root if root and family and has_tied_head and scales_head else None,
        final_softcap=cap if family and family.softcaps_logits else None,
        logit_scale=factor_of(walk, "logit_multiplier", "logit_divisor"),
        layers=layers,
        embeddings=embeddings,
        norms=norms,
        blocks=blocks,
        unmapped=_find_unmapped(walk),
        notes=tuple(_notes(walk, layers)),
        norm_gain_offset=family.norm_gain_offset if family else 0.0,
        position_offset=_position_offset(walk),
        logit_bias=family.logit_bias if family and has_buffer(module, family.logit_bias) else None,
        position_biases=_position_biases(walk, embeddings),
        distance_scores=_distance_scores(walk, layers),
        head_activation=_head_activation(walk),
        picture=_picture(walk),
        head_reads_one_token=bool(family and family.head_reads_one_token),
        end_token=walk.config.raw.get("eos_token_id") if family and family.finds_end else None,
        reads_mean=bool(family and read_fact(family.reads_mean, config.raw)),
        num_experts=config.num_experts,
        num_active_experts=config.num_active_experts,
    )


def _position_offset(walk: Walk) -> int:
    """Rows of a position table before the first token's."""
    if walk.family is None or not walk.family.counts_from_padding:
        return walk.family.position_offset if walk.family else 0
    padding = walk.family.padding_id
    padding = walk.config.raw.get("pad_token_id") if padding is None else padding
    if padding is None:
        raise InputError(
            "it has no pad_token_id, and this family counts its positions from there",
            where="config.json",
            next_step="set pad_token_id as the model was trained; RoBERTa's is 1",
        )
    return int(padding) + 1


def has_buffer(module: nn.Module, name: str | None) -> bool:
    return name in dict(module.named_buffers())


def _position_biases(walk: Walk, embeddings: Sequence[Embedding]) -> tuple[PositionBias, ...]:
    rows = walk.family.position_biases if walk.family else ()
    tables = {table.name: table for table in embeddings}
    # T5's encoder alone has no decoder.
    present = [row for row in rows if walk.prefix + row.table in tables]
    return tuple(_position_bias(walk, row, tables[walk.prefix + row.table]) for row in present)


def _position_bias(walk: Walk, row: PositionBias, table: Embedding) -> PositionBias:
    assert walk.family is not None
    if walk.family.position_biases_by_config:
        distance = int(walk.config.raw.get("relative_attention_max_distance", row.max_distance))
        row = replace(row, num_buckets=table.num_rows, max_distance=distance)
    elif table.num_rows < row.num_buckets:
        raise InputError(
            f"its position bias has {table.num_rows} rows, and its class reads {row.num_buckets}",
            where="config.json",
            next_step=f"set relative_attention_num_buckets to {row.num_buckets}",
        )
    return replace(row, table=table.name)


def _distance_scores(walk: Walk, layers: Sequence[Layer]) -> DistanceScores | None:
    name = walk.family.distance_table if walk.family else None
    table = f"{walk.prefix}{name}"
    if name is None or table not in walk.modules:
        return None
    query = next(layer for layer in layers if layer.role is Role.ATTENTION_QUERY)
    attention: Any = walk.module.get_submodule(query.matrix.rpartition(".")[0])
    terms, num_buckets = distance_terms(attention), attention.position_buckets
    max_distance: int = attention.max_relative_positions
    if num_buckets > 0 and (num_buckets % 2 or num_buckets // 2 >= max_distance - 1):
        raise InputError(
            f"position_buckets is {num_buckets} for distances up to {max_distance}",
            where="config.json",
            allowed="an even number below twice the largest distance, or -1",
        )
    return DistanceScores(
        table=table,
        reach=attention.pos_ebd_size,
        buckets_from=num_buckets // 2 if num_buckets > 0 else None,
        max_distance=max_distance,
        has_keys=KEYS in terms,
        has_queries=QUERIES in terms,
    )


def _head_activation(walk: Walk) -> Activation | None:
    name = walk.family.head_activation if walk.family else None
    if name is None:
        return None
    if name in walk.modules:
        return curve_of(walk.modules[name])
    kind = walk.config.raw.get(name)
    if not kind:
        return None
    return curve_of(ACT2FN[kind]) if kind in ACT2FN else Activation.OTHER


def _notes(walk: Walk, layers: Sequence[Layer]) -> Iterator[str]:
    training_only = [layer for layer in layers if not layer.calls]
    if training_only:
        yield training_only_note(training_only)
    if walk.family is None:
        model_type = walk.config.model_type
        kind = f"model type '{model_type}'" if model_type else "a module without a config"
        yield f"no row for {kind} in the families table: roles are 'other', blocks are not described"
        yield from summary(observe(walk.module))
        return
    others = [layer.name for layer in layers if layer.role is Role.OTHER]
    strays = [name for name in others if not {name, name.removeprefix(walk.prefix)} & set(walk.family.other)]
    if strays:
        yield f"{len(strays)} projections have no role in this family: {', '.join(strays[:4])}"


def training_only_note(layers: Sequence[Layer]) -> str:
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    counted = f"{len(layers)} projections with {weights:,} weights"
    return f"{counted} run in training alone: no plan, cost or export has them"


def _module_from(module: nn.Module, getter: str) -> nn.Module | None:
    """The result of a getter that transformers' models have; None where it gives no module."""
    try:
        child = getattr(module, getter, lambda: None)()
    except NotImplementedError:
        return None
    return child if isinstance(child, nn.Module) else None


def _find_head(walk: Walk) -> nn.Module | None:
    """The projection to the vocabulary; some classes give another one for it."""
    head = _module_from(walk.module, "get_output_embeddings")
    kind = linears.kind_of(head) if head is not None else None
    if head is None or kind is None:
        return head
    rows = linears.weight_OI(head, kind).shape[0]
    return head if walk.config.vocab_size in (None, rows) else None


def _map_layers(walk: Walk) -> tuple[Layer, ...]:
    head = _find_head(walk)
    ranked: list[tuple[tuple[int, int, int], Layer]] = []
    anchors: dict[str, int] = {}
    for order, (_, child) in enumerate(walk.module.named_modules()):
        kind = linears.kind_of(child)
        names = walk.names[id(child)]
        if kind is None or (kind == linears.PATCHES and not _is_of_patches(walk, child, names[0])):
            continue
        place = place_of(walk, names[0])
        roles, is_cross = ((Role.LM_HEAD,), False) if child is head else _roles_of(place)
        split = _split(walk, child, kind=kind, roles=roles, is_cross=is_cross, place=place)
        for position, layer in enumerate(split):
            anchor = anchors.setdefault(layer.block or layer.matrix, order)
            rank = position if layer.role is Role.OTHER else list(Role).index(layer.role)
            ranked.append(((anchor, _part(layer), rank), layer))
        walk.claim(child, names[0])
    return tuple(layer for _, layer in sorted(ranked, key=lambda entry: entry[0]))


def _roles_of(place: Place | None) -> tuple[tuple[Role, ...], bool]:
    if place is None:
        return (Role.OTHER,), False
    if place.inner in place.stack.cross_projections:
        return place.stack.cross_projections[place.inner], True
    return place.stack.projections.get(place.row, (Role.OTHER,)), False


def _part(layer: Layer) -> int:
    """The order of a block's parts: self attention, cross attention, FFN, the rest."""
    if layer.role in ATTENTION_ROLES:
        return 1 if layer.is_cross_attention else 0
    return 2 if layer.role in FFN_ROLES else 3


def _split(
    walk: Walk,
    child: Any,
    *,
    kind: str,
    roles: tuple[Role, ...],
    is_cross: bool,
    place: Place | None,
) -> list[Layer]:
    """One layer for each projection that the matrix holds."""
    num_out, num_in = linears.weight_OI(child, kind).shape
    names = walk.names[id(child)]
    matrix = names[0]
    rows = split_rows(
        roles,
        num_out,
        walk.parents[matrix] if place else child,
        fused_rows=read_fact(walk.family.fused_rows, walk.config.raw) if walk.family else "end to end",
    )
    if sum(part.total for part in rows) != num_out:
        raise InputError(
            f"its {num_out} rows do not split into {', '.join(roles)}",
            where=matrix,
            next_step="check heads and head size in config.json",
        )
    tied_to = walk.owners.get(id(child.weight))
    heads_field = place.stack.training_only.get(place.inner) if place else None
    return [
        Layer(
            name=matrix if len(roles) == 1 else f"{matrix}[{role.value.split('_')[-1]}]",
            role=role,
            in_features=num_in,
            out_features=part.total,
            has_bias=getattr(child, "bias", None) is not None,
            matrix=matrix,
            rows=part,
            stored_as=kind,
            block=place.block if place else None,
            is_cross_attention=is_cross,
            tied_to=tied_to,
            aliases=tuple(names[1:]),
            calls=calls(walk, place) * len(names),
            num_heads=int(walk.config.raw[heads_field]) if heads_field else 1,
            output_factors=_output_factors(walk, place),
        )
        for role, part in zip(roles, rows, strict=True)
    ]


def _output_factors(walk: Walk, place: Place | None) -> str | None:
    """The parameter of the block that scales the outputs of the projection."""
    scales = place.stack.scales if place else {}
    names = (f"{place.block}.{name}" for name, scaled in scales.items() if place and scaled == place.inner)
    return next((name for name in names if name.rpartition(".")[0] in walk.modules), None)


def _is_of_patches(walk: Walk, child: nn.Module, name: str) -> bool:
    """Whether the convolution is the one that makes tokens of patches."""
    row = walk.family.picture if walk.family else None
    return bool(row and name == walk.prefix + row.patches and linears.is_product_of_patches(child))


def _picture(walk: Walk) -> Picture | None:
    row = walk.family.picture if walk.family else None
    patches: Any = walk.modules.get(walk.prefix + row.patches) if row else None
    if row is None or patches is None:
        return None
    sides = walk.config.raw.get("image_size")
    height, width = (sides, sides) if isinstance(sides, int) else sides or (0, 0)
    patch = (int(patches.kernel_size[0]), int(patches.kernel_size[1]))
    existing = {checkpoint_name(path, walk.family) for path, _ in walk.module.named_parameters()}
    first, unread = (
        tuple(name for part in parts if (name := walk.prefix + part) in existing)
        for parts in (row.first, row.unread)
    )
    picture = Picture(
        patches=walk.prefix + row.patches,
        channels=int(patches.in_channels),
        patch=patch,
        size=(int(height), int(width)),
        positions=walk.prefix + row.positions,
        first=first,
        unread=unread,
        stretches=row.stretches,
        table=(int(height) // patch[0], int(width) // patch[1]),
        probe=walk.prefix + row.probe if row.probe and walk.prefix + row.probe in walk.modules else None,
    )
    if not all(picture.grid):
        raise InputError(
            f"a picture of {height} x {width} pixels holds no patch of {patch[0]} x {patch[1]}",
            where="config.json (image_size, patch_size)",
            allowed="pictures of one patch or more",
        )
    return picture


def _map_embeddings(walk: Walk) -> tuple[Embedding, ...]:
    token_table = _module_from(walk.module, "get_input_embeddings")
    tables: dict[int, Embedding] = {}
    for _, child in walk.module.named_modules():
        if not isinstance(child, nn.Embedding):
            continue
        names = walk.names[id(child)]
        key = id(child.weight)
        if key in tables:  # a second module on the same table
            aliases = {*tables[key].aliases, *names}
            tables[key] = replace(tables[key], aliases=tuple(sorted(aliases)))
            continue
        walk.claim(child, names[0])
        relative = names[0].removeprefix(walk.prefix)
        kind = walk.family.embeddings.get(relative) if walk.family else None
        default = EmbeddingKind.TOKEN if child is token_table else EmbeddingKind.OTHER
        tables[key] = Embedding(
            name=names[0],
            kind=kind or default,
            num_rows=child.num_embeddings,
            num_columns=child.embedding_dim,
            aliases=tuple(names[1:]),
        )
    return tuple(tables.values())


def _map_norms(walk: Walk) -> tuple[Norm, ...]:
    head = _find_head(walk)
    head_name = walk.names[id(head)][0] if head is not None else None
    norms: list[Norm] = []
    for _, child in walk.module.named_modules():
        names = walk.names[id(child)]
        is_norm = NORM_CLASS.search(type(child).__name__) and not list(child.children())
        parameters = list(child.parameters(recurse=False))
        if not is_norm or linears.kind_of(child):
            continue
        place = place_of(walk, names[0])
        row = norm_row(walk, names[0], place)
        if not parameters and row is None:
            continue
        if not parameters and norm_kind_of(child) is None:
            raise InputError(
                "a norm without weights",
                where=names[0],
                allowed="norms with a gain, or layer norms over one dimension",
            )
        walk.claim(child, names[0])
        norms.append(
            Norm(
                name=names[0],
                kind=_norm_kind(walk, child),
                features=parameters[0].numel() if parameters else math.prod(child.normalized_shape),
                num_parameters=sum(parameter.numel() for parameter in parameters),
                block=place.block if place else None,
                feeds=readers(walk, row, names[0], place, head_name) if row else (),
                place=row.place if row else NormPlace.OTHER,
                epsilon=float(getattr(child, "eps", getattr(child, "variance_epsilon", 1e-5))),
                aliases=tuple(names[1:]),
                calls=calls(walk, place) * len(names),
            )
        )
    return tuple(norms)


def _norm_kind(walk: Walk, child: nn.Module) -> NormKind:
    """The kind that a trial call shows; the family's fact where the norm cannot be called alone."""
    observed = norm_kind_of(child)
    if observed is None and walk.family:
        return NormKind(read_fact(walk.family.norm_kind, walk.config.raw))
    return observed or (NormKind.RMS_NORM if "rms" in type(child).__name__.lower() else NormKind.LAYER_NORM)


def _map_blocks(walk: Walk, layers: tuple[Layer, ...]) -> tuple[Block, ...]:
    if walk.family is None:
        return ()
    by_block: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        if layer.block:
            by_block[layer.block].append(layer)
    places = {block: place for block in by_block if (place := place_of(walk, block))}
    return tuple(describe_block(walk, place, by_block[block]) for block, place in places.items())


def _find_unmapped(walk: Walk) -> tuple[UnmappedParameter, ...]:
    return tuple(
        UnmappedParameter(name=name, shape=tuple(parameter.shape))
        for name, parameter in walk.module.named_parameters()
        if id(parameter) not in walk.owners
    )
