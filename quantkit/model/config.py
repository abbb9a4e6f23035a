"""One normalised record of a model's config, independent of the transformers version.

Transformers 5 renamed facts that 4.57 wrote under other names (`rope_theta`, `rope_scaling` and
`rope_local_base_freq` became `rope_parameters`; `torch_dtype` became `dtype`), and each model family has
spellings of its own. `spelled_for` makes a config of either version readable by the other; `normalise` reads
the resulting object once, so that the rest of quantkit needs no raw config field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST_MAJOR_WITH_ROPE_PARAMETERS = 5
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position facts of one kind of layer."""

    theta: float
    rotary_fraction: float = 1.0
    scaling: tuple[tuple[str, Any], ...] = ()  # sorted pairs; empty for plain RoPE


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The facts of a configuration that quantkit reads."""

    model_type: str
    hidden_size: int | None
    vocab_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    max_positions: int | None
    is_encoder_decoder: bool
    windows: tuple[int | None, ...]  # one entry a layer
    ropes: tuple[Rope | None, ...]  # one entry a layer
    attention_softcap: float | None
    final_softcap: float | None
    query_scale: float | None  # None: 1 / sqrt(head_dim)
    num_experts: int | None  # of a mixture-of-experts FFN
    num_active_experts: int | None  # that run for each token
    raw: Mapping[str, Any]


def spelled_for(raw: Mapping[str, Any], transformers_major: int) -> dict[str, Any]:
    """The config in the spelling of this major version of transformers."""
    spelled = dict(raw)
    if transformers_major >= FIRST_MAJOR_WITH_ROPE_PARAMETERS:
        return spelled  # 5.x reads both
    if "dtype" in spelled:
        spelled.setdefault("torch_dtype", spelled.pop("dtype"))
    parameters = spelled.pop("rope_parameters", None)
    if not parameters:
        return spelled
    full = parameters.get(FULL, parameters)
    if SLIDING in parameters:
        spelled["rope_local_base_freq"] = parameters[SLIDING]["rope_theta"]
    scaling = {
        key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    spelled["rope_theta"] = full["rope_theta"]
    spelled["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if "partial_rotary_factor" in full:
        spelled["partial_rotary_factor"] = full["partial_rotary_factor"]
    if spelled.get("model_type") == "gpt_neox":  # the one family with names of its own for both
        spelled["rotary_emb_base"] = full["rope_theta"]
        spelled["rotary_pct"] = full.get("partial_rotary_factor", 1.0)
    return spelled


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _rope(parameters: Mapping[str, Any], fraction: float) -> Rope:
    kept = ("rope_theta", "partial_rotary_factor", "type")
    scaling = {key: value for key, value in parameters.items() if key not in kept and value is not None}
    if scaling.get("rope_type", "default") == "default":
        scaling = {}
    pairs = tuple(
        sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in scaling.items())
    )
    return Rope(
        theta=float(parameters["rope_theta"]),
        rotary_fraction=float(parameters.get("partial_rotary_factor") or fraction),
        scaling=pairs,
    )


def _read_ropes(config: Any) -> tuple[Rope | None, Rope | None]:
    """(rope of full-attention layers, rope of sliding ones), from the fields of either version."""
    fraction = float(_first(config, "rotary_pct", "partial_rotary_factor") or 1.0)
    parameters = getattr(config, "rope_parameters", None)
    if parameters:
        full = parameters.get(FULL, parameters)
        return _rope(full, fraction), _rope(parameters.get(SLIDING, full), fraction)
    theta = _first(config, "rope_theta", "rotary_emb_base")
    if theta is None:
        return None, None
    scaling = getattr(config, "rope_scaling", None) or {}
    scaling = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    original = getattr(config, "original_max_position_embeddings", None)
    if scaling.get("rope_type") == "longrope" and original:  # Phi-3 has it outside of rope_scaling
        scaling["original_max_position_embeddings"] = original
    full_rope = _rope({**scaling, "rope_theta": theta}, fraction)
    local_theta = getattr(config, "rope_local_base_freq", None)
    sliding_rope = (
        full_rope if local_theta is None else Rope(theta=float(local_theta), rotary_fraction=fraction)
    )
    return full_rope, sliding_rope


def _read_layer_kinds(config: Any, num_layers: int, window: int | None) -> tuple[str, ...]:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(kinds)
    uses_window = window is not None and getattr(config, "use_sliding_window", True)
    return (SLIDING if uses_window else FULL,) * num_layers


def normalise(config: Any) -> ModelConfig:
    """The facts of a transformers config object of either version."""
    num_layers = _first(config, "num_hidden_layers", "num_layers")
    num_heads = _first(config, "num_attention_heads", "num_heads")
    hidden_size = _first(config, "hidden_size", "d_model")
    head_dim = _first(config, "head_dim", "d_kv")
    if head_dim is None and hidden_size and num_heads:
        head_dim = hidden_size // num_heads
    window = getattr(config, "sliding_window", None)
    kinds = _read_layer_kinds(config, num_layers or 0, window)
    full_rope, sliding_rope = _read_ropes(config)
    query_scalar = getattr(config, "query_pre_attn_scalar", None)
    return ModelConfig(
        model_type=getattr(config, "model_type", "") or "",
        hidden_size=hidden_size,
        vocab_size=getattr(config, "vocab_size", None),
        num_heads=num_heads,
        num_kv_heads=_first(config, "num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_positions=_first(config, "max_position_embeddings", "n_positions", "max_seq_len"),
        is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        ropes=tuple(sliding_rope if kind == SLIDING else full_rope for kind in kinds),
        attention_softcap=getattr(config, "attn_logit_softcapping", None),
        final_softcap=getattr(config, "final_logit_softcapping", None),
        query_scale=None if query_scalar is None else float(query_scalar) ** -0.5,
        num_experts=_first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        num_active_experts=_first(config, "num_experts_per_tok", "num_experts_per_token", "moe_k"),
        raw=config.to_dict() if hasattr(config, "to_dict") else {},
    )
