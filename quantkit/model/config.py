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

from quantkit.errors import InputError

FIRST_MAJOR_WITH_ROPE_PARAMETERS = 5
FULL, SLIDING = "full_attention", "sliding_attention"
# Fields by which a config makes transformers fetch code or weights: kernels of the Hub, backbones, classes.
FETCHING_FIELDS = frozenset(
    {
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("auto_map", "custom_pipelines", "custom_generate", "use_kernels", "use_pretrained_backbone"),
    }
)
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The facts of a configuration that quantkit reads; those of attention are read from its modules."""

    model_type: str
    hidden_size: int | None
    vocab_size: int | None
    max_positions: int | None
    is_encoder_decoder: bool
    num_experts: int | None  # of a mixture-of-experts FFN
    num_active_experts: int | None  # that run for each token
    raw: Mapping[str, Any]


def without_fetching(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the fields by which it fetches code, in nested configs too."""
    return {
        key: without_fetching(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in FETCHING_FIELDS
    }


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the config says that its weights are stored; empty where it says nothing."""
    parts = [
        config,
        *(part for key in ("text_config", "llm_config") if isinstance(part := config.get(key), Mapping)),
    ]
    stated = (part.get(field) for part in parts for field in QUANTIZATION_FIELDS)
    return next((value for value in stated if isinstance(value, Mapping)), {})


def spelled_for(raw: Mapping[str, Any], transformers_major: int) -> dict[str, Any]:
    """The config in the spelling of this major version of transformers."""
    spelled = dict(raw)
    if transformers_major >= FIRST_MAJOR_WITH_ROPE_PARAMETERS:
        return spelled  # 5.x reads both
    if "dtype" in spelled:
        spelled.setdefault("torch_dtype", spelled.pop("dtype"))
    if spelled.get("model_type") == "modernbert" and spelled.get("rope_parameters"):
        return _modernbert_of_4(spelled)
    parameters = spelled.pop("rope_parameters", None)
    if not parameters:
        return spelled
    full = parameters.get(FULL, parameters)
    if SLIDING in parameters:
        if parameters[SLIDING].get("rope_type", "default") != "default":
            raise InputError(
                "scaled rotary positions of sliding layers",
                where="rope_parameters",
                allowed="rope_type default: transformers 4.57 computes nothing else there",
                next_step="install transformers 5",
            )
        spelled["rope_local_base_freq"] = parameters[SLIDING]["rope_theta"]
    scaling = {
        key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    spelled["rope_theta"] = full["rope_theta"]
    spelled["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    original = scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type") == "longrope" and original is not None:  # read outside of rope_scaling alone
        spelled["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    if spelled.get("model_type") == "phi3" and spelled["rope_scaling"]:  # checks for its old name
        scaling["type"] = scaling.pop("rope_type")
    if "partial_rotary_factor" in full:
        spelled["partial_rotary_factor"] = full["partial_rotary_factor"]
    if spelled.get("model_type") == "gpt_neox":  # the one family with names of its own for both
        spelled["rotary_emb_base"] = full["rope_theta"]
        spelled["rotary_pct"] = full.get("partial_rotary_factor", 1.0)
    return spelled


def _modernbert_of_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of transformers 4.57: a period of layers that see all tokens, and two thetas."""
    spelled = dict(config)
    parameters, kinds = spelled.pop("rope_parameters"), spelled.pop("layer_types", None)
    if kinds:
        period = next(
            (
                step
                for step in range(1, len(kinds) + 1)
                if all((kind == FULL) == (index % step == 0) for index, kind in enumerate(kinds))
            ),
            None,
        )
        if period is None:
            raise InputError(
                f"layers that see all tokens: {[index for index, kind in enumerate(kinds) if kind == FULL]}",
                where="layer_types",
                allowed="every n-th layer from the first: transformers 4.57 computes nothing else",
                next_step="install transformers 5",
            )
        spelled["global_attn_every_n_layers"] = period
    scalings = []
    for kind, field in ((FULL, "global_rope_theta"), (SLIDING, "local_rope_theta")):
        rope = dict(parameters.get(kind) or {})
        if "rope_theta" in rope:
            spelled[field] = rope.pop("rope_theta")
        scalings.append({} if rope.get("rope_type", "default") == "default" else rope)
    if scalings[0] != scalings[1]:
        raise InputError(
            "rotary positions of one kind of layer that are scaled, and of the other that are not",
            where="rope_parameters",
            allowed="one scaling: transformers 4.57 computes nothing else",
            next_step="install transformers 5",
        )
    if scalings[0]:
        spelled["rope_scaling"] = scalings[0]
    return spelled


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _max_positions(config: Any) -> int | None:
    value = _first(config, "max_position_embeddings", "n_positions", "max_seq_len")
    if value is not None and not isinstance(value, int):
        raise InputError(f"max_position_embeddings is {value!r}", where="config.json", allowed="an integer")
    return value


def normalise(config: Any) -> ModelConfig:
    """The facts of a transformers config object of either version."""
    return ModelConfig(
        model_type=getattr(config, "model_type", "") or "",
        hidden_size=_first(config, "hidden_size", "d_model"),
        vocab_size=getattr(config, "vocab_size", None),
        max_positions=_max_positions(config),
        is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        num_experts=_first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        num_active_experts=_first(config, "num_experts_per_tok", "num_experts_per_token", "moe_k"),
        raw=config.to_dict() if hasattr(config, "to_dict") else {},
    )
