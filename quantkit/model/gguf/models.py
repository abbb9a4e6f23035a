"""What a GGUF file of each architecture means to transformers: its config, and the weight behind each tensor.

llama.cpp stores queries and keys of Llama with the two halves of each head alternating, and the gains of
Gemma's norms with the 1 that its class adds. A key or a tensor without an entry here is refused by name,
since a fact that is left out gives another model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import reading
from quantkit.model.config import spelled_for
from quantkit.model.gguf.file import GgufFile, GgufTensor, block_of
from quantkit.model.weights.headers import Groups, StoredTensor

Floats = NDArray[np.float32]
BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)$")
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1, and of 3.2; no metadata states them
MULTIPLES = {"Q4_0": 4, "Q8_0": 8}  # bits of codes; a scale in half precision, then the codes
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
QUERY_KEY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
RATES = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
CHECKED = (  # keys that `_require_plain` reads
    *("vocab_size", "attention.value_length", "rope.dimension_count", "expert_count", "expert_used_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    "rope.scaling.finetuned",
)
TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufRow:
    """An architecture of GGUF."""

    model_types: tuple[str, ...]  # the first is taken where no config.json lies beside the file
    architecture: str
    tensors: Mapping[str, str]  # name in a block -> name in a block of the checkpoint
    facts: Mapping[str, Any]  # of the config, which no metadata states
    numbers: Mapping[str, str] = field(default_factory=dict)  # key -> field of the config, beside RATES
    alternates: bool = False  # rows of queries and keys: the halves of each head in turns
    norm_shift: float = 0.0  # of the stored gains
    has_own_scalar: bool = False  # Gemma 2 and 3 divide scores by a number of their own
    biases: tuple[str, ...] = ()  # tensors that may have one


SILU = {"hidden_act": "silu"}
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
ROWS: dict[str, GgufRow] = {
    "llama": GgufRow(
        model_types=("llama", "mistral"),
        architecture="LlamaForCausalLM",
        tensors={**PRE_NORMS, **ATTENTION, **FFN},
        facts=SILU,
        alternates=True,
    ),
    "qwen2": GgufRow(
        model_types=("qwen2",),
        architecture="Qwen2ForCausalLM",
        tensors={**PRE_NORMS, **ATTENTION, **FFN},
        facts={**SILU, "use_sliding_window": False},
        biases=("attn_q", "attn_k", "attn_v"),
    ),
    "qwen3": GgufRow(
        model_types=("qwen3",),
        architecture="Qwen3ForCausalLM",
        tensors={**PRE_NORMS, **ATTENTION, **QUERY_KEY_NORMS, **FFN},
        facts={**SILU, "use_sliding_window": False, "attention_bias": False},
    ),
    "gemma": GgufRow(
        model_types=("gemma",),
        architecture="GemmaForCausalLM",
        tensors={**PRE_NORMS, **ATTENTION, **FFN},
        facts={**GELU, "hidden_act": "gelu_pytorch_tanh"},
        norm_shift=1.0,
    ),
    "gemma2": GgufRow(
        model_types=("gemma2",),
        architecture="Gemma2ForCausalLM",
        tensors={**SANDWICH_NORMS, **ATTENTION, **FFN},
        facts=GELU,
        numbers={**WINDOW, **CAPS},
        norm_shift=1.0,
        has_own_scalar=True,
    ),
    "gemma3": GgufRow(
        model_types=("gemma3_text",),
        architecture="Gemma3ForCausalLM",
        tensors={**SANDWICH_NORMS, **ATTENTION, **QUERY_KEY_NORMS, **FFN},
        facts={**GELU, "rope_local_base_freq": 10_000.0, "attn_logit_softcapping": None},
        numbers={
            **WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        norm_shift=1.0,
        has_own_scalar=True,
    ),
}
BY_HEADS = {"gemma2": (46,), "gemma3": (62,)}  # blocks of the 27B, whose scores are divided by width / heads


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufWeight:
    """The weight of the checkpoint behind a tensor of the file."""

    tensor: GgufTensor
    heads: int = 0  # whose rows alternate; 0: rows are in order
    shift: float = 0.0  # subtracted from every value

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes

    @property
    def described(self) -> str:
        return self.tensor.kind

    def read(self, start: int, count: int) -> Floats:
        if len(self.tensor.shape) == 1:
            values: Floats = self.tensor.rows(0, 1)[0][start : start + count] - np.float32(self.shift)
            return values
        if not self.heads:
            return self.tensor.rows(start, count)
        stored = self.stored_rows(start, count)
        first, last = int(stored.min()), int(stored.max())
        rows: Floats = self.tensor.rows(first, last + 1 - first)[stored - first]
        return rows

    def groups(self, start: int, count: int) -> Groups | None:
        """Scales of the types that hold whole multiples of them; they are the first bytes of a block."""
        if self.tensor.kind not in MULTIPLES or len(self.tensor.shape) != 2:
            return None
        rows = self.stored_rows(start, count) if self.heads else np.arange(start, start + count)
        first, last = int(rows.min()), int(rows.max())
        raw = self.tensor.raw(first, last + 1 - first)[rows - first]
        block, size = block_of(self.tensor.kind)
        blocks = raw.reshape(count, -1, size)
        scales_OG = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)
        return Groups(bits=MULTIPLES[self.tensor.kind], size=block, scales_OG=scales_OG, zeros_OG=None)

    def stored_rows(self, start: int, count: int) -> NDArray[np.int64]:
        """Where the file has rows of the weight."""
        head, place = np.divmod(np.arange(start, start + count), self.tensor.shape[0] // self.heads)
        half, pair = np.divmod(place, self.tensor.shape[0] // self.heads // 2)
        return np.asarray(head * (self.tensor.shape[0] // self.heads) + 2 * pair + half, np.int64)


def row_of(file: GgufFile) -> tuple[str, GgufRow]:
    """(architecture, its row)."""
    name = file.metadata.get("general.architecture")
    if file.metadata.get("general.type", "model") != "model" or name not in ROWS:
        kind = file.metadata.get("general.type", "model")
        raise InputError(
            f"the file holds a {kind} of the architecture '{name}'",
            where=str(file.path),
            allowed=f"models of the architectures {', '.join(ROWS)}",
            next_step="start from the safetensors checkpoint that the file was made from",
        )
    return str(name), ROWS[str(name)]


def config_of(file: GgufFile, stated: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config of transformers; `stated` is that beside the file, which must not contradict it."""
    name, row = row_of(file)
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if "." in key}
    own = {key: value for key, value in own.items() if f"{name}.{key}" in file.metadata}
    fields = {**SIZES, **RATES, **row.numbers}
    strange = sorted(set(own) - {*fields, *CHECKED})
    if strange:
        raise _refused(file, f"it states '{name}.{strange[0]}', which is not read")
    config: dict[str, Any] = {
        "model_type": row.model_types[0],
        "architectures": [row.architecture],
        "rope_theta": 10_000.0,
        **row.facts,
    }
    for key, field_name in fields.items():
        if key in own:
            config[field_name] = _number(file, f"{name}.{key}", own[key], is_whole=key in {*SIZES, *WINDOW})
    for key, field_name in TOKENS.items():
        if key in file.metadata:
            config[field_name] = _number(file, key, file.metadata[key], is_whole=True)
    _complete(file, config)
    if row.has_own_scalar:
        by_heads = config["num_hidden_layers"] in BY_HEADS[name]
        width = config["hidden_size"] // config["num_attention_heads"] if by_heads else config["head_dim"]
        config["query_pre_attn_scalar"] = width
    if any(match[2] in ATTENTION and match[3] == "bias" for match in map(BLOCK.match, file.tensors) if match):
        config["attention_bias"] = True
    if name == "llama" and "mlp_bias" not in config:
        config["mlp_bias"] = False
    _require_plain(file, own, config)
    config = _with_scaling(file, own, config)
    return _agreed(file, row, config, spelled_for(stated, 4)) if stated else config


