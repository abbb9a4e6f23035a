"""Describing one transformer block: its attentions, its FFN, its norms, and how fused rows split.

Kinds are read off the modules (an FFN with a gate projection is gated, the activation is the function that
its module computes), so a config field that disagrees with the code cannot mislead the map.
"""

from __future__ import annotations

from torch import nn

from quantkit.model.config import ModelConfig
from quantkit.model.families.schema import Family, Norms, Stack, read_fact
from quantkit.model.model_map import (
    Attention,
    Block,
    FeedForward,
    FfnKind,
    Layer,
    NormPlace,
    PositionKind,
    Role,
    Rows,
)
from quantkit.model.names import Place, Walk, calls
from quantkit.model.unknown.probes import curve_of


def split_rows(
    roles: tuple[Role, ...], num_out: int, config: ModelConfig, *, interleaves: bool
) -> tuple[Rows, ...]:
    """The rows of each logical projection in a fused [out, in] matrix."""
    if len(roles) == 1:
        return (Rows(start=0, length=num_out, stride=num_out),)
    if interleaves:
        assert config.num_heads and config.head_dim
        stride = len(roles) * config.head_dim
        return tuple(
            Rows(start=i * config.head_dim, length=config.head_dim, stride=stride, count=config.num_heads)
            for i in range(len(roles))
        )
    lengths = [_fused_length(role, roles, num_out, config) for role in roles]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(Rows(start=s, length=n, stride=n) for s, n in zip(starts, lengths, strict=True))


def _fused_length(role: Role, roles: tuple[Role, ...], num_out: int, config: ModelConfig) -> int:
    if role in (Role.FFN_GATE, Role.FFN_UP):
        return num_out // len(roles)
    assert config.num_heads and config.num_kv_heads and config.head_dim
    heads = config.num_heads if role is Role.ATTENTION_QUERY else config.num_kv_heads
    return heads * config.head_dim


def describe_block(walk: Walk, place: Place, layers: list[Layer]) -> Block:
    assert walk.family is not None
    facts = walk.config.raw
    attends = {layer.is_cross_attention for layer in layers if layer.role is Role.ATTENTION_QUERY}
    return Block(
        name=place.block,
        stack=place.stack.kind,
        index=place.index,
        calls=calls(walk, place),
        attentions=tuple(
            _describe_attention(walk.config, walk.family, place, is_cross=is_cross)
            for is_cross in sorted(attends)
        ),
        ffn=_describe_ffn(walk.module.get_submodule(place.block), place.stack, layers),
        norm_kind=read_fact(walk.family.norm_kind, facts),
        norm_placement=read_fact(walk.family.placement, facts),
        residual=read_fact(walk.family.residual, facts),
    )


def _describe_attention(config: ModelConfig, family: Family, place: Place, *, is_cross: bool) -> Attention:
    stack, index = place.stack, place.index
    assert config.num_heads and config.num_kv_heads and config.head_dim
    norms: Norms = read_fact(stack.norms, config.raw)
    position = PositionKind.NONE if is_cross else read_fact(family.position, config.raw)
    rope = config.ropes[index] if position is PositionKind.ROPE and index < len(config.ropes) else None
    window = config.windows[index] if index < len(config.windows) else None
    return Attention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        position=position,
        is_cross=is_cross,
        is_causal=stack.kind == "decoder" and not is_cross,
        window=None if is_cross else window,
        softcap=config.attention_softcap,
        has_query_key_norm=any(norm.place is NormPlace.QUERY for norm in norms.values()),
        scale=_scale(config, index),
        rope_theta=rope.theta if rope else None,
        rotary_dim=int(config.head_dim * rope.rotary_fraction) if rope else None,
        rope_scaling=rope.scaling if rope else (),
    )


def _scale(config: ModelConfig, index: int) -> float | None:
    """The factor of the attention scores; None for 1 / sqrt(head_dim)."""
    assert config.head_dim
    scale = config.query_scale
    if config.raw.get("scale_attn_weights") is False:
        scale = 1.0
    if config.raw.get("scale_attn_by_inverse_layer_idx"):
        scale = (config.head_dim**-0.5 if scale is None else scale) / (index + 1)
    return scale


def _describe_ffn(module: nn.Module, stack: Stack, layers: list[Layer]) -> FeedForward | None:
    ups = [layer for layer in layers if layer.role is Role.FFN_UP]
    if not ups:
        return None
    try:
        activation: nn.Module | None = module.get_submodule(stack.activation)
    except AttributeError:
        activation = None
    is_gated = any(layer.role is Role.FFN_GATE for layer in layers)
    return FeedForward(
        kind=FfnKind.GATED if is_gated else FfnKind.STANDARD,
        activation=curve_of(activation),
        hidden_features=ups[0].out_features,
    )
