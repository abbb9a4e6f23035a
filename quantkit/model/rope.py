"""Rotary positions: frequencies by which a model's own modules turn queries and keys.

Su et al. 2021 (https://arxiv.org/abs/2104.09864). Every rule that stretches them for longer contexts (linear,
Llama 3's, YaRN, LongRoPE) is the installed transformers': its versions resolve the fields of a config
differently, so the frequencies are read from a module and no rule is written again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.model.config import FULL, SLIDING
from quantkit.model.windows import own_window

FREQUENCIES = "inv_freq"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary positions of one kind of layer."""

    theta: float
    rotary_dim: int | None  # None: whole heads
    frequencies: tuple[float, ...] = ()  # of the pairs of features; empty: plain_frequencies
    factor: float = 1.0  # of cosines and sines
    limit: int | None = None  # positions from which on the frequencies are others; None: nowhere


def plain_frequencies(theta: float, rotary_dim: int) -> NDArray[np.float32]:
    """Powers are torch's, as in transformers: an ulp of a frequency grows with the position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return np.asarray((1.0 / theta**exponents).numpy(), np.float32)


def read_ropes(base: nn.Module, fixed_theta: float | None = None) -> Mapping[str, Rope]:
    """The rotary positions of each kind of layer."""
    rotary: Any = getattr(base, "rotary_emb", None)
    config: Any = base.config
    by_kind: Any = getattr(base, "rotary_embs", None)
    if fixed_theta:
        return {FULL: Rope(theta=fixed_theta, rotary_dim=config.rotary_dim)}
    if by_kind is not None:  # transformers 4.57: a module for each kind of layer, in OLMo 3
        return {kind: _rope(_remade(module), "") for kind, module in by_kind.items()}
    in_attention = [module for module in base.modules() if rotary is None and hasattr(module, "rotary_emb")]
    if in_attention:  # transformers 4.57: a module in each attention, in ModernBERT
        firsts = {own_window(module) is None: module for module in reversed(in_attention)}
        return {
            FULL if is_full else SLIDING: _rope(_remade(module.rotary_emb), "")
            for is_full, module in firsts.items()
        }
    if rotary is None:  # quantkit's own models
        return {FULL: Rope(theta=float(config.rope_theta), rotary_dim=None)}
    fresh = _remade(rotary)
    names = [
        name for name, _ in fresh.named_buffers() if name.endswith(FREQUENCIES) and "original" not in name
    ]
    if names == [FREQUENCIES]:
        ropes = dict.fromkeys((FULL, SLIDING), _rope(fresh, ""))
    else:  # transformers 5: one set of buffers for each kind of layer
        kinds = [name.removesuffix(f"_{FREQUENCIES}") for name in names]
        ropes = {kind: _rope(fresh, kind) for kind in kinds}
    local = getattr(base, "rotary_emb_local", None)  # transformers 4.57: a second module, in Gemma 3
    return ropes if local is None else {**ropes, SLIDING: _rope(_remade(local), "")}


def _remade(rotary: Any) -> Any:
    """The module made again from its config: meta devices hold no values, and long texts change them."""
    is_told_its_type = "rope_type" in inspect.signature(type(rotary).__init__).parameters
    with torch.device("cpu"):
        return type(rotary)(rotary.config, **({"rope_type": rotary.rope_type} if is_told_its_type else {}))


def _rope(rotary: Any, kind: str) -> Rope:
    config = rotary.config
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(kind, parameters)
    prefix = f"{kind}_" if kind else ""
    values = getattr(rotary, f"{prefix}{FREQUENCIES}").float().numpy()
    factor = float(getattr(rotary, f"{prefix}attention_scaling"))
    theta, rotary_dim = float(parameters.get("rope_theta") or config.rope_theta), 2 * len(values)
    is_plain = np.array_equal(values, plain_frequencies(theta, rotary_dim))
    rope_type = rotary.rope_type[kind] if kind else rotary.rope_type
    return Rope(
        theta=theta,
        rotary_dim=rotary_dim,
        frequencies=() if is_plain else tuple(values.tolist()),
        factor=factor,
        limit=_longest_short_text(config, parameters) if rope_type == "longrope" else None,
    )


def _longest_short_text(config: Any, parameters: Mapping[str, Any]) -> int:
    """Tokens up to which LongRoPE turns by its factors for short texts."""
    name = "original_max_position_embeddings"
    return int(parameters.get(name) or getattr(config, name, config.max_position_embeddings))
