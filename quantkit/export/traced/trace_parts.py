"""The three files of an encoder-decoder that no exporter knows, traced part by part.

An encoder is run once, the decoder's first step makes its keys and values of what the encoder gave, and each
later step reads them: one graph for each, with the names that clients of optimum's exports use. It serves
models with a plain encoder and a decoder of `decoder(ids, encoded, encoder_mask, cache)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.reference import new_cache

BATCH, LENGTH, ANSWER, PAST = 2, 5, 3, 4  # of the example that is traced; every size but the last two is free
DECODER, ENCODER = "decoder", "encoder"


class _Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        made: Tensor = self.encoder(input_ids, attention_mask)[0]
        return made


class _First(nn.Module):
    """The first step, which makes every cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.lm_head, self.depth = model.model.decoder, model.lm_head, _depth(model)

    def forward(self, mask: Tensor, input_ids: Tensor, encoded: Tensor) -> tuple[Tensor, ...]:
        cache = new_cache()
        logits = self.lm_head(self.decoder(input_ids, encoded, mask, cache))
        return logits, *_held(cache, self.depth, (DECODER, ENCODER))


class _Later(nn.Module):
    """A later step, which is given them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.lm_head, self.depth = model.model.decoder, model.lm_head, _depth(model)

    def forward(self, mask: Tensor, input_ids: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        cache = new_cache()
        for index in range(self.depth):
            key, value, cross_key, cross_value = held[4 * index : 4 * index + 4]
            cache.self_attention_cache.update(key, value, index)
            cache.cross_attention_cache.update(cross_key, cross_value, index)
            cache.is_updated[index] = True
        logits = self.lm_head(self.decoder(input_ids, None, mask, cache))
        return logits, *_held(cache, self.depth, (DECODER,))


def _depth(model: Any) -> int:
    return len(model.model.decoder.layers)


def _held(cache: Any, depth: int, parts: Sequence[str]) -> tuple[Tensor, ...]:
    """Keys and values layer by layer, in the order of `_names`."""
    halves = {DECODER: cache.self_attention_cache, ENCODER: cache.cross_attention_cache}
    layers = (halves[part].layers[index] for index in range(depth) for part in parts)
    return tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))


def _names(start: str, depth: int, parts: Sequence[str]) -> list[str]:
    return [
        f"{start}.{index}.{part}.{kind}"
        for index in range(depth)
        for part in parts
        for kind in ("key", "value")
    ]


def trace_parts(model: Any, out_dir: Path, *, opset: int) -> tuple[Path, ...]:
    """Write encoder_model.onnx, decoder_model.onnx and decoder_with_past_model.onnx."""
    out_dir.mkdir(parents=True, exist_ok=True)
    depth, sizes = _depth(model), model.config
    ids = torch.ones((BATCH, LENGTH), dtype=torch.int64)
    answer, mask = torch.ones((BATCH, ANSWER), dtype=torch.int64), torch.ones_like(ids)
    encoded = torch.zeros((BATCH, LENGTH, sizes.hidden_size))
    heads, width = sizes.num_key_value_heads, sizes.hidden_size // sizes.num_attention_heads
    shapes = [(BATCH, heads, length, width) for length in (PAST, PAST, LENGTH, LENGTH)] * depth
    text, answered = {0: "batch", 1: "encoder_sequence"}, {0: "batch", 1: "sequence"}
    caches = {
        name: {0: "batch", 2: f"{'past' if f'.{DECODER}.' in name else 'encoder'}_sequence"}
        for name in _names("past_key_values", depth, (DECODER, ENCODER))
    }
    first = _names("present", depth, (DECODER, ENCODER))
    later = _names("present", depth, (DECODER,))
    grown = {name: {0: "batch", 2: f"{name.split('.')[2]}_total"} for name in first}
    parts: dict[str, tuple[nn.Module, tuple[Tensor, ...], list[str], list[str], dict[str, Any]]] = {
        "encoder_model": (
            _Encoder(model),
            (ids, mask),
            ["input_ids", "attention_mask"],
            ["last_hidden_state"],
            {"input_ids": text, "attention_mask": text, "last_hidden_state": text},
        ),
        "decoder_model": (
            _First(model),
            (mask, answer, encoded),
            ["encoder_attention_mask", "input_ids", "encoder_hidden_states"],
            ["logits", *first],
            {"encoder_attention_mask": text, "input_ids": answered, "encoder_hidden_states": text}
            | {"logits": answered, **grown},
        ),
        "decoder_with_past_model": (
            _Later(model),
            (mask, answer, *(torch.zeros(shape) for shape in shapes)),
            ["encoder_attention_mask", "input_ids", *caches],
            ["logits", *later],
            {"encoder_attention_mask": text, "input_ids": answered, "logits": answered}
            | caches
            | {name: grown[name] for name in later},
        ),
    }
    for name, (module, example, inputs, outputs, axes) in parts.items():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                example,
                str(out_dir / f"{name}.onnx"),
                input_names=inputs,
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=opset,
                dynamo=False,
            )
    return tuple(out_dir / f"{name}.onnx" for name in parts)