def _refused(file: GgufFile, fault: str, next_step: str = "") -> InputError:
    remedy = "start from the safetensors checkpoint that the file was made from"
    return InputError(fault, where=str(file.path), next_step=next_step or remedy)


def _number(file: GgufFile, key: str, value: Any, *, is_whole: bool) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        shown = f"{type(value).__name__} {value!r}"[:60]
        raise _refused(file, f"'{key}' is {shown}, and not one {'whole ' if is_whole else ''}number")
    return value if is_whole else float(str(np.float32(value)))  # 1e-05 and not 9.999999747378752e-06


def _complete(file: GgufFile, config: dict[str, Any]) -> None:
    """Fill in what llama.cpp assumes where the file does not say it."""
    missing = [key for key, name in SIZES.items() if name not in config]
    needed = [key for key in missing if key not in ("attention.head_count_kv", "attention.key_length")]
    if needed or "token_embd.weight" not in file.tensors or "rms_norm_eps" not in config:
        lacking = needed[0] if needed else "token_embd.weight and attention.layer_norm_rms_epsilon"
        raise _refused(file, f"it lacks {lacking}", "copy or download the file again")
    if min(config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]) < 1:
        raise _refused(file, "a model without heads, features or blocks", "copy or download the file again")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors


def _require_plain(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse experts, values of another width than keys, and heads that are rotated in part."""
    widths = {
        key: own.get(key, config["head_dim"]) for key in ("attention.value_length", "rope.dimension_count")
    }
    other = next((key for key, width in widths.items() if width != config["head_dim"]), None)
    if other:
        raise _refused(
            file, f"'{other}' is {widths[other]}, and its heads have {config['head_dim']} features"
        )
    if own.get("expert_count") or own.get("expert_used_count"):
        raise _refused(file, "a mixture of experts, which is not read from GGUF")


def _with_scaling(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The config with the scaling of rotary positions that metadata state."""
    kind = own.get("rope.scaling.type", "none")
    if kind == "linear":
        factor = _number(file, "rope.scaling.factor", own.get("rope.scaling.factor"), is_whole=False)
        return {**config, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "none":
        raise _refused(file, f"rotary positions scaled by '{kind}', which is not read from GGUF")
    return config


def _agreed(file: GgufFile, row: GgufRow, config: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """The stated config, completed; refused where it contradicts the file."""
    if stated.get("model_type") not in row.model_types:
        raise _refused(
            file,
            f"config.json beside it is of the model type '{stated.get('model_type')}'",
            f"allowed are {', '.join(row.model_types)}; remove config.json, or take that of this model",
        )
    for key, value in config.items():
        is_free = key in ("model_type", "architectures", *TOKENS.values())
        if not is_free and key in stated and stated[key] != value and not _is_near(stated[key], value):
            raise _refused(
                file,
                f"config.json beside it says {key} = {stated[key]!r}, and the file says {value!r}",
                "remove config.json, or take that of this model",
            )
    return {**config, **stated}


def _is_near(stated: Any, value: Any) -> bool:
    numbers = isinstance(stated, (int, float)) and isinstance(value, (int, float))
    return numbers and abs(stated - value) <= 1e-6 * abs(value)


def with_rope_factors(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The config with Llama 3's rule where the file's divisors of frequencies are those of the rule."""
    if ROPE_FACTORS not in file.tensors:
        return config
    tensor = file.tensors[ROPE_FACTORS]
    factors = tensor.rows(0, 1)[0] if len(tensor.shape) == 1 else np.empty(0, np.float32)
    stated = config.get("rope_scaling")
    rules = [stated] if stated else [_llama3(factor) for factor in LLAMA3_FACTORS]
    for rule in rules:
        with reading(file.path, "its config.json states a rule of rotary positions that is not one"):
            divisors = _divisors(rule, config["head_dim"], config["rope_theta"])
        if (
            divisors is not None
            and divisors.shape == factors.shape
            and np.allclose(divisors, factors, rtol=1e-5, atol=0)
        ):
            return {**config, "rope_scaling": rule}
    raise _refused(
        file,
        f"'{ROPE_FACTORS}' changes the rotary frequencies by a rule that "
        f"{'is not the one of config.json' if stated else 'no metadata state'}",
        "put the config.json of the original beside the file",
    )


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _divisors(rule: Mapping[str, Any], head_dim: int, theta: float) -> NDArray[np.float64] | None:
    """The divisors of the frequencies under Llama 3's rule; None under another."""
    if rule.get("rope_type", rule.get("type")) != "llama3":
        return None
    low, high = float(rule["low_freq_factor"]), float(rule["high_freq_factor"])
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = float(rule["original_max_position_embeddings"]) / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / float(rule["factor"]) + smooth), np.float64)


def stored_tensors(file: GgufFile, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The weights of the checkpoint that the file holds, by their names there."""
    _, row = row_of(file)
    stored = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:  # config_of has read them
            continue
        own, is_norm, heads = _checkpoint_name(file, row, name), name.endswith("norm.weight"), 0
        if row.alternates and ".attn_q." in name:
            heads = config["num_attention_heads"]
        elif row.alternates and ".attn_k." in name:
            heads = config["num_key_value_heads"]
        if heads and (len(tensor.shape) != 2 or tensor.shape[0] % (2 * heads)):
            raise _refused(file, f"'{name}' of {list(tensor.shape)} does not split into {heads} heads")
        stored[own] = StoredTensor(
            name=own,
            file=tensor.file,
            dtype=tensor.kind,
            shape=tensor.shape,
            offset=tensor.offset,
            packed=GgufWeight(tensor=tensor, heads=heads, shift=row.norm_shift if is_norm else 0.0),
        )
    return stored


def _checkpoint_name(file: GgufFile, row: GgufRow, name: str) -> str:
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = BLOCK.match(name)
    if match and match[2] in row.tensors and (match[3] == "weight" or match[2] in row.biases):
        return f"model.layers.{int(match[1])}.{row.tensors[match[2]]}.{match[3]}"
    raise _refused(file, f"it holds the tensor '{name}', which this architecture has no place for")
