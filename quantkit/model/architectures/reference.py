"""A small decoder with configurable parts: FFN, activation, norm, norm placement, biases.

Published families each fix one combination; this model has all of them in one class, so that maps and exports
can be tested on every pair of choices. It is a complete causal language model (rotary positions,
grouped-query attention, a transformers KV cache, save and load). Another model may pass its own function that
makes an FFN.

Gated FFNs: https://arxiv.org/abs/2002.05202. Norm placement: https://arxiv.org/abs/2002.04745. Rotary
positions: https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F  # noqa: N812 - as torch spells it
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from quantkit.errors import InputError

# Letters: B batch, T tokens, S keys, N heads, D head size, H hidden size.
ACTIVATIONS = ("relu", "gelu", "gelu_pytorch_tanh", "silu")
NORM_KINDS = ("layer_norm", "rms_norm")
PLACEMENTS = ("pre", "post", "sandwich")
NO_FFN = "none"  # a block of attention alone


class ReferenceConfig(PretrainedConfig):
    """A gated FFN with silu is SwiGLU, with gelu GeGLU, with relu ReGLU."""

    model_type = "quantkit_reference"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        ffn_kind: str = "gated",
        hidden_act: str = "silu",
        norm_kind: str = "rms_norm",
        norm_placement: str = "pre",
        uses_bias: bool = False,
        norm_epsilon: float = 1e-5,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 512,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.ffn_kind = ffn_kind
        self.hidden_act = hidden_act
        self.norm_kind = norm_kind
        self.norm_placement = norm_placement
        self.uses_bias = uses_bias
        self.norm_epsilon = norm_epsilon
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        check(self)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


def check(config: ReferenceConfig) -> None:
    """Refuse an invalid combination of fields."""
    allowed: dict[str, tuple[str, ...]] = {
        "ffn_kind": (*FFNS, NO_FFN),
        "hidden_act": ACTIVATIONS,
        "norm_kind": NORM_KINDS,
        "norm_placement": PLACEMENTS,
    }
    for name, values in allowed.items():
        value = getattr(config, name)
        if value not in values:
            refuse(f"{name} is {value!r}", ", ".join(values))
    positive = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    for name in (*positive, "num_key_value_heads", "max_position_embeddings"):
        if getattr(config, name) < 1:
            refuse(f"{name} is {getattr(config, name)}", "1 or more")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if config.hidden_size % heads or (config.hidden_size // heads) % 2:
        refuse(
            f"hidden_size {config.hidden_size} over {heads} heads is no even head size",
            "a hidden_size that is a multiple of twice num_attention_heads",
        )
    if heads % groups:
        refuse(f"{heads} heads do not share {groups} heads of keys", "a divisor of num_attention_heads")


def refuse(fault: str, allowed: str, *, where: str = "ReferenceConfig") -> NoReturn:
    raise InputError(fault, where=where, allowed=allowed, next_step="correct config.json")


class StandardFfn(nn.Module):
    """down(activation(up(x))): https://arxiv.org/abs/1706.03762."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.uses_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.uses_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_BTH: Tensor) -> Tensor:
        y_BTH: Tensor = self.down_proj(self.act_fn(self.up_proj(x_BTH)))
        return y_BTH


