"""The spaces of a model: vectors that a change of basis may be put into, each with the kinds it permits.

SmoothQuant, rotation and permutation differ only in the matrix that writers absorb and readers undo. Which
matrices keep the model's function follows from the operators between writer and reader, as the map gives
them: an elementwise activation permits permutations, a norm that only linears read permits scales, an RMS
norm with a folded gain permits rotations. Every other kind is forbidden with a reason.
https://arxiv.org/abs/2211.10438 (scales), https://arxiv.org/abs/2401.15024 and 2404.00456 (rotations)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quantkit.errors import InputError
from quantkit.model.model_map import (
    Activation,
    Attention,
    Block,
    FfnKind,
    Layer,
    ModelMap,
    Norm,
    NormPlace,
    NormPlacement,
    PositionKind,
    Role,
)
from quantkit.quantization.transforms.basis import BASIS_KINDS, BasisKind, Space, SpaceKind, forbidden
from quantkit.quantization.transforms.residual import residual_space, strays_of

NEEDED_ROLES = (
    Role.ATTENTION_QUERY,
    Role.ATTENTION_KEY,
    Role.ATTENTION_VALUE,
    Role.ATTENTION_OUT,
    Role.FFN_UP,
    Role.FFN_DOWN,
)
AFTER_SUBLAYERS = (NormPlace.AFTER_ATTENTION, NormPlace.AFTER_CROSS_ATTENTION, NormPlace.AFTER_FFN)
POSITION_BIASES = (PositionKind.ALIBI, PositionKind.RELATIVE)  # of each head
OF_THE_RESIDUAL = "a norm's input is the residual: permute or rotate that space"
TIED = "the head shares the token table with the embedding, so a change of one is a change of the other"
UNTIE = (
    "allow the head weights of its own (unties_head=True; it costs the size of the table), or leave it out"
)


def spaces_of(model_map: ModelMap) -> tuple[Space, ...]:
    """Every space of the model; none for an architecture without a row, whose roles are unknown."""
    if model_map.family is None:
        return ()
    norms = tuple(_norm_outputs(model_map))
    inner = [space for block in model_map.blocks for space in _in_block(model_map, block)]
    return (*norms, *inner, residual_space(model_map, norms))


def require_spaces(model_map: ModelMap) -> tuple[Space, ...]:
    """The spaces, or an error that lists every role that the map lacks."""
    spaces = spaces_of(model_map)
    if not spaces:
        roles = {layer.role for layer in model_map.layers}
        missing = ", ".join(role for role in NEEDED_ROLES if role not in roles)
        raise InputError(
            f"no row in the families table, so it has no spaces: missing roles are {missing}",
            where=model_map.name,
            next_step="quantize it without a transform, or add its row to quantkit/model/families",
        )
    return spaces


def require_known(model_map: ModelMap, spaces: Mapping[str, Space], name: str) -> Space:
    if name not in spaces:
        raise InputError(
            f"it has no space '{name}'", where=model_map.name, allowed=", ".join(spaces), next_step="name one"
        )
    return spaces[name]


def require_permitted(
    model_map: ModelMap, spaces: Mapping[str, Space], name: str, kind: BasisKind, *, unties_head: bool
) -> Space:
    """The space, if it is known and permits this change of basis."""
    space = require_known(model_map, spaces, name)
    if not space.allows(kind, unties_head=unties_head):
        allowed = [other for other in BASIS_KINDS if space.allows(other, unties_head=unties_head)]
        raise InputError(
            f"a change of kind '{kind}' is forbidden in '{name}': {space.forbidden[kind]}",
            where=model_map.name,
            allowed=", ".join(sorted(allowed)) or "none in this space",
            next_step=UNTIE if kind in space.permits_untied else "leave this space out",
        )
    return space


def no_space(model_map: ModelMap, what: str) -> InputError:
    """The error of a transform that finds no space to change."""
    return InputError(what, where=model_map.name, next_step="choose another transform for this model")


def _stray(model_map: ModelMap, block: str | None) -> str | None:
    """The reason that a module without a role in this block gives against any change."""
    names = [layer.name for layer in model_map.layers if layer.block == block and layer.role is Role.OTHER]
    unknown = [entry.name for entry in model_map.unmapped if entry.name not in model_map.placed]
    names += [name for name in unknown if block and name.startswith(f"{block}.")]
    return f"'{names[0]}' has no role, so its input and output are unknown" if block and names else None


def _norm_outputs(model_map: ModelMap) -> Iterator[Space]:
    placements = {block.name: block.norm_placement for block in model_map.blocks}
    for norm in model_map.norms:
        if norm.place in (NormPlace.QUERY, NormPlace.KEY):
            continue
        readers = [layer for layer in model_map.layers if layer.matrix in norm.feeds]
        reason = _reason_against_scales(norm, readers, placements) or _stray(model_map, norm.block)
        reason = reason or (None if norm.block else _stray_reader(model_map, norm))
        reason = reason or _reason_shared(model_map, norm, readers)
        is_tied = any(layer.tied_to for layer in readers)
        yield Space(
            name=norm.name,
            kind="norm_output",
            width=norm.features,
            writers=(norm.name,),
            readers=tuple(layer.name for layer in readers),
            block=norm.block,
            permits_untied=frozenset({"diagonal"} if reason is None and is_tied else set()),
            forbidden=forbidden(OF_THE_RESIDUAL, diagonal=reason or (TIED if is_tied else None)),
        )


def _reason_against_scales(
    norm: Norm, readers: Sequence[Layer], placements: Mapping[str, NormPlacement]
) -> str | None:
    """The reason that scales of this norm's output cannot go into its readers."""
    stream = "the residual, which the next sum reads"
    wrong = [layer for layer in readers if layer.in_features != norm.features]
    is_read_inside = any(layer.block and not layer.is_cross_attention for layer in readers)
    reasons = {
        "it has no gain that could take the scales": not norm.num_parameters,
        f"a post-norm: its output also is {stream}": placements.get(norm.block or "") is NormPlacement.POST,
        f"it normalises a sublayer's output, which is added to {stream}": (
            not readers and norm.place in AFTER_SUBLAYERS
        ),
        f"it normalises the embedding: its output is {stream}": (
            norm.place is NormPlace.EMBEDDING and (not readers or is_read_inside)
        ),
        "no linear of the map reads it: its output is the model's": not readers,
        f"'{wrong[0].name if wrong else ''}' reads another width": bool(wrong),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _reason_shared(model_map: ModelMap, norm: Norm, readers: Sequence[Layer]) -> str | None:
    """A projection that several norms feed, as in blocks that share it, can absorb the scales of none."""
    fed = {layer.matrix for layer in readers}
    other = next(
        (sibling for sibling in model_map.norms if sibling is not norm and fed & set(sibling.feeds)), None
    )
    return f"its readers are shared: '{other.name}' feeds them too" if other else None


def _stray_reader(model_map: ModelMap, norm: Norm) -> str | None:
    """A projection outside of blocks that may read a norm without the map saying so."""
    names = [layer.name for layer in strays_of(model_map) if layer.in_features == norm.features]
    return f"'{names[0]}' has no role and may read it" if names else None


def _in_block(model_map: ModelMap, block: Block) -> Iterator[Space]:
    members = [layer for layer in model_map.layers if layer.block == block.name]
    stray = _stray(model_map, block.name)
    yield from _inputs(model_map, block, members, stray)
    experts = {layer.expert: None for layer in members if layer.role is Role.FFN_DOWN}
    for expert in experts if block.ffn else ():
        yield _ffn_hidden(block, [layer for layer in members if layer.expert == expert], stray, expert)
    for attention in block.attentions:
        wide = [
            norm
            for norm in model_map.norms
            if norm.block == block.name and norm.features > attention.head_dim
        ]
        has_wide_norm = any(norm.place is NormPlace.QUERY for norm in wide)
        has_bias = attention.position in POSITION_BIASES
        has_bias = has_bias or (bool(model_map.position_biases) and not attention.is_cross)
        yield _value_heads(
            block, attention, members, stray, has_wide_norm=has_wide_norm, has_position_bias=has_bias
        )


def _inputs(
    model_map: ModelMap, block: Block, members: Sequence[Layer], stray: str | None
) -> Iterator[Space]:
    """Inputs that no norm can scale, since they are the residual too: they get factors of their own."""
    attention = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
    roles: dict[SpaceKind, tuple[Role, ...]] = {}
    own = {norm.place for norm in model_map.norms if norm.block == block.name}
    is_post = block.norm_placement is NormPlacement.POST
    is_bare = block.norm_placement is NormPlacement.PRE and NormPlace.BEFORE_ATTENTION not in own
    if is_post or is_bare:
        roles["attention_input"] = attention
    if is_post:
        roles["ffn_input"] = (Role.FFN_GATE, Role.FFN_UP)
    for kind, readers in ((kind, _names(members, *of)) for kind, of in roles.items()):
        if readers:
            yield Space(
                name=f"{block.name}.{kind}",
                kind=kind,
                width=next(layer.in_features for layer in members if layer.name == readers[0]),
                writers=(),
                readers=readers,
                block=block.name,
                forbidden=forbidden(OF_THE_RESIDUAL, diagonal=stray),
            )


def _names(members: Sequence[Layer], *roles: Role, is_cross: bool = False) -> tuple[str, ...]:
    return tuple(
        layer.name for layer in members if layer.role in roles and layer.is_cross_attention is is_cross
    )


def _ffn_hidden(block: Block, members: Sequence[Layer], stray: str | None, expert: int | None) -> Space:
    """The hidden units of a block's FFN, or of one expert."""
    ffn = block.ffn
    assert ffn is not None
    readers = _names(members, Role.FFN_DOWN)
    is_whole = len(readers) == 1 and not any(
        layer.role is Role.FFN_LATENT and layer.calls for layer in members
    )
    stray = stray or (None if is_whole else "its FFN is not one up and one down projection")
    is_homogeneous = ffn.kind is FfnKind.GATED or ffn.activation is Activation.RELU
    is_known = ffn.activation is not Activation.OTHER
    not_scaled = f"{ffn.display_name} of a scaled value is not its scaled {ffn.display_name}"
    return Space(
        name=f"{block.name}.{'' if expert is None else f'experts.{expert}.'}ffn_hidden",
        kind="ffn_hidden",
        width=next(layer.in_features for layer in members if layer.name in readers),
        writers=_names(members, Role.FFN_GATE, Role.FFN_UP),
        readers=readers,
        block=block.name,
        forbidden=forbidden(
            stray or "the activation between up and down works channel by channel",
            diagonal=stray or (None if is_homogeneous else not_scaled),
            permutation=stray or (None if is_known else "its activation is unknown and may mix channels"),
        ),
    )


def _value_heads(
    block: Block,
    attention: Attention,
    members: Sequence[Layer],
    stray: str | None,
    *,
    has_wide_norm: bool,
    has_position_bias: bool,
) -> Space:
    cross = attention.is_cross
    clipped = "its values are clipped, each by the same limit" if attention.clip else None
    owned = "position bias" if has_position_bias else "gain" if has_wide_norm else ""
    not_moved = f"each head has a {owned} of its own, so heads cannot change places" if owned else None
    return Space(
        name=f"{block.name}.{'cross_' if cross else ''}value_heads",
        kind="value_heads",
        width=attention.num_kv_heads * attention.head_dim,
        writers=_names(members, Role.ATTENTION_VALUE, is_cross=cross),
        readers=_names(members, Role.ATTENTION_OUT, is_cross=cross),
        block=block.name,
        forbidden=forbidden(
            stray or "each head weighs its values with weights of its own, so heads cannot be mixed",
            diagonal=stray or clipped,
            permutation=stray,
            per_head_orthogonal=stray or clipped,
            head_permutation=stray or not_moved,
        ),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        aligned=_names(members, Role.ATTENTION_QUERY, Role.ATTENTION_KEY, is_cross=cross),
    )
