"""One wide FFN: an encoder whose layers all share one FFN, and a decoder that has none.

Feed-forward layers are where most parameters of a transformer are, and much of what they hold is redundant:
one FFN run at every depth of the encoder, and widened by the saved parameters, is as accurate as one FFN a
layer. https://arxiv.org/abs/2309.01826. `encoder_ffn="own"` and `decoder_ffn="own"` give the ordinary model,
so that bytes and operations of the two can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch spells it
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from quantkit.model.architectures.reference import (
    ReferenceAttention,
    ReferenceConfig,
    causal,
    make_ffn,
    make_norm,
    refuse,
    waves,
)

# Letters as in reference.py; S is also the length of the encoder input.
ENCODER_FFNS = ("shared", "own")
DECODER_FFNS = ("none", "own")


class OneWideConfig(ReferenceConfig):
    """A reference config with two depths; norms stand before sublayers."""

    model_type = "quantkit_one_wide"

    def __init__(
        self,
        num_hidden_layers: int = 2,
        num_decoder_layers: int | None = None,
        encoder_ffn: str = "shared",
        decoder_ffn: str = "none",
        decoder_start_token_id: int = 0,
        **kwargs: Any,
    ) -> None:
        """`num_hidden_layers` is the encoder's depth, and the default of the decoder's."""
        self.num_decoder_layers = num_hidden_layers if num_decoder_layers is None else num_decoder_layers
        self.encoder_ffn = encoder_ffn
        self.decoder_ffn = decoder_ffn
        kwargs["is_encoder_decoder"] = True
        super().__init__(
            num_hidden_layers=num_hidden_layers, decoder_start_token_id=decoder_start_token_id, **kwargs
        )
        for name, allowed in (("encoder_ffn", ENCODER_FFNS), ("decoder_ffn", DECODER_FFNS)):
            if getattr(self, name) not in allowed:
                refuse(f"{name} is {getattr(self, name)!r}", ", ".join(allowed), where="OneWideConfig")
        if self.norm_placement != "pre":
            refuse(f"norm_placement is {self.norm_placement!r}", "pre", where="OneWideConfig")
        if self.ffn_kind == "none":
            refuse("ffn_kind is 'none'", "standard, gated", where="OneWideConfig")


class CrossAttention(ReferenceAttention):
    """Attention over the encoder's output: keys and values are computed once and have no positions."""

    def forward(  # type: ignore[override]
        self,
        x_BTH: Tensor,
        encoded_BSH: Tensor,
        hidden_B1S: Tensor | None,
        cache: Any,
    ) -> Tensor:
        """`cache` is an `EncoderDecoderCache` or None."""
        query = self.heads(self.q_proj(x_BTH))
        if cache is not None and cache.is_updated.get(self.index):
            layer = cache.cross_attention_cache.layers[self.index]
            key, value = layer.keys, layer.values
        else:
            key, value = self.heads(self.k_proj(encoded_BSH)), self.heads(self.v_proj(encoded_BSH))
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.index)
                cache.is_updated[self.index] = True
        return self.attend(query, key, value, hidden_B1S)


class EncoderLayer(nn.Module):
    """Bidirectional attention, then the FFN, which all layers may share."""

    def __init__(self, config: OneWideConfig, index: int, ffn: nn.Module | None) -> None:
        """`ffn` is the shared FFN; None gives the layer its own."""
        super().__init__()
        self.self_attn = ReferenceAttention(config, index)
        self.mlp = make_ffn(config) if ffn is None else ffn
        self.attention_norm = make_norm(config)
        self.ffn_norm = make_norm(config)

    def forward(self, x_BTH: Tensor, cosine_BTD: Tensor, sine_BTD: Tensor, hidden_BTS: Tensor) -> Tensor:
        x_BTH = x_BTH + self.self_attn(self.attention_norm(x_BTH), cosine_BTD, sine_BTD, hidden_BTS)
        assert self.mlp is not None
        y_BTH: Tensor = x_BTH + self.mlp(self.ffn_norm(x_BTH))
        return y_BTH


class DecoderLayer(nn.Module):
    """Causal attention, then attention over the encoder; an FFN only in the ordinary model."""

    def __init__(self, config: OneWideConfig, index: int) -> None:
        super().__init__()
        self.self_attn = ReferenceAttention(config, index)
        self.cross_attn = CrossAttention(config, index)
        self.mlp = make_ffn(config) if config.decoder_ffn == "own" else None
        self.attention_norm = make_norm(config)
        self.cross_norm = make_norm(config)
        if self.mlp is not None:
            self.ffn_norm = make_norm(config)

    def forward(
        self,
        x_BTH: Tensor,
        cosine_BTD: Tensor,
        sine_BTD: Tensor,
        hidden_BTS: Tensor,
        encoded_BSH: Tensor,
        unseen_B1S: Tensor | None,
        cache: Any = None,
    ) -> Tensor:
        own = cache.self_attention_cache if cache is not None else None
        x_BTH = x_BTH + self.self_attn(self.attention_norm(x_BTH), cosine_BTD, sine_BTD, hidden_BTS, own)
        x_BTH = x_BTH + self.cross_attn(self.cross_norm(x_BTH), encoded_BSH, unseen_B1S, cache)
        return x_BTH if self.mlp is None else x_BTH + self.mlp(self.ffn_norm(x_BTH))


class OneWidePreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = OneWideConfig
    base_model_prefix = "model"


class OneWideEncoder(OneWidePreTrainedModel):  # type: ignore[no-untyped-call]
    """Bidirectional encoder."""

    def __init__(self, config: OneWideConfig, embed_tokens: nn.Module) -> None:
        super().__init__(config)
        self.embed_tokens = embed_tokens
        shared = make_ffn(config) if config.encoder_ffn == "shared" else None
        self.layers = nn.ModuleList(
            EncoderLayer(config, index, shared) for index in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        x_BTH = self.embed_tokens(input_ids)
        positions = torch.arange(x_BTH.shape[1], device=x_BTH.device)[None]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden_BTS = (mask == 0)[:, None]
        turned = waves(self.config, positions, x_BTH.dtype)
        for layer in self.layers:
            x_BTH = layer(x_BTH, *turned, hidden_BTS)
        return BaseModelOutput(last_hidden_state=self.norm(x_BTH))


class OneWideDecoder(OneWidePreTrainedModel):  # type: ignore[no-untyped-call]
    """Causal decoder with cross attention."""

    def __init__(self, config: OneWideConfig, embed_tokens: nn.Module) -> None:
        super().__init__(config)
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_decoder_layers))
        self.norm = make_norm(config)

    def forward(
        self,
        input_ids: Tensor,
        encoded_BSH: Tensor,
        encoder_mask: Tensor | None,
        cache: Any = None,
    ) -> Tensor:
        """The last hidden states; the KV cache is updated in place."""
        x_BTH = self.embed_tokens(input_ids)
        num_cached = cache.self_attention_cache.get_seq_length() if cache is not None else 0
        steps_1T, hidden_BTS = causal(num_cached, x_BTH.shape[1], x_BTH.device)
        unseen_B1S = None if encoder_mask is None else (encoder_mask == 0)[:, None]
        turned = waves(self.config, steps_1T, x_BTH.dtype)
        for layer in self.layers:
            x_BTH = layer(x_BTH, *turned, hidden_BTS, encoded_BSH, unseen_B1S, cache)
        y_BTH: Tensor = self.norm(x_BTH)
        return y_BTH


class OneWideModel(OneWidePreTrainedModel):  # type: ignore[no-untyped-call]
    """Encoder and decoder on one token table."""

    def __init__(self, config: OneWideConfig) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = OneWideEncoder(config, self.shared)
        self.decoder = OneWideDecoder(config, self.shared)

    def get_input_embeddings(self) -> nn.Module:
        table: nn.Module = self.shared
        return table

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.encoder


class OneWideForConditionalGeneration(OneWidePreTrainedModel, GenerationMixin):  # type: ignore[misc, no-untyped-call]
    _tied_weights_keys: Any = {}  # noqa: RUF012

    def __init__(self, config: OneWideConfig) -> None:
        """`_tied_weights_keys` lists the other names of each shared tensor, which is stored once."""
        super().__init__(config)
        self.model = OneWideModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        table = "model.shared.weight"
        tied = {f"model.{part}.embed_tokens.weight": table for part in ("encoder", "decoder")}
        if config.tie_word_embeddings:
            tied["lm_head.weight"] = table
        if config.encoder_ffn == "shared":
            names = [name for name, _ in self.model.encoder.layers[0].mlp.named_parameters()]
            first = "model.encoder.layers.0.mlp."
            for index in range(1, config.num_hidden_layers):
                tied |= {f"model.encoder.layers.{index}.mlp.{name}": first + name for name in names}
        self._tied_weights_keys = tied
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        table: nn.Module = self.model.shared
        return table

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.lm_head
        return head

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        encoder: nn.Module = self.model.encoder
        return encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of the decoder, and the mean cross entropy of `labels`."""
        if encoder_outputs is None:
            encoder_outputs = self.model.encoder(input_ids, attention_mask)
        if decoder_input_ids is None and labels is not None:
            start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id or 0)
            decoder_input_ids = torch.cat((start, labels[:, :-1].clamp(min=0)), dim=1)
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        encoded = encoder_outputs[0]
        x_BTH = self.model.decoder(decoder_input_ids, encoded, attention_mask, past_key_values)
        logits = self.lm_head(x_BTH)
        loss: Any = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return Seq2SeqLMOutput(
            loss=loss, logits=logits, past_key_values=past_key_values, encoder_last_hidden_state=encoded
        )


AutoConfig.register(OneWideConfig.model_type, OneWideConfig)
AutoModelForSeq2SeqLM.register(OneWideConfig, OneWideForConditionalGeneration)