class GatedFfn(nn.Module):
    """down(activation(gate(x)) * up(x)): https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.uses_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.uses_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.uses_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_BTH: Tensor) -> Tensor:
        y_BTH: Tensor = self.down_proj(self.act_fn(self.gate_proj(x_BTH)) * self.up_proj(x_BTH))
        return y_BTH


MakeFfn = Callable[[Any], nn.Module | None]
FFNS: dict[str, Callable[[Any], nn.Module]] = {"standard": StandardFfn, "gated": GatedFfn}


def make_ffn(config: ReferenceConfig) -> nn.Module | None:
    """None for a block of attention alone."""
    return None if config.ffn_kind == NO_FFN else FFNS[config.ffn_kind](config)


class RmsNorm(nn.Module):
    """RMSNorm in elementary operations, which every exporter supports."""

    def __init__(self, features: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight + self.offset if self.offset else self.weight
        scaled: Tensor = gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        return scaled


def make_norm(config: ReferenceConfig) -> nn.Module:
    if config.norm_kind == "rms_norm":
        return RmsNorm(config.hidden_size, config.norm_epsilon)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, bias=config.uses_bias)


class ReferenceAttention(nn.Module):
    """Causal grouped-query attention with rotary positions, in elementary operations."""

    def __init__(self, config: ReferenceConfig, index: int) -> None:
        """`index` is the block's entry in the KV cache."""
        super().__init__()
        self.index = index
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        width, kv_width = config.hidden_size, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=config.uses_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.uses_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.uses_bias)
        self.o_proj = nn.Linear(width, width, bias=config.uses_bias)

    def forward(
        self,
        x_BTH: Tensor,
        cosine_BTD: Tensor,
        sine_BTD: Tensor,
        hidden_BTS: Tensor,
        cache: Any = None,
    ) -> Tensor:
        """`hidden_BTS` is true where a key is masked."""
        query, key, value = (
            self.heads(projection(x_BTH)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (turn(x, cosine_BTD, sine_BTD) for x in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        return self.attend(query, key, value, hidden_BTS)

    def heads(self, x_BTH: Tensor) -> Tensor:
        return x_BTH.view(*x_BTH.shape[:2], -1, self.head_dim).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, hidden_BTS: Tensor | None) -> Tensor:
        key, value = (x.repeat_interleave(self.num_groups, dim=1) for x in (key, value))
        scores_BNTS = torch.matmul(query, key.transpose(2, 3)) * self.head_dim**-0.5
        if hidden_BTS is not None:
            lowest = torch.finfo(scores_BNTS.dtype).min
            scores_BNTS = scores_BNTS.masked_fill(hidden_BTS[:, None], lowest)
        attended = torch.matmul(torch.softmax(scores_BNTS, dim=-1), value)
        y_BTH: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return y_BTH


def turn(x_BNTD: Tensor, cosine_BTD: Tensor, sine_BTD: Tensor) -> Tensor:
    """Rotary embedding; feature i is paired with feature i + D/2."""
    first, second = x_BNTD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BNTD * cosine_BTD[:, None] + turned * sine_BTD[:, None]


def waves(config: Any, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cosines, sines) [B, T, D], computed each time: there is no buffer to move to a device."""
    head_dim = config.hidden_size // config.num_attention_heads
    steps = torch.arange(0, head_dim, 2, device=positions_BT.device, dtype=torch.float32)
    half = positions_BT[..., None].float() / config.rope_theta ** (steps / head_dim)
    angles = torch.cat((half, half), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def causal(num_cached: int, num_new: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(positions of the new tokens [1, T], mask of the later keys [1, T, S])."""
    keys_S = torch.arange(num_cached + num_new, device=device)
    steps_T = torch.arange(num_cached, num_cached + num_new, device=device)
    return steps_T[None], (keys_S[None] > steps_T[:, None])[None]


class ReferenceBlock(nn.Module):
    """Attention and FFN on the residual stream; the config decides the norm placement."""

    def __init__(self, config: ReferenceConfig, index: int, make_ffn: MakeFfn = make_ffn) -> None:
        """`make_ffn` returns a module [B, T, H] -> [B, T, H], or None for a block without FFN."""
        super().__init__()
        self.is_post = config.norm_placement == "post"
        is_sandwich = config.norm_placement == "sandwich"
        self.self_attn = ReferenceAttention(config, index)
        self.mlp = make_ffn(config)
        self.attention_norm = make_norm(config)
        self.attention_output_norm = make_norm(config) if is_sandwich else nn.Identity()
        if self.mlp is not None:
            self.ffn_norm = make_norm(config)
            self.ffn_output_norm = make_norm(config) if is_sandwich else nn.Identity()

    def forward(
        self,
        x_BTH: Tensor,
        cosine_BTD: Tensor,
        sine_BTD: Tensor,
        hidden_BTS: Tensor,
        cache: Any = None,
    ) -> Tensor:
        attention = (cosine_BTD, sine_BTD, hidden_BTS, cache)
        if self.is_post:
            x_BTH = self.attention_norm(x_BTH + self.self_attn(x_BTH, *attention))
            return x_BTH if self.mlp is None else self.ffn_norm(x_BTH + self.mlp(x_BTH))
        made_BTH = self.self_attn(self.attention_norm(x_BTH), *attention)
        x_BTH = x_BTH + self.attention_output_norm(made_BTH)
        if self.mlp is None:
            return x_BTH
        y_BTH: Tensor = x_BTH + self.ffn_output_norm(self.mlp(self.ffn_norm(x_BTH)))
        return y_BTH


class ReferencePreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = ReferenceConfig
    base_model_prefix = "model"
    _no_split_modules = ["ReferenceBlock"]  # noqa: RUF012 - as transformers types it


class ReferenceModel(ReferencePreTrainedModel):  # type: ignore[no-untyped-call]
    """Embedding, blocks, and a final norm unless norms are post-norms."""

    def __init__(self, config: ReferenceConfig, make_ffn: MakeFfn = make_ffn) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            ReferenceBlock(config, index, make_ffn) for index in range(config.num_hidden_layers)
        )
        self.norm = None if config.norm_placement == "post" else make_norm(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states; the KV cache is updated in place."""
        x_BTH = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        num_cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        steps_1T, hidden_BTS = causal(num_cached, x_BTH.shape[1], x_BTH.device)
        turned = waves(self.config, steps_1T if position_ids is None else position_ids, x_BTH.dtype)
        if attention_mask is not None:
            hidden_BTS = hidden_BTS | (attention_mask[:, None, : hidden_BTS.shape[-1]] == 0)
        for block in self.layers:
            x_BTH = block(x_BTH, *turned, hidden_BTS, past_key_values)
        return x_BTH if self.norm is None else self.norm(x_BTH)


class ReferenceForCausalLM(ReferencePreTrainedModel, GenerationMixin):  # type: ignore[misc, no-untyped-call]
    _tied_weights_keys: Any = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ReferenceConfig, make_ffn: MakeFfn = make_ffn) -> None:
        super().__init__(config)
        self.model = ReferenceModel(config, make_ffn)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, the KV cache, and the mean cross entropy of `labels`."""
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        x_BTH = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x_BTH[:, kept])
        loss: Any = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


AutoConfig.register(ReferenceConfig.model_type, ReferenceConfig)
AutoModelForCausalLM.register(ReferenceConfig, ReferenceForCausalLM)
