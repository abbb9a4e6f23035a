"""Describing one transformer block: its attentions, its FFN, its norms, and how fused rows split.

Facts are read off the modules (an FFN with a gate projection is gated, the activation is the function that
its module computes, heads and scale are the attention module's own), so a config field that the code does not
read cannot mislead the map. Where no module holds a fact, the family's row says which field decides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from quantkit.errors import InputError
from quantkit.model.config import FULL, SLIDING
from quantkit.model.families.schema import Family, Stack, read_fact
from quantkit.model.model_map import (
    Attention,
    Block,
    FeedForward,
    FfnKind,
    Layer,
    Mixture,
    NormPlace,
    PositionKind,
    Role,
    Rows,
)
from quantkit.model.names import Place, Walk, calls
from quantkit.model.unknown.probes import curve_of
from quantkit.model.windows import own_window

KEYS, QUERIES = "c2p", "p2c"  # as configs of DeBERTa call them


def split_rows(
    roles: tuple[Role, ...], num_out: int, attention: nn.Module, *, fused_rows: str | int
) -> tuple[Rows, ...]:
    """The rows of each logical projection in a fused [out, in] matrix of this module."""
    if len(roles) == 1:
        return (Rows(start=0, length=num_out, stride=num_out),)
    shares = [_queries_per_key(attention) if role is Role.ATTENTION_QUERY else 1 for role in roles]
    if fused_rows == "by head":
        fused_rows = num_out // (sum(shares) * head_dim_of(attention))
    count = 1 if isinstance(fused_rows, str) else fused_rows
    lengths = [num_out // count // sum(shares) * share for share in shares]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(
        Rows(start=start, length=length, stride=sum(lengths) if count > 1 else length, count=count)
        for start, length in zip(starts, lengths, strict=True)
    )


def head_dim_of(attention: nn.Module) -> int:
    """The size of a head, under one of the names that transformers' modules have for it."""
    names = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
    sizes = (size for name in names if isinstance(size := getattr(attention, name, None), int))
    size = next(sizes, None)
    if size is None:
        raise InputError(
            f"{type(attention).__name__} does not say how large its heads are",
            where="the code that ships with the checkpoint",
            next_step="leave --trust-remote-code out, so that transformers' own class is used",
        )
    return size


