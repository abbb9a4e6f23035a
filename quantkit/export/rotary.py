"""Rotary frequencies: the angle by which each pair of a head's features turns from one token to the next.

Su et al. 2021 (https://arxiv.org/abs/2104.09864); stretched for longer contexts linearly, by Llama 3's
rule, by YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071) or by learnt factors (LongRoPE, Ding et
al. 2024, https://arxiv.org/abs/2402.13753). What cannot be written as one fixed table is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.model_map import Attention, ModelMap


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """What turns a head: frequencies, a factor on cosine and sine, and how far the table is valid."""

    frequencies: NDArray[np.float32]  # [rotary_dim / 2]
    factor: float = 1.0
    max_positions: int | None = None  # None: as far as the model goes


def rotation_of(attention: Attention, *, max_positions: int) -> Rotation:
    """The table of one attention."""
    assert attention.rope_theta and attention.rotary_dim
    scaling = dict(attention.rope_scaling)
    kind = scaling.get("rope_type", "default")
    if kind not in RULES:
        raise InputError(
            f"rotary positions of type '{kind}' change with the length of the text",
            where="config.json",
            allowed=", ".join(RULES),
            next_step="use a checkpoint with one of these",
        )
    exponents = np.arange(0, attention.rotary_dim, 2, dtype=np.float32) / np.float32(attention.rotary_dim)
    plain = (1.0 / np.float32(attention.rope_theta) ** exponents).astype(np.float32)
    return RULES[kind](plain, scaling, attention, max_positions)


def context_of(model_map: ModelMap) -> int | None:
    """The positions that the model and its rotary tables have; None where the model names no limit."""
    limit = model_map.max_positions
    if limit is None:
        return None
    attentions = {attention for block in model_map.blocks for attention in block.attentions}
    turns = [rotation_of(each, max_positions=limit) for each in attentions if each.rope_theta]
    return min([limit, *(turn.max_positions for turn in turns if turn.max_positions)])


def _default(plain: NDArray[np.float32], *_: Any) -> Rotation:
    return Rotation(frequencies=plain)


def _linear(plain: NDArray[np.float32], scaling: Mapping[str, Any], *_: Any) -> Rotation:
    return Rotation(frequencies=plain / np.float32(scaling["factor"]))


def _llama3(plain: NDArray[np.float32], scaling: Mapping[str, Any], *_: Any) -> Rotation:
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / plain
    blend = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return Rotation(frequencies=((1 - blend) * plain / factor + blend * plain).astype(np.float32))


def _yarn(
    plain: NDArray[np.float32], scaling: Mapping[str, Any], attention: Attention, max_positions: int
) -> Rotation:
    assert attention.rope_theta and attention.rotary_dim
    length = scaling.get("original_max_position_embeddings") or max_positions
    factor = scaling["factor"]
    dim, base = attention.rotary_dim, attention.rope_theta

    def pair_that_turns(turns: float) -> float:
        return (dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = (
            magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
        )
    return Rotation(
        frequencies=(plain / factor * ramp + plain * (1 - ramp)).astype(np.float32), factor=attention_factor
    )


def _longrope(
    plain: NDArray[np.float32], scaling: Mapping[str, Any], attention: Attention, max_positions: int
) -> Rotation:
    """The table for short texts: the two tables of LongRoPE cannot share one cache of keys."""
    original = scaling.get("original_max_position_embeddings") or max_positions
    factor = scaling.get("factor") or max_positions / original
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = np.array(scaling["short_factor"], np.float32)
    return Rotation(frequencies=plain / short, factor=attention_factor, max_positions=int(original))


Rule = Callable[[NDArray[np.float32], Mapping[str, Any], Attention, int], Rotation]
RULES: dict[str, Rule] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
