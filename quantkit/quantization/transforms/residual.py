"""The residual stream: its writers, its readers, and the changes of basis that it permits.

It is one space for the whole model, since every block adds to the same vector; an encoder and a decoder that
share a token table share it too. A permutation needs only that every writer and reader is known. A rotation
needs norms that are invariant to it: RMS norms without gain, or layer norms whose centring went into the
writers.
https://arxiv.org/abs/2401.15024 (LayerNorm as RMSNorm), https://arxiv.org/abs/2404.00456
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from quantkit.model.families import FAMILIES
from quantkit.model.families.schema import OuterUse
from quantkit.model.model_map import (
    ATTENTION_ROLES,
    FFN_ROLES,
    ROUTING_ROLES,
    SUMMED_KINDS,
    EmbeddingKind,
    Layer,
    ModelMap,
    Norm,
    NormKind,
    NormPlace,
    NormPlacement,
    Role,
)
from quantkit.quantization.transforms.basis import Space, forbidden

READING_ROLES = (
    Role.ATTENTION_QUERY,
    Role.ATTENTION_KEY,
    Role.ATTENTION_VALUE,
    Role.FFN_GATE,
    Role.FFN_UP,
    *ROUTING_ROLES,
)
WRITING_ROLES = (Role.ATTENTION_OUT, Role.FFN_DOWN)
assert set(READING_ROLES + WRITING_ROLES) < set(ATTENTION_ROLES + FFN_ROLES + ROUTING_ROLES)


Ends = Mapping[OuterUse, tuple[Layer, ...]]  # projections outside of blocks, by their use of the stream


def residual_space(model_map: ModelMap, norm_outputs: Sequence[Space]) -> Space:
    """The residual stream of the whole model; `norm_outputs` show which gains can be folded."""
    width = model_map.hidden_size or 0
    ends = _ends_of(model_map)
    head = next((layer for layer in model_map.layers if layer.role is Role.LM_HEAD), None)
    entering = {layer.matrix for layer in ends["enters"]}
    # Where a norm feeds the projection into the stream, every table lies before that norm.
    lie_before = any(entering & set(norm.feeds) for norm in model_map.norms)
    tables = [
        table
        for table in model_map.embeddings
        if table.kind in (*SUMMED_KINDS, EmbeddingKind.DISTANCE)
        and table.num_columns == width
        and not lie_before
    ]
    norms = [norm for norm in model_map.norms if _is_on_the_stream(model_map, norm, ends, width)]
    head_reads = head is not None and not ends["leaves"]
    readers = [layer for layer in model_map.layers if layer.role in READING_ROLES]
    readers += [*ends["stays"], *ends["leaves"], *ends["reads"], *([head] if head and head_reads else [])]
    writers = [layer for layer in model_map.layers if layer.role in WRITING_ROLES]
    writers += [*ends["enters"], *ends["stays"]]
    reason = _reason_against_all(model_map, ends, head, [table.name for table in tables], readers, writers)
    rotation, needs_untying = _reason_against_rotation(model_map, norms, readers, norm_outputs)
    rotation = reason or rotation
    tied = "the last norm's gain goes into the head, which reads the token table that also is the embedding"
    return Space(
        name="residual",
        kind="residual",
        width=width,
        writers=(*(table.name for table in tables), *(layer.name for layer in writers)),
        readers=tuple(layer.name for layer in readers),
        norms=tuple(norm.name for norm in norms),
        permits_untied=frozenset({"orthogonal"} if rotation is None and needs_untying else set()),
        forbidden=forbidden(
            "the stream has no heads",
            diagonal=reason or "norms divide the stream by its size, which depends on every channel's scale",
            orthogonal=rotation or (tied if needs_untying else None),
            permutation=reason,
        ),
    )


def strays_of(model_map: ModelMap) -> tuple[Layer, ...]:
    """Projections outside of blocks whose input and output are unknown."""
    names = tuple(_outer_uses(model_map))
    return tuple(
        layer
        for layer in model_map.layers
        if layer.role is Role.OTHER and not layer.block and not _is_named(layer.name, names)
    )


def _ends_of(model_map: ModelMap) -> Ends:
    facts = _outer_uses(model_map)
    layers = [layer for layer in model_map.layers if layer.role is Role.OTHER and not layer.block]
    ends = {}
    for use in get_args(OuterUse):
        names = tuple(name for name, fact in facts.items() if fact == use)
        ends[use] = tuple(layer for layer in layers if _is_named(layer.name, names))
    return ends


def _outer_uses(model_map: ModelMap) -> Mapping[str, OuterUse]:
    """Uses of projections outside of blocks, from the family's row."""
    return FAMILIES[model_map.family].other if model_map.family else {}


