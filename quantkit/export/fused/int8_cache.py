"""The KV cache in INT8: attention stores keys and values as integer codes.

At long contexts a decoded token reads as many bytes of cache as of weights; in INT8 they are a quarter. The
operator rounds keys and values as it stores them and multiplies with the codes, also within the prompt, so
that a text read at once gives the same as token by token. Scales are fixed and come from calibration on the
`present.*` outputs of the float graph. Keys have outlier channels and values have none, but the CPU kernel
wants one way for both, so each channel of each head has its own scale. Keys per channel: KIVI,
https://arxiv.org/abs/2402.02750.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError, not_one_of
from quantkit.export.graph import save
from quantkit.export.rotary import partners

Floats = NDArray[np.float32]
ATTENTION_OP = "GroupQueryAttention"
HEAD_SINK, KEY_SCALE, VALUE_SCALE = 11, 12, 13  # places among the operator's inputs
LARGEST_CODE = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """What the cache holds."""

    element_type: int  # as ONNX counts them
    bits: int | None  # None: floats as they are
    description: str


CACHE_FORMATS: dict[str, CacheFormat] = {
    "float32": CacheFormat(
        element_type=TensorProto.FLOAT, bits=None, description="keys and values as they are"
    ),
    "int8": CacheFormat(
        element_type=TensorProto.INT8, bits=8, description="a quarter of the memory, scales from calibration"
    ),
}
# How many numbers share a scale, as the operator calls it.
SHARING: dict[str, str] = {"channel": "PER_CHANNEL", "tensor": "PER_TENSOR"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePeaks:
    """Largest magnitudes of keys and values in one attention's cache during calibration."""

    key_HD: Floats
    value_HD: Floats
    num_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheParts:
    """What an attention node needs for its cache."""

    element_type: int  # of past and present, keys and values
    inputs: tuple[str, ...]  # to follow `attention_bias`: an empty head_sink, then both scales
    attributes: Mapping[str, Any]
    constants: Mapping[str, Floats]  # the scales by name


def widen(
    peaks: CachePeaks | None,
    key_BHTD: Floats,
    value_BHTD: Floats,
    *,
    where: str,
    rotary_dim: int | None = None,
    is_interleaved: bool = False,
) -> CachePeaks:
    """Peaks that include one more text's cache, all of whose positions must be filled.

    Rotation turns two channels into each other as the position grows, and calibration texts are shorter than
    the context; so each of such a pair is given the length of both.
    """
    key_HD, value_HD = _peaks(key_BHTD, where, "keys"), _peaks(value_BHTD, where, "values")
    if rotary_dim:
        squares = np.square(key_BHTD[..., :rotary_dim])
        squares += squares[..., partners(rotary_dim, is_interleaved=is_interleaved)]
        key_HD[:, :rotary_dim] = np.sqrt(squares).max(axis=(0, 2))
    num_positions = key_BHTD.shape[0] * key_BHTD.shape[2]
    if peaks is not None:
        key_HD, value_HD = np.maximum(key_HD, peaks.key_HD), np.maximum(value_HD, peaks.value_HD)
        num_positions += peaks.num_positions
    return CachePeaks(key_HD=key_HD, value_HD=value_HD, num_positions=num_positions)


def _peaks(values_BHTD: Floats, where: str, kind: str) -> Floats:
    if not values_BHTD.size:
        raise InputError(
            f"calibration filled no position of its {kind}", where=where, next_step="give a longer text"
        )
    peak_HD = np.asarray(np.abs(values_BHTD).max(axis=(0, 2)), np.float32)
    if not np.isfinite(peak_HD).all():  # the operator would store them as 127 and say nothing
        raise InputError(
            f"its {kind} are not finite",
            where=where,
            next_step="check that the original model gives finite logits on this text",
        )
    return peak_HD


def scales_of(peak_HD: Floats, sharing: str = "channel") -> Floats:
    """Scales by which the largest code just reaches each peak: [1, heads, 1, head_dim], or [1].

    A channel that was always zero may wake up later: it gets the scale of the largest one, so that nothing
    is cut off.
    """
    tiny = np.finfo(np.float32).tiny  # a scale below it would count as zero
    largest = np.float32(peak_HD.max()) or np.float32(LARGEST_CODE)
    if sharing == "tensor":
        return np.array([max(largest / LARGEST_CODE, tiny)], np.float32)
    filled_HD = np.where(peak_HD > 0, peak_HD, largest)
    return np.asarray(np.maximum(filled_HD / LARGEST_CODE, tiny)[None, :, None, :], np.float32)


def cache_parts(
    name: str, cache_format: str, peaks: CachePeaks | None = None, *, sharing: str = "channel"
) -> CacheParts:
    """The inputs, attributes and types by which the attention `name` keeps its cache in this format."""
    row = CACHE_FORMATS.get(cache_format)
    if row is None:
        raise not_one_of(cache_format, CACHE_FORMATS, where="cache format")
    if row.bits is None:
        return CacheParts(element_type=row.element_type, inputs=(), attributes={}, constants={})
    if peaks is None:
        raise InputError(
            f"its cache was not calibrated, and {cache_format} needs a range for each channel", where=name
        )
    constants = {
        f"{name}/key_scale": scales_of(peaks.key_HD, sharing),
        f"{name}/value_scale": scales_of(peaks.value_HD, sharing),
    }
    return CacheParts(
        element_type=row.element_type,
        inputs=("", *constants),
        attributes={
            "k_quant_type": SHARING[sharing],
            "v_quant_type": SHARING[sharing],
            "kv_cache_bit_width": row.bits,
        },
        constants=constants,
    )


def attention_nodes(model: onnx.ModelProto) -> tuple[onnx.NodeProto, ...]:
    """The attentions of a fused decoder, in the order of their caches."""
    return tuple(node for node in model.graph.node if node.op_type == ATTENTION_OP)


def quantize_cache(
    model: onnx.ModelProto,
    peaks: Sequence[CachePeaks],
    *,
    cache_format: str = "int8",
    sharing: str = "channel",
) -> onnx.ModelProto:
    """The fused decoder with its cache in another format: a copy, whose weights are not touched."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    nodes = attention_nodes(changed)
    if len(nodes) != len(peaks) or not nodes:
        raise InputError(
            f"{len(nodes)} attentions with a cache, and calibration saw {len(peaks)}",
            where=model.graph.name,
            allowed="a decoder written as a fused graph",
        )
    types: dict[str, int] = {}
    for node, node_peaks in zip(nodes, peaks, strict=True):
        parts = cache_parts(node.name, cache_format, node_peaks, sharing=sharing)
        inputs = list(node.input)[:HEAD_SINK]
        inputs += [""] * (HEAD_SINK - len(inputs))
        del node.input[:]
        node.input.extend([*inputs, *parts.inputs] if parts.inputs else inputs)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in parts.attributes.items())
        changed.graph.initializer.extend(
            numpy_helper.from_array(a, key) for key, a in parts.constants.items()
        )
        types |= dict.fromkeys((*node.input[3:5], *node.output[1:3]), parts.element_type)
    for value in (*changed.graph.input, *changed.graph.output):
        if value.name in types:
            value.type.tensor_type.elem_type = types[value.name]
    return changed


def rewrite(path: Path, peaks: Sequence[CachePeaks], *, cache_format: str) -> None:
    """Change a graph on disk; weights beside it stay where they are."""
    model = onnx.load(str(path), load_external_data=False)
    save(quantize_cache(model, peaks, cache_format=cache_format), path)