def _queries_per_key(attention: Any) -> int:
    if hasattr(attention, "num_kv_heads"):  # Falcon
        return int(attention.num_heads // attention.num_kv_heads)
    groups: int = getattr(attention, "num_key_value_groups", getattr(attention, "num_groups", 1))
    return groups


def describe_block(walk: Walk, place: Place, layers: list[Layer]) -> Block:
    assert walk.family is not None
    facts = walk.config.raw
    queries = [layer for layer in layers if layer.role is Role.ATTENTION_QUERY]
    keys = {layer.is_cross_attention: layer for layer in layers if layer.role is Role.ATTENTION_KEY}
    return Block(
        name=place.block,
        stack=place.stack.kind,
        index=place.index,
        calls=calls(walk, place),
        attentions=tuple(
            _describe_attention(walk, walk.family, place, query, keys[query.is_cross_attention])
            for query in sorted(queries, key=lambda layer: layer.is_cross_attention)
        ),
        ffn=_describe_ffn(walk, place, layers),
        mixture=_describe_mixture(walk, place, layers),
        norm_kind=read_fact(walk.family.norm_kind, facts),
        norm_placement=read_fact(walk.family.placement, facts),
        residual=read_fact(walk.family.residual, facts),
        residual_scale=factor_of(walk, "residual_multiplier") or 1.0,
    )


def _describe_attention(walk: Walk, family: Family, place: Place, query: Layer, key: Layer) -> Attention:
    facts, is_cross = walk.config.raw, query.is_cross_attention
    config: Any = walk.module.config
    module = walk.parents[query.matrix]
    head_dim = head_dim_of(module)
    block, norms = walk.modules[place.block], read_fact(place.stack.norms, facts)
    kinds = facts.get("layer_types") if family.windows == "layer_types" else None
    kind = kinds[place.index] if kinds else FULL
    has_window = not is_cross and (kind == SLIDING or family.windows == "every layer")
    window = config.sliding_window if has_window else None
    if family.windows == "own":
        window = own_window(module)
        kind = FULL if window is None else SLIDING
    # SmolLM3 has a switch in each layer; Cohere 2 and EXAONE 4 turn the layers with a window alone.
    is_positioned = getattr(module, "use_rope", True) and not (
        family.positions_need_window and config.sliding_window and not has_window
    )
    position = read_fact(family.position, facts) if is_positioned and not is_cross else PositionKind.NONE
    rope = walk.ropes[kind] if position is PositionKind.ROPE else None
    return Attention(
        num_heads=query.out_features // head_dim,
        num_kv_heads=key.out_features // head_dim,
        head_dim=head_dim,
        position=position,
        is_cross=is_cross,
        is_causal=not is_cross and _is_causal(module, family, place.stack, facts),
        window=window,
        clip=facts.get(family.clips_projections) if family.clips_projections else None,
        softcap=facts.get("attn_logit_softcapping") if family.softcaps_scores else None,
        has_query_key_norm=any(
            norm.place is NormPlace.QUERY and _has(block, name) for name, norm in norms.items()
        ),
        scale=_scale(module, head_dim, place.index),
        rope_theta=rope.theta if rope else None,
        rotary_dim=(head_dim if rope.rotary_dim is None else rope.rotary_dim) if rope else None,
        rope_frequencies=rope.frequencies if rope else (),
        rope_factor=rope.factor if rope else 1.0,
        rope_interleaved=bool(rope) and family.rotates_neighbours,
        rope_limit=rope.limit if rope else None,
    )


def factor_of(walk: Walk, *fields: str) -> float | None:
    """The product of the config's factors that the family's row names, divisors inverted; None for 1."""
    factor = 1.0
    for field in fields:
        key = getattr(walk.family, field, None)
        value = float(walk.config.raw[key]) if key else 1.0
        factor *= 1 / value if field.endswith("divisor") else value
    return None if factor == 1 else factor


def _is_causal(module: Any, family: Family, stack: Stack, facts: Mapping[str, Any]) -> bool:
    """Encoders can be made decoders, and decoders be made to look in both directions."""
    if stack.kind == "encoder":
        if family.is_causal:
            return True
        by_config = family.is_causal_by_config and bool(facts.get("is_decoder"))
        return by_config or bool(getattr(module, "is_decoder", False))
    return bool(getattr(module, "is_causal", True)) and facts.get("is_causal") is not False


def _scale(module: Any, head_dim: int, index: int) -> float | None:
    """The factor of the attention scores; None for 1 / sqrt(head_dim)."""
    scale: float | None = getattr(module, "scaling", None)
    if scale is None:  # under transformers 4.57: GPT-2 has switches, T5 does not scale, encoders do
        is_t5 = hasattr(module, "relative_attention_num_buckets")
        is_scaled = getattr(module, "scale_attn_weights", not is_t5)
        scale = head_dim**-0.5 if is_scaled else 1.0
        scale /= index + 1 if getattr(module, "scale_attn_by_inverse_layer_idx", False) else 1
        scale /= math.sqrt(1 + len(distance_terms(module)))  # as many terms as DeBERTa's scores have
    return None if scale == head_dim**-0.5 else scale


def distance_terms(attention: Any) -> frozenset[str]:
    """Scores of a token and a distance that an attention adds: of the distance's key, of its query."""
    return frozenset(getattr(attention, "pos_att_type", None) or ()) & {KEYS, QUERIES}


def _has(module: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in module.named_modules())


def _describe_mixture(walk: Walk, place: Place, layers: list[Layer]) -> Mixture | None:
    router, row = next((layer for layer in layers if layer.role is Role.ROUTER), None), place.stack.mixture
    if router is None or row is None:
        return None
    num_active = walk.config.num_active_experts
    if not num_active or num_active > router.out_features:
        raise InputError(
            f"{num_active} of {router.out_features} experts run for each token",
            where="config.json",
            allowed="num_experts_per_tok from 1 up to the number of experts",
        )
    return Mixture(
        num_experts=router.out_features,
        num_active=num_active,
        normalises=read_fact(row.normalises, walk.config.raw),
    )


def _describe_ffn(walk: Walk, place: Place, layers: list[Layer]) -> FeedForward | None:
    ups = [layer for layer in layers if layer.role is Role.FFN_UP]
    if not ups:
        return None
    ups.sort(key=lambda layer: layer.expert is None)
    row = (ups[0].expert is not None and place.stack.mixture) or place.stack
    activation = walk.modules.get(f"{place.block}.{row.activation}")
    is_gated = any(layer.role is Role.FFN_GATE for layer in layers)
    return FeedForward(
        kind=FfnKind.GATED if is_gated else FfnKind.STANDARD,
        activation=curve_of(activation),
        hidden_features=ups[0].out_features,
    )
