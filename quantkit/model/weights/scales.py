"""Forms of quantized checkpoints: which are read; and of FP8 and INT8, which value each scale scales.

The dequantized weights are the original, so scales are applied whenever rows are read. A scale is one value,
one for each output channel, or one for each block:

- `fp8` of DeepSeek, Qwen and Mistral: `weight_scale_inv` of blocks, which multiplies in spite of its name
- `compressed-tensors`, `fbgemm_fp8` and `modelopt`: `weight_scale`

`packed.py` reads codes that are packed into words: GPTQ, AWQ, compressed-tensors and bitsandbytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.model.weights.headers import StoredTensor

SCALE_ENDS = ("_scale_inv", "_scale")
INTEGERS = ("F8_E4M3", "F8_E5M2", "I8")
COMPRESSED_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized")
PACKED_BITS = (2, 4, 8)
READABLE = (
    "safetensors in float, FP8 with scales (fp8, fbgemm_fp8, modelopt), gptq, awq, compressed-tensors in "
    "integers or FP8, or bitsandbytes"
)
BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?([\w.-]+/[\w.-]+)", re.MULTILINE)


def why_not_read(quantization: Mapping[str, Any]) -> str | None:
    """Why the weights that a `quantization_config` describes are not read, or None."""
    method = str(quantization.get("quant_method") or quantization.get("quant_algo") or "an unnamed method")
    detail = READ[method.lower()](quantization) if method.lower() in READ else method
    if not quantization or not detail:
        return None
    return f"the weights are quantized already, with {' '.join(dict.fromkeys((method, detail)))}"


def described(quantization: Mapping[str, Any]) -> str:
    """What a readable config says of the weights, for the report."""
    method = str(quantization.get("quant_method"))
    if method == "bitsandbytes":
        kind = quantization.get("bnb_4bit_quant_type", "nf4") if quantization.get("load_in_4bit") else "INT8"
        return f"bitsandbytes, {kind}"
    sizes = [quantization] if "bits" in quantization else weight_settings(quantization)
    found = (
        (part.get("bits", part.get("num_bits")), part.get("group_size"), part.get("type", "int"))
        for part in sizes
    )
    parts = dict.fromkeys(
        f"{bits} {'bits' if kind == 'int' else 'bits of float'}"
        + (f" in groups of {group}" if isinstance(group, int) and group > 0 else "")
        for bits, group, kind in found
        if bits
    )
    order = ", groups out of order" if quantization.get("desc_act") else ""
    return f"{method}{', ' if parts else ''}{' and '.join(parts)}{order}"


def _why_not_gptq(quantization: Mapping[str, Any]) -> str:
    bits, form = quantization.get("bits"), quantization.get("checkpoint_format") or "gptq"
    if bits not in PACKED_BITS or form not in ("gptq", "gptq_v2"):
        return f"{bits} bits in the format {form}"
    if quantization.get("pack_dtype", "int32") != "int32":
        return f"words of {quantization['pack_dtype']}"
    return "settings of its own for some modules (dynamic)" if quantization.get("dynamic") else ""


def _why_not_awq(quantization: Mapping[str, Any]) -> str:
    bits = quantization.get("bits", quantization.get("w_bit"))
    version = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm":
        return f"{bits} bits in the layout {version}"
    return "" if quantization.get("zero_point", True) else "no zero points"


def _why_not_compressed(quantization: Mapping[str, Any]) -> str:
    form = str(quantization.get("format", "dense"))
    changes = [key for key in ("transform_config", "sparsity_config") if _is_set(quantization.get(key))]
    parts = weight_settings(quantization)
    is_packed = form == "pack-quantized" and len({str(part.get("num_bits")) for part in parts}) == 1
    is_packed = is_packed and parts[0].get("num_bits") in PACKED_BITS and parts[0].get("type", "int") == "int"
    is_packed = is_packed and len({str(part.get("group_size")) for part in parts}) == 1
    return "" if (form in COMPRESSED_FORMATS or is_packed) and not changes else ", ".join([form, *changes])


def _why_not_bitsandbytes(quantization: Mapping[str, Any]) -> str:
    kind = quantization.get("bnb_4bit_quant_type", "nf4")
    if quantization.get("load_in_4bit") and kind not in ("nf4", "fp4"):
        return f"4 bits of the type {kind}"
    if quantization.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        return f"codes stored as {quantization['bnb_4bit_quant_storage']}"
    return (
        "" if quantization.get("load_in_4bit") or quantization.get("load_in_8bit") else "neither 4 nor 8 bits"
    )


# quant_method -> why weights of these settings are not read, or "".
READ: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "fp8": lambda _: "",
    "fbgemm_fp8": lambda _: "",
    "modelopt": lambda q: "" if q.get("quant_algo") == "FP8" else str(q.get("quant_algo")),
    "compressed-tensors": _why_not_compressed,
    "gptq": _why_not_gptq,
    "awq": _why_not_awq,
    "bitsandbytes": _why_not_bitsandbytes,
}


def weight_settings(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each group of a compressed-tensors config says of its weights."""
    groups = quantization.get("config_groups")
    parts = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [part for part in parts if isinstance(part, Mapping)]


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
        if (
            not tensor.packed
            and name not in used
            and (asymmetric or (quantization and name not in scales and tensor.dtype in INTEGERS))
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
    weights = weight_settings(quantization)
    sizes = [quantization.get("weight_block_size"), *(part.get("block_structure") for part in weights)]
    sizes += [(1, part["group_size"]) for part in weights if part.get("group_size")]
    return [(int(size[0]), int(size[1])) for size in sizes if size]