def _is_named(name: str, suffixes: Sequence[str]) -> bool:
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


def _is_on_the_stream(model_map: ModelMap, norm: Norm, ends: Ends, width: int) -> bool:
    if norm.place in (NormPlace.QUERY, NormPlace.KEY) or norm.features != width:
        return False
    if norm.place is NormPlace.EMBEDDING and {layer.matrix for layer in ends["enters"]} & set(norm.feeds):
        return False
    # ALBERT's last norm follows the projection that leaves; OPT's stands before it.
    leaves_first = any(layer.out_features == norm.features for layer in ends["leaves"])
    return not (norm.place is NormPlace.FINAL and leaves_first)


def _reason_against_all(
    model_map: ModelMap,
    ends: Ends,
    head: Layer | None,
    tables: Sequence[str],
    readers: Sequence[Layer],
    writers: Sequence[Layer],
) -> str | None:
    """The reason against any change of basis: a reader or writer of the stream is unknown."""
    strays = [layer.name for layer in model_map.layers if layer.role is Role.OTHER and layer.block]
    strays += [layer.name for layer in strays_of(model_map)]
    strays += [norm.name for norm in model_map.norms if norm.place is NormPlace.OTHER]
    strays += [entry.name for entry in model_map.unmapped]
    wrong = [layer.name for layer in readers if layer.in_features != model_map.hidden_size]
    wrong += [layer.name for layer in writers if layer.out_features != model_map.hidden_size]
    token_tables = [table.name for table in model_map.embeddings if table.kind is EmbeddingKind.TOKEN]
    wrong += [] if ends["enters"] else [name for name in token_tables if name not in tables]
    is_half_tied = head is not None and head.tied_to and (head.tied_to in tables) != (head in readers)
    reasons = {
        "without a language-model head the model returns the stream itself": head is None,
        f"'{(*strays, '')[0]}' has no role, so whether it touches the stream is unknown": strays,
        f"'{(*wrong, '')[0]}' is not as wide as the stream": wrong,
        "the head shares the embedding's table, and only one of them is on the stream": is_half_tied,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _reason_against_rotation(
    model_map: ModelMap, norms: Sequence[Norm], readers: Sequence[Layer], norm_outputs: Sequence[Space]
) -> tuple[str | None, bool]:
    """(reason against a rotation, whether the head must be untied for it)."""
    placements = {block.norm_placement for block in model_map.blocks}
    if NormPlacement.POST in placements:
        return "post-norms: their gains scale the residual itself and have no reader to go into alone", False
    for placement in placements & {NormPlacement.SANDWICH, NormPlacement.OUTPUT}:
        return (
            f"{placement} norms: the gain on each sublayer's output stands between writer and residual",
            False,
        )
    by_name = {space.name: space for space in norm_outputs}
    fed = {name for space in norm_outputs for name in space.readers}
    is_untied = False
    for norm in norms:
        space = by_name[norm.name]
        if "diagonal" not in space.permits | space.permits_untied:
            return f"the gain of '{norm.name}' cannot be folded: {space.forbidden['diagonal']}", False
        is_untied = is_untied or "diagonal" in space.permits_untied
    centres = any(norm.kind is NormKind.LAYER_NORM for norm in norms)
    bare = [layer.name for layer in readers if layer.name not in fed]
    if centres and bare:
        return f"'{bare[0]}' reads the stream without a norm, so its mean cannot be taken away", False
    return None, is_untied
