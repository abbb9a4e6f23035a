"""Tiny checkpoints stored in FP8 or INT8 with scales, in the layouts of released ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

TINY = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
GROUPS = {
    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "group", "group_size": 8}}
}
FORMS = {  # the released layouts: (quantization_config, end of the scale's name, type, block)
    "deepseek and qwen": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [16, 16],
            "modules_to_not_convert": ["lm_head"],
        },
        ("_scale_inv", FP8, (16, 16)),
    ),
    "mistral": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        ("_scale_inv", FP8, None),
    ),
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "static"}, ("_scale", FP8, None)),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        ("_scale", FP8, (1, 1 << 20)),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("_scale", FP8, None)),
    "compressed channel": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
        },
        ("_scale", FP8, (1, 1 << 20)),
    ),
    "compressed int8 groups": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": GROUPS},
        ("_scale", INT8, (1, 8)),
    ),
}


def stored(weight_OI, dtype, block):
    """(values of the type, scales, what both mean together)."""
    num_out, num_in = weight_OI.shape
    rows, columns = (min(size, n) for size, n in zip(block or weight_OI.shape, weight_OI.shape, strict=True))
    scale = torch.empty(-(-num_out // rows), -(-num_in // columns))
    values, meant = torch.empty(weight_OI.shape, dtype=dtype), torch.empty(weight_OI.shape)
    largest = 448.0 if dtype is FP8 else 127.0
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight_OI[part].abs().max() / largest
            whole = weight_OI[part] / scale[i, j]
            values[part] = whole.to(dtype) if dtype is FP8 else whole.round().to(dtype)
            meant[part] = values[part].float() * scale[i, j]
    return values, scale if block else scale.reshape(()), meant


def checkpoints(folder: Path, form: str, cls=LlamaForCausalLM, config=None) -> tuple[Path, Path]:
    """(a checkpoint in this form, the float checkpoint that it means)."""
    quantization, (end, dtype, block) = FORMS[form]
    torch.manual_seed(0)
    model = cls(config or LlamaConfig(**TINY))
    scaled, plain = folder / "scaled" / "model", folder / "plain" / "model"
    for path in (scaled, plain):
        model.save_pretrained(path)
    tensors = load_file(plain / "model.safetensors")
    written = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and (".layers." in name or ".h." in name):
            written[name], written[name + end], tensors[name] = stored(tensor, dtype, block)
            written[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    save_file(written, scaled / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    change(scaled, quantization_config=quantization)
    return scaled, plain


def change(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
