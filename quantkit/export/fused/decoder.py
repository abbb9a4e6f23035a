"""Decoders as fused graphs: one attention operator rotates, caches and attends.

Query, key and value are one product, an activation and a norm one operator each. onnxruntime's
GroupQueryAttention writes into the cache in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export import operators
from quantkit.export.decoder import DecoderWalk, why_not
from quantkit.export.fused.latent import add_latents, keeps_latents
from quantkit.export.fused.operators import FusedOperators
from quantkit.export.graph import CONTRIB, Graph
from quantkit.export.walk import Stream, norm_at
from quantkit.model.model_map import Attention, Block, ModelMap, NormPlace, PositionKind
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents, Pack, TableEntry

HEAD_MULTIPLE = 8  # of GroupQueryAttention


def why_not_fused(model_map: ModelMap) -> str | None:
    """Why this model has no fused graph, or None when it has."""
    sizes = {attention.head_dim for block in model_map.blocks for attention in block.attentions}
    uneven = [size for size in sizes if size % HEAD_MULTIPLE]
    reason = why_not(model_map)
    if reason is None and uneven:
        reason = f"its heads of {uneven[0]} are no multiple of {HEAD_MULTIPLE}, as fused attention needs"
    return reason


def emit_decoder(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    target: Target,
    keeps_weights_outside: bool,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """The whole decoder with its cache, as one graph."""
    reason = why_not_fused(model_map)
    if reason:
        raise InputError(f"no fused graph for it: {reason}", where=model_map.name)
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=keeps_weights_outside)
    walk = fused_walk(graph, model_map, contents)
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    walk.operators.read_mask(ids)
    stream = Stream(walk.embed(ids))
    walk.operators.choose_rows()
    logits, num_classes = walk.logits(walk.blocks(stream))
    # Declared as one position, by which onnxruntime-genai knows that a prompt yields no more.
    graph.output(logits, "logits", TensorProto.FLOAT, ["batch", 1, num_classes])
    return graph.finish(name=model_map.name, target=target, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedWalk(DecoderWalk):
    """The walk over a decoder with the fused dialect."""

    operators: FusedDecoder


def fused_walk(graph: Graph, model_map: ModelMap, contents: Contents) -> FusedWalk:
    return FusedWalk(
        model_map=model_map,
        operators=FusedDecoder(graph=graph, model_map=model_map, contents=contents),
    )


@dataclass(kw_only=True, slots=True)
class FusedDecoder(FusedOperators):
    """Decoders in the fused dialect. The fields are names of values that every block reads."""

    last: str = ""  # [batch], int64: column of the last token of each row that is not padding
    lengths: str = ""  # `last` in int32: with the new tokens, each row has one key more than this
    total: str = ""  # scalar, int32
    bias: str = ""  # [batch, 1, sequence, total]
    num_new: str = ""  # [1], int64: tokens that each row is given now
    wanted: str = ""  # scalar, int64: last tokens of each row whose logits the caller wants
    places: str = ""  # [batch, rows, 1], int64: new tokens that logits are computed of

    def read_mask(self, new: str) -> None:
        """Inputs for mask and positions; lengths and the padding bias from the mask alone.

        The mask is 0 at padding. Its largest number is the number of last tokens with logits: 1 in the masks
        of all clients. An input of its own with a default would be an initializer among the inputs, of which
        onnxruntime warns in every session.

        Rows may be padded on either side. Padding on the left keeps its places in the cache, and the bias
        hides them. A row that is padded on the right ends at the last token that the mask shows: attention
        reads no further, and the next token is written right after it, as if the row were alone.
        """
        graph = self.graph
        given = graph.input("attention_mask", TensorProto.INT64, ["batch", "total"])
        self.wanted = graph.op("ReduceMax", given, keepdims=0)
        mask = graph.op("Min", given, graph.constant("i64_scalar_1", np.array(1, np.int64)))
        self.positions = graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
        total = graph.op("Shape", mask, start=1, end=2)
        self.last = graph.op("ArgMax", mask, axis=1, keepdims=0, select_last_index=1)
        self.num_new = graph.op("Shape", new, start=1, end=2)
        self.lengths = graph.op("Cast", self.last, to=TensorProto.INT32)
        self.total = graph.op("Squeeze", graph.op("Cast", total, to=TensorProto.INT32))
        self.bias = self.padding_bias(mask, self.num_new)

    def choose_rows(self) -> None:
        """The new tokens with logits: as many as the caller wants, up to each row's last that is no padding.

        A row with fewer tokens starts at its first, so that a caller who wants all has them in order.
        """
        graph = self.graph
        zero, one = (graph.constant(f"i64_scalar_{value}", np.array(value, np.int64)) for value in (0, 1))
        # After the last new token, or in a prompt that is padded on the right, where its padding begins.
        end = graph.op("Min", graph.op("Add", self.last, one), self.num_new)
        first = graph.op("Max", graph.op("Sub", end, self.wanted), zero)
        count = graph.op("Squeeze", graph.op("Min", self.wanted, self.num_new))
        steps = graph.op("Range", zero, count, one)
        places = graph.op("Add", graph.op("Unsqueeze", first, graph.integers(1)), steps)
        self.places = graph.op("Unsqueeze", places, graph.integers(2))

    def drops_rows_within(self, block: Block) -> bool:
        """Behind the last block's attention no token reads another, unless latents of all are an output."""
        return not keeps_latents(self.contents, block)

    def rows_with_logits(self, x: str) -> str:
        return self.graph.op("GatherND", x, self.places, batch_dims=1)

    def keep_latents(self, block: Block, hidden: str) -> None:
        add_latents(self.graph, self.contents, block, hidden)

    def token_rows(self, entry: TableEntry, ids: str, scale: float | None) -> str:
        x = operators.lookup(self.graph, entry, ids)
        return self.scale(x, scale, "embedding_scale") if scale else x

    def position_rows(self, entry: TableEntry) -> str:
        positions = self.positions
        if self.model_map.position_offset:
            offset = self.graph.integers(self.model_map.position_offset)
            positions = self.graph.op("Add", positions, offset)
        return operators.lookup(self.graph, entry, positions)

    def softcap(self, x: str, cap: float, name: str) -> str:
        limit = self.graph.constant(name, np.array(cap, np.float32))
        return self.graph.op("Mul", self.graph.op("Tanh", self.graph.op("Div", x, limit)), limit)

    def query_key_value(self, attention: Attention, pack: Pack, x: str) -> list[str]:
        packed = self.project(pack, x)
        if not attention.has_query_key_norm and not rotates_apart(attention):
            return [packed]
        query_width = attention.num_heads * attention.head_dim
        kv_width = attention.num_kv_heads * attention.head_dim
        widths = self.graph.integers(query_width, kv_width, kv_width)
        return self.graph.ops("Split", packed, widths, wanted=(True,) * 3, axis=-1)

    def attention(self, block: Block, parts: Sequence[str]) -> str:
        """GroupQueryAttention with its cache."""
        graph, facts = self.graph, block.attentions[0]
        query, key, value = parts if len(parts) == 3 else (*parts, "", "")
        if facts.has_query_key_norm:
            query = self.head_norm(block, NormPlace.QUERY, query, facts.num_heads)
            key = self.head_norm(block, NormPlace.KEY, key, facts.num_kv_heads)
        if facts.clip:
            query, key, value = (part and self.clip(part, facts.clip) for part in (query, key, value))
        if rotates_apart(facts):
            query = self.rotate(facts, query, facts.num_heads)
            key = self.rotate(facts, key, facts.num_kv_heads)
        past: list[int | str] = ["batch", facts.num_kv_heads, "past", facts.head_dim]
        present: list[int | str] = ["batch", facts.num_kv_heads, "total", facts.head_dim]
        pasts = [
            graph.input(f"past_key_values.{block.index}.{kind}", TensorProto.FLOAT, past)
            for kind in ("key", "value")
        ]
        # No position ids: only differences of angles count, and left padding moves a whole row alike.
        cosine, sine = self.rotation(facts) if rotates_inside(facts) else ("", "")
        attended, *presents = graph.ops(
            "GroupQueryAttention",
            query, key, value, *pasts, self.lengths, self.total, cosine, sine,
            "", self.bias,
            name=f"{block.name}/attention", domain=CONTRIB, wanted=(True,) * 3,
            num_heads=facts.num_heads, kv_num_heads=facts.num_kv_heads,
            scale=facts.scale, local_window_size=facts.window, softcap=facts.softcap or None,
            do_rotary=1 if cosine else None,
            rotary_interleaved=1 if cosine and facts.rope_interleaved else None,
        )  # fmt: skip
        for kind, output in zip(("key", "value"), presents, strict=True):
            graph.output(output, f"present.{block.index}.{kind}", TensorProto.FLOAT, present)
        return attended

    def head_norm(self, block: Block, place: NormPlace, x: str, num_heads: int) -> str:
        """A norm of every head on its own, or of all heads where it is as wide."""
        graph, head_dim = self.graph, block.attentions[0].head_dim
        norm = norm_at(self.contents, block, place)
        assert norm is not None, (block, place)
        if norm.features != head_dim:
            return self.norm(norm, x)
        heads = graph.op("Reshape", x, graph.integers(0, 0, num_heads, head_dim))
        return graph.op("Reshape", self.norm(norm, heads), graph.integers(0, 0, num_heads * head_dim))


def rotates_inside(attention: Attention) -> bool:
    """Whether the attention operator can rotate queries and keys itself: it wants whole vector registers."""
    return bool(attention.rotary_dim and attention.head_dim % 16 == 0 and attention.rotary_dim % 16 == 0)


def rotates_apart(attention: Attention) -> bool:
    return attention.position is PositionKind.ROPE and not rotates_inside(attention)
