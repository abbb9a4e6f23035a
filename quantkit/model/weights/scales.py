"""Scales of checkpoints that are stored in FP8 or INT8: which are read, and which value each one scales.

The dequantized weights are the original, so scales are applied whenever rows are read. A scale is one value,
one for each output channel, or one for each block:

- `fp8` of DeepSeek, Qwen and Mistral: `weight_scale_inv` of blocks, which multiplies in spite of its name
- `compressed-tensors`, `fbgemm_fp8` and `modelopt`: `weight_scale`
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.model.weights.headers import StoredTensor

SCALE_ENDS = ("_scale_inv", "_scale")
INTEGERS = ("F8_E4M3", "F8_E5M2", "I8")
COMPRESSED_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized")
READABLE = (
    "safetensors in float, FP8 with scales (fp8, fbgemm_fp8, modelopt), or compressed-tensors in 8 bits"
)
BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?([\w.-]+/[\w.-]+)", re.MULTILINE)


def why_not_read(quantization: Mapping[str, Any]) -> str | None:
    """Why the weights that a `quantization_config` describes are not read, or None."""
    method = str(quantization.get("quant_method") or quantization.get("quant_algo") or "an unnamed method")
    compressed = str(quantization.get("format", "dense"))
    changes = [key for key in ("transform_config", "sparsity_config") if _is_set(quantization.get(key))]
    readable = {
        "fp8": True,
        "fbgemm_fp8": True,
        "modelopt": quantization.get("quant_algo") == "FP8",
        "compressed-tensors": compressed in COMPRESSED_FORMATS and not changes,
    }
    if not quantization or readable.get(method.lower(), False):
        return None
    details = {
        "modelopt": quantization.get("quant_algo"),
        "compressed-tensors": ", ".join([compressed, *changes]),
    }
    return f"the weights are quantized already, with {' '.join(filter(None, [method, details.get(method)]))}"


def _is_set(value: Any) -> bool:
    return bool(value) and value.get("format") != "dense" if isinstance(value, Mapping) else bool(value)


def require_readable(quantization: Mapping[str, Any], folder: Path, where: str) -> None:
    reason = why_not_read(quantization)
    if reason:
        raise InputError(
            reason,
            where=where,
            allowed=READABLE,
            next_step=f"start from the unquantized original{original_name(folder)}",
        )


def original_name(folder: Path) -> str:
    """ ", NAME" of the model that a quantized one was made from, where its card says so."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace")[:10_000] if card.is_file() else ""
    name = BASE_MODEL.search(text)
    return f", {name[1]}" if name else ""


def with_scales(
    stored: Mapping[str, StoredTensor], quantization: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, each with its scale; scales are no tensors of their own."""
    scales = {name: stored[name + end] for name in stored for end in SCALE_ENDS if name + end in stored}
    used = {scale.name for scale in scales.values()}
    for name, tensor in stored.items():
        asymmetric = f"{name}_zero_point" in stored
        if name not in used and (
            asymmetric or (quantization and name not in scales and tensor.dtype in INTEGERS)
        ):
            raise InputError(
                f"'{name}' is stored as {tensor.dtype} with {'a zero point' if asymmetric else 'no scale'}",
                where=str(tensor.file),
                next_step=f"start from the unquantized original{original_name(tensor.file.parent)}",
            )
    return {
        name: replace(tensor, scale=scales[name], block=_block(tensor, scales[name], quantization))
        if name in scales
        else tensor
        for name, tensor in stored.items()
        if name not in used
    }


def _block(tensor: StoredTensor, scale: StoredTensor, quantization: Mapping[str, Any]) -> tuple[int, ...]:
    """Values that share a scale, along each axis of the tensor."""
    shape = tensor.shape or (1,)
    if math.prod(scale.shape) == 1:
        scale_shape: tuple[int, ...] = (1,) * len(shape)
    else:
        scale_shape = (*scale.shape, *[1] * (len(shape) - len(scale.shape)))
    for rows, columns in (*_blocks(quantization), (1, 1)):
        sizes = (*[1] * (len(shape) - 2), rows, columns)[-len(shape) :]
        block = tuple(
            n if s == 1 else 1 if s == n else size
            for n, s, size in zip(shape, scale_shape, sizes, strict=False)
        )
        if len(scale_shape) == len(shape) and all(
            math.ceil(n / size) == s for n, s, size in zip(shape, scale_shape, block, strict=True)
        ):
            return block
    raise InputError(
        f"'{scale.name}' of {list(scale.shape)} does not fit the {list(tensor.shape)} values that it scales",
        where=str(scale.file),
        allowed='one scale, one for each row, or blocks of the "weight_block_size" that config.json names',
        next_step="copy or download config.json and weights again; they belong to different models",
    )


def _blocks(quantization: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The sizes of blocks that a `quantization_config` names."""
    groups = quantization.get("config_groups")
    parts = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    weights = [part for part in parts if isinstance(part, Mapping)]
    sizes = [quantization.get("weight_block_size"), *(part.get("block_structure") for part in weights)]
    sizes += [(1, part["group_size"]) for part in weights if part.get("group_size")]
    return [(int(size[0]), int(size[1])) for size in sizes if size]
