"""What one decoded token reads from memory: every weight, and the keys and values of the tokens before it.

Their bytes over the machine's bandwidth are the least time a token can take. Of weights alone that time comes
out too short, and more so the longer the context: at 4,096 tokens the cache of a Llama-2-7B in float32 has
more than half the bytes of its weights in INT8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.model.model_map import ModelMap
from quantkit.quantization.layout import Contents, planned_bytes

WEIGHTS_KEY, CACHES_KEY = "bytes_per_token", "caches"  # of what a graph says of itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Of one model."""

    weight_bytes: int
    caches: tuple[tuple[int, int | None], ...] = ()  # numbers kept of each token, in which window

    def bytes_at(self, places: float, number_bytes: int) -> float:
        """Bytes that a token reads which sees so many places, itself among them."""
        kept = sum(numbers * min(places, window or places) for numbers, window in self.caches)
        return self.weight_bytes + kept * number_bytes


def traffic_of(model_map: ModelMap, contents: Contents) -> Traffic:
    """From facts and shapes alone. What an encoder's states are projected to is left out."""
    numbers: Counter[int | None] = Counter()
    for block in model_map.at_inference.blocks:
        for each in block.attentions:
            if each.is_causal and not each.is_cross:
                numbers[each.window] += 2 * each.num_kv_heads * each.head_dim * block.calls
    ordered = sorted(numbers.items(), key=lambda item: item[0] or 0)
    return Traffic(
        weight_bytes=_weight_bytes(contents), caches=tuple((count, window) for window, count in ordered)
    )


def to_metadata(traffic: Traffic) -> dict[str, Any]:
    """As a graph's metadata hold it."""
    return {WEIGHTS_KEY: traffic.weight_bytes, CACHES_KEY: [list(each) for each in traffic.caches]}


def from_metadata(metadata: Mapping[str, Any]) -> Traffic | None:
    """From a graph's metadata; None where they do not say."""
    if not metadata.get(WEIGHTS_KEY):
        return None
    caches = tuple((int(numbers), window) for numbers, window in metadata.get(CACHES_KEY, ()))
    return Traffic(weight_bytes=int(metadata[WEIGHTS_KEY]), caches=caches)


def _weight_bytes(contents: Contents) -> int:
    """Every weight but the tables: of those a token reads one row. A float head reads the table it shares."""
    heads = {pack.table for pack in contents.packs if pack.table}
    tables = [entry for entry in contents.tables if entry.table.name not in heads]
    return planned_bytes(contents.tensors()) - planned_bytes(
        spec for entry in tables for spec in entry.tensors()
    )
