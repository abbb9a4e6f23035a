"""Tiny checkpoints as GPTQ, AWQ, compressed-tensors and bitsandbytes pack them, written code by code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scaled import change
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
Tensors = dict[str, torch.Tensor]
NF4 = np.array(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    np.float32,
)


def packed(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Words of codes along the last axis, from the lowest bits; `order` has the column of each place."""
    per = 32 // bits
    order = order or tuple(range(per))
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per)), np.uint32)
    for word in range(words.shape[-1]):
        for place, column in enumerate(order):
            if word * per + column < codes.shape[-1]:
                words[..., word] |= codes[..., word * per + column].astype(np.uint32) << np.uint32(
                    place * bits
                )
    return words.view(np.int32)


def rounded(
    weight_OI: np.ndarray, bits: int, group: int, *, zeros: bool, groups_I: Any = None
) -> tuple[Any, ...]:
    """(codes [O, I] from 0, scales [O, groups] in half precision, zero points, what they mean)."""
    rows, columns = weight_OI.shape
    groups_I = np.arange(columns) // group if groups_I is None else groups_I
    number = groups_I.max() + 1
    top = 2**bits - 1
    scales, points = np.empty((rows, number), np.float16), np.empty((rows, number), np.int64)
    for index in range(number):
        part = weight_OI[:, groups_I == index]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if zeros:
            scales[:, index] = (high - low) / top * 1.1  # so that plain rounding finds other scales
            points[:, index] = np.clip(np.rint(-low / scales[:, index].astype(np.float32)), 0, top)
        else:
            scales[:, index] = np.maximum(high, -low) * 2 / top
            points[:, index] = 2 ** (bits - 1)
    steps = scales.astype(np.float32)[:, groups_I]
    codes = np.clip(np.rint(weight_OI / steps) + points[:, groups_I], 0, top).astype(np.int64)
    meant = ((codes - points[:, groups_I]).astype(np.float64) * steps).astype(np.float32)
    return codes, scales, points, meant


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def gptq(weight: np.ndarray, *, bits: int = 4, zeros: bool = False, version: int = 1, shuffled: bool = False):
    groups_I = np.arange(weight.shape[1]) // 32
    if shuffled:
        groups_I = np.random.default_rng(1).permutation(groups_I)
    codes, scales, points, meant = rounded(weight, bits, 32, zeros=zeros, groups_I=groups_I)
    stored = (points - (version == 1)) % 2**bits
    return {
        "qweight": tensor(packed(codes, bits).T),
        "qzeros": tensor(packed(stored.T, bits)),
        "scales": tensor(scales.T),
        "g_idx": tensor(groups_I.astype(np.int32)),
    }, meant


def awq(weight: np.ndarray):
    codes, scales, points, meant = rounded(weight, 4, 32, zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": tensor(packed(codes.T, 4, order)),
        "qzeros": tensor(packed(points.T, 4, order)),
        "scales": tensor(scales.T),
    }, meant


def compressed(weight: np.ndarray, *, bits: int = 4, zeros: bool = False, dtype: Any = torch.float16):
    codes, scales, points, meant = rounded(weight, bits, 32, zeros=zeros)
    parts = {
        "weight_packed": tensor(packed(codes, bits)),
        "weight_scale": tensor(scales).to(dtype),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        parts["weight_zero_point"] = tensor(packed(points.T, bits).T)
    if dtype is not torch.float16:
        steps = parts["weight_scale"].float().numpy()[:, np.arange(weight.shape[1]) // 32]
        meant = (codes - 2 ** (bits - 1)).astype(np.float32) * steps
    return parts, meant


def nf4(weight: np.ndarray, *, nested: bool = False):
    blocks = weight.reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
    parts: Tensors = {}
    if nested:
        offset, table = float(largest.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        outer = np.array(
            [np.abs(part - offset).max() for part in np.split(largest, range(256, len(largest), 256))]
        )
        outer = outer.astype(np.float32)
        fractions = (largest - offset) / outer[np.arange(len(largest)) // 256]
        scale_codes = np.abs(fractions[:, None] - table).argmin(1).astype(np.uint8)
        largest = table[scale_codes] * outer[np.arange(len(largest)) // 256] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {"weight.nested_absmax": tensor(outer), "weight.nested_quant_map": tensor(table)}
        parts["weight.absmax"] = tensor(scale_codes)
    else:
        parts["weight.absmax"] = tensor(largest)
    codes = np.abs((blocks / largest[:, None])[:, :, None] - NF4).argmin(2)
    flat = codes.reshape(-1).astype(np.uint8)
    parts["weight"] = tensor((flat[0::2] << 4) | flat[1::2])[:, None]
    parts["weight.quant_map"] = tensor(NF4.copy())
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    parts["weight.quant_state.bitsandbytes__nf4"] = tensor(text)
    return parts, (NF4[codes] * largest[:, None]).reshape(weight.shape)


def int8(weight: np.ndarray):
    largest = np.abs(weight).max(1)
    codes = np.rint(weight / largest[:, None] * 127).astype(np.int8)
    parts = {
        "weight": tensor(codes),
        "SCB": tensor(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
NUMBERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def pack_config(**changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {**NUMBERS, **changes}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


Pack = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
FORMS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, gptq),
    "gptq zeros": ({**GPTQ, "sym": False}, lambda w: gptq(w, zeros=True)),
    "gptq v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, zeros=True, version=2),
    ),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, lambda w: gptq(w, bits=8)),
    "gptq act-order": ({**GPTQ, "desc_act": True}, lambda w: gptq(w, shuffled=True)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "compressed": (pack_config(), compressed),
    "compressed zeros": (pack_config(symmetric=False), lambda w: compressed(w, zeros=True)),
    "compressed 8 bits": (pack_config(num_bits=8), lambda w: compressed(w, bits=8)),
    "compressed bfloat16": (pack_config(), lambda w: compressed(w, dtype=torch.bfloat16)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "nf4 nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        lambda w: nf4(w, nested=True),
    ),
    "bitsandbytes 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
}


def checkpoints(folder: Path, form: str, **sizes: Any) -> tuple[Path, Path]:
    """(a checkpoint in this form, the float checkpoint that it means)."""
    quantization, pack = FORMS[form]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    stored, plain = folder / "packed" / "model", folder / "plain" / "model"
    for path in (stored, plain):
        model.save_pretrained(path)
    tensors = load_file(plain / "model.safetensors")
    written = dict(tensors)
    for name, values in tensors.items():
        if values.dim() == 2 and ".layers." in name:
            del written[name]
            parts, meant = pack(values.numpy())
            stem = name.removesuffix(".weight")
            written |= {f"{stem}.{part}": value.contiguous() for part, value in parts.items()}
            tensors[name] = tensor(meant)
    save_file(written, stored / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    change(stored, quantization_config=quantization)
    return stored, plain
