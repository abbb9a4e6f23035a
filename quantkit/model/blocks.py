"""Describing one transformer block: its attentions, its FFN, its norms, and how fused rows split.

Kinds are read from the structure in front of us (a block with a gate projection is gated, the activation
is what the module that sits there computes), so a config field that disagrees with the code cannot mislead
the map.
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


def describe_block(
    module: nn.Module,
    *,
    name: str,
    index: int,
    calls: int,
    stack: Stack,
    family: Family,
    config: ModelConfig,
    layers: list[Layer],
) -> Block:
    """One block's record, from its layers, its modules and the family's facts."""
    return Block(
        name=name,
        stack=stack.kind,
        index=index,
        calls=calls,
        attentions=tuple(
            _describe_attention(stack, family, config, index, is_cross=is_cross)
            for is_cross in (False, True)
            if any(
                each.role is Role.ATTENTION_QUERY and each.is_cross_attention is is_cross for each in layers
            )
        ),
        ffn=_describe_ffn(module, stack, layers),
        norm_kind=read_fact(family.norm_kind, config.raw),
        norm_placement=read_fact(family.placement, config.raw),
        residual=read_fact(family.residual, config.raw),
    )


def _describe_attention(
    stack: Stack, family: Family, config: ModelConfig, index: int, *, is_cross: bool
) -> Attention:
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
    """What query times key is multiplied by, where it is not 1 / sqrt(head_dim)."""
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
