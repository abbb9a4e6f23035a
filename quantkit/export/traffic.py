"""Memory traffic of a decoded token: every weight, and the keys and values of the tokens before it.

Its bytes over the machine's bandwidth are the least time that a token can take. Weights alone are too few,
the more so the longer the context: at 4,096 tokens the cache of a Llama-2-7B in float32 has more than half
the bytes of its weights in INT8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.model.model_map import ModelMap
from quantkit.quantization.layout import Contents, TensorSpec

WEIGHTS_KEY, CACHES_KEY = "bytes_per_token", "caches"  # of a graph's metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Weights, and cached numbers of each token by attention window."""

    weight_bytes: int
    caches: tuple[tuple[int, int | None], ...] = ()  # (numbers of a token, window)

    def bytes_at(self, places: float, number_bytes: int) -> float:
        """Bytes that a token reads when it attends to so many places, its own included."""
        kept = sum(numbers * min(places, window or places) for numbers, window in self.caches)
        return self.weight_bytes + kept * number_bytes


def traffic_of(model_map: ModelMap, contents: Contents) -> Traffic:
    """Traffic from facts and shapes alone, without cross-attention."""
    numbers: Counter[int | None] = Counter()
    for block in model_map.at_inference.blocks:
        for attention in block.attentions:
            if attention.is_causal and not attention.is_cross:
                num_values = 2 * attention.num_kv_heads * attention.head_dim
                numbers[attention.window] += num_values * block.calls
    ordered = sorted(numbers.items(), key=lambda item: item[0] or 0)
    return Traffic(
        weight_bytes=_weight_bytes(contents) - _idle_bytes(model_map, contents),
        caches=tuple((count, window) for window, count in ordered),
    )


def to_metadata(traffic: Traffic) -> dict[str, Any]:
    return {WEIGHTS_KEY: traffic.weight_bytes, CACHES_KEY: [list(cache) for cache in traffic.caches]}


def from_metadata(metadata: Mapping[str, Any]) -> Traffic | None:
    """Traffic from a graph's metadata; None where it has none."""
    if not metadata.get(WEIGHTS_KEY):
        return None
    caches = tuple((int(numbers), window) for numbers, window in metadata.get(CACHES_KEY, ()))
    return Traffic(weight_bytes=int(metadata[WEIGHTS_KEY]), caches=caches)


def _weight_bytes(contents: Contents) -> int:
    """All weights without tables, of which a token reads one row. A float head reads the table it shares."""
    heads = {pack.table for pack in contents.packs if pack.table}
    tables = [entry for entry in contents.tables if entry.table.name not in heads]
    unread = {spec.name for entry in tables for spec in entry.tensors()}
    return sum(_loaded_bytes(spec) for spec in contents.tensors() if spec.name not in unread)


def _idle_bytes(model_map: ModelMap, contents: Contents) -> int:
    """The experts that a token does not choose."""
    mixtures = {block.name: block.mixture for block in model_map.blocks}
    idle = 0.0
    for pack in contents.packs:
        layer = pack.layers[0]
        mixture = mixtures.get(layer.block or "")
        if mixture and layer.expert is not None:
            num_bytes = sum(_loaded_bytes(spec) for spec in pack.tensors())
            idle += num_bytes * (1 - mixture.num_active / mixture.num_experts)
    return round(idle)


def _loaded_bytes(spec: TensorSpec) -> int:
    """Bytes in memory: scales in float16 are widened when a session is made."""
    return 2 * spec.num_bytes if spec.dtype == "F16" else spec.num_bytes
