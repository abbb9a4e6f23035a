"""Published configs, made tiny: sizes shrink; flags and ratios that decide the computation stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FOLDER = Path(__file__).parent / "published"
FILES = ("decoders", "encoders", "encoder_decoders")
VOCABULARY, CONTEXT, WINDOW = 97, 48, 8
ORIGINAL_CONTEXT = 16  # of a rope whose context was extended

LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
HEADS = ("n_head", "num_attention_heads", "num_heads", "attention_heads", "n_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("n_embd", "n_embed", "hidden_size", "d_model", "dim")
HEAD_DIM = ("head_dim", "d_kv")
WIDTHS = (
    *("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim", "block_ff_dim"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("word_embed_proj_dim", "embedding_size", "lru_width", "input_embedding_size", "output_embedding_size"),
    *("intra_bottleneck_size", "true_hidden_size", "time_step_rank", "pooler_fc_size", "projection_dim"),
)
POSITIONS = ("n_positions", "n_ctx", "max_position_embeddings", "max_seq_len", "max_target_positions")
WINDOWS = ("sliding_window", "attention_window_size", "window_size", "local_attention")
PER_LAYER = ("layer_types", "no_rope_layers", "attention_layers", "attention_window", "block_types")
PERIODS = ("_sliding_window_pattern", "sliding_window_pattern", "global_attn_every_n_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LATENT_DIMS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OTHER = {"image_size": 32, "max_source_positions": 24, "num_mel_bins": 16, "num_experts_per_tok": 3}


@cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """Hub name -> config."""
    return {
        name: config
        for file in FILES
        for name, config in yaml.safe_load((FOLDER / f"{file}.yaml").read_text(encoding="utf-8")).items()
    }


def tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with small sizes."""
    config = dict(config)
    for part in ("text_config", "vision_config"):
        if part in config:
            config[part] = tiny(config[part])
    if _first(config, HIDDEN) is None:  # two towers: sizes stand in their own configs
        return config
    num_layers = _num_layers(config)
    heads = _first(config, HEADS) or config.get("encoder_attention_heads", 4)
    hidden = _first(config, HIDDEN)
    key_value = _first(config, KEY_VALUE_HEADS) or heads
    head_dim = _first(config, HEAD_DIM) or hidden // heads
    few_key_value = min(key_value, 2 if key_value < heads else 4 if heads % 2 == 0 else 3)
    few_heads = few_key_value * (heads // key_value)
    small_head = head_dim // 4 if head_dim % 8 == 0 else head_dim // 2
    if hidden == heads * head_dim:
        small_hidden = few_heads * small_head
    else:
        small_hidden = max(32, 16 * round(hidden / heads / head_dim * few_heads * small_head / 16))
    context = CONTEXT + _offset(_first(config, POSITIONS) or CONTEXT)
    sizes = {
        **dict.fromkeys((*LAYERS, "num_decoder_layers"), num_layers),
        **dict.fromkeys((*HEADS, "encoder_attention_heads", "decoder_attention_heads"), few_heads),
        **dict.fromkeys(KEY_VALUE_HEADS, few_key_value),
        **dict.fromkeys(HIDDEN, small_hidden),
        **dict.fromkeys(HEAD_DIM, small_head),
        **dict.fromkeys(POSITIONS, context),
        "vocab_size": min(VOCABULARY, config.get("vocab_size", VOCABULARY)),
        **OTHER,
    }
    positions = _first(config, POSITIONS) or 0
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if value is None or isinstance(value, bool):
            changed[key] = value
        elif key in sizes:
            changed[key] = min(value, sizes[key]) if key in OTHER else sizes[key]
        elif key in WIDTHS:
            changed[key] = max(8, 8 * round(value / hidden * small_hidden / 8))
        elif key in WINDOWS:
            changed[key] = WINDOW + value % 2 if value < positions else 2 * context
        elif key in EXPERTS:
            changed[key] = min(value, 8)
        elif key in LATENT_DIMS:
            changed[key] = value // 8
        elif key in PER_LAYER:
            changed[key] = [WINDOW if key == "attention_window" else entry for entry in value[:num_layers]]
        elif key == "attention_types":
            changed[key] = [[value[0][0], num_layers // len(value[0][0])]]
        elif key == "rotary_dim":
            changed[key] = value // 4
        elif key == "original_max_position_embeddings":
            changed[key] = ORIGINAL_CONTEXT if value < positions else context
        elif key == "rope_scaling":
            rotated = int(small_head * config.get("partial_rotary_factor", 1))
            changed[key] = _tiny_rope(value, rotated // 2, context, positions)
        elif key.endswith("_token_id"):
            changed[key] = _tiny_id(key, value, sizes["vocab_size"])
        elif key == "bad_words_ids":
            changed[key] = [[sizes["vocab_size"] - 1]]
        else:
            changed[key] = value
    return changed


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key)), None)


def _num_layers(config: Mapping[str, Any]) -> int:
    """Two layers, or one more than the period in which layers differ."""
    period = max((config[key] for key in PERIODS if config.get(key)), default=1)
    for key in PER_LAYER:
        kinds = config.get(key) or [0]
        period = max(period, next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0) + 1)
    num_layers = _first(config, LAYERS) or 2
    return min(int(num_layers), max(2, period + (period > 1 and "attention_types" not in config)))


def _offset(positions: int) -> int:
    """Rows of a position table before the first position: 2 of 514."""
    power = 1 << (positions.bit_length() - 1)
    return positions - power if positions - power <= 2 else 0


def _tiny_rope(scaling: Mapping[str, Any], pairs: int, context: int, positions: int) -> dict[str, Any]:
    small = dict(scaling)
    for key in ("long_factor", "short_factor"):
        if key in small:
            small[key] = small[key][:: len(small[key]) // pairs][:pairs]
    if "original_max_position_embeddings" in small:
        extended = small["original_max_position_embeddings"] < positions
        small["original_max_position_embeddings"] = ORIGINAL_CONTEXT if extended else context
    return small


def _tiny_id(key: str, value: Any, vocabulary: int) -> Any:
    if isinstance(value, list):
        return sorted({_tiny_id(key, entry, vocabulary) for entry in value})
    last = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    return value if value < vocabulary else vocabulary - last.get(key, 4)


def write_tiny(name: str, folder: Path) -> Any:
    """Write a checkpoint folder with random weights; the model, or None where transformers has no class."""
    config = tiny(published()[name])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if config["model_type"] not in CONFIG_MAPPING:
        return None
    options = {key: value for key, value in config.items() if key != "model_type"}
    known = transformers.AutoConfig.for_model(config["model_type"], **options)
    name = config["architectures"][0]
    fallback = transformers.AutoModelForCausalLM if name.endswith("ForCausalLM") else transformers.AutoModel
    cls = getattr(transformers, name, None) or type(fallback.from_config(known))
    known._attn_implementation = "eager"  # the fused kernel of transformers 4.57 leaves out Gemma 2's cap
    torch.manual_seed(0)
    try:
        model = cls(known).eval()
    except AttributeError:  # initialisers of transformers 4.57 fail on norms without parameters
        with mock.patch.object(transformers.PreTrainedModel, "initialize_weights", lambda self: None):
            model = cls(known).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # the class computes the rest
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model
