"""Encoder-decoders as three fused graphs: the encoder, the decoder's first step, and each later step.

The first step makes the keys and values of the encoder's states, which later steps read: each of the three
graphs computes something once that the others would compute again. All read one file of weights. Names of
files, inputs and outputs are those of optimum's exports.
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
from quantkit.export.encoder_decoder import (
    DECODER,
    ENCODER,
    DecoderStackWalk,
    StackWalk,
    contents_of_stack,
    map_of,
    why_not_encoder_decoder,
)
from quantkit.export.fused.encoder import FusedEncoder
from quantkit.export.fused.operators import MASKED, FusedOperators
from quantkit.export.graph import CONTRIB, LATER_OPSETS, Graph
from quantkit.model.model_map import Attention, Block, EmbeddingKind, ModelMap, PositionBias, Role
from quantkit.model.position_bias import bucket_of
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents, Pack, TableEntry
from quantkit.runtime.graph import ENCODER_FILE, FIRST_FILE, LATER_FILE, PAST, PRESENT

KEY_VALUE = ("key", "value")
READ = "encoder_sequence_length"


def emit_encoder_decoder(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    target: Target,
    metadata: Mapping[str, Any],
) -> dict[str, onnx.ModelProto]:
    """The graphs by file name; their weights stay in the checkpoint."""
    reason = why_not_encoder_decoder(model_map)
    if reason:
        raise InputError(f"no fused graphs for it: {reason}", where=model_map.name)

    def graph() -> Graph:
        return Graph(checkpoint=checkpoint, keeps_weights_outside=True)

    is_standard = (target.opset, target.ir_version) >= LATER_OPSETS["Attention"]
    graphs = {
        ENCODER_FILE: _encoder(graph(), model_map, contents, is_standard=is_standard),
        FIRST_FILE: _decoder(graph(), model_map, contents, is_first=True),
        LATER_FILE: _decoder(graph(), model_map, contents, is_first=False),
    }
    return {
        name: made.finish(name=model_map.name, target=target, metadata=metadata)
        for name, made in graphs.items()
    }


def _encoder(graph: Graph, model_map: ModelMap, contents: Contents, *, is_standard: bool) -> Graph:
    dialect = Reader(
        graph=graph,
        model_map=map_of(model_map, ENCODER),
        contents=contents_of_stack(contents, ENCODER),
        is_standard=is_standard,
    )
    walk = StackWalk(model_map=dialect.model_map, operators=dialect)
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch", "sequence"])
    dialect.ids, dialect.padding = ids, mask
    if is_standard:
        dialect.mask = dialect.padding_bias(mask, graph.op("Shape", ids, start=1, end=2))
    else:
        dialect.mask = graph.op("Cast", mask, to=TensorProto.INT32)
    dialect.output("last_hidden_state", walk.states(dialect.embed(ids)), model_map.hidden_size)
    return graph


def _decoder(graph: Graph, model_map: ModelMap, contents: Contents, *, is_first: bool) -> Graph:
    dialect = Writer(
        graph=graph,
        model_map=map_of(model_map, DECODER),
        contents=contents_of_stack(contents, DECODER),
    )
    walk = DecoderStackWalk(model_map=dialect.model_map, operators=dialect)
    mask = graph.input("encoder_attention_mask", TensorProto.INT64, ["batch", READ])
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "decoder_sequence_length"])
    if is_first:
        width = model_map.hidden_size or 0
        dialect.states = graph.input("encoder_hidden_states", TensorProto.FLOAT, ["batch", READ, width])
    dialect.count(ids)
    dialect.mask = graph.op("Cast", mask, to=TensorProto.INT32)
    walk.logits(walk.states(dialect.embed(ids)))
    return graph


def embedded(dialect: FusedOperators, ids: str, positions: str) -> str:
    """Tokens, scaled where the family does that, and learned positions."""
    graph, model_map = dialect.graph, dialect.model_map
    tables: dict[EmbeddingKind, TableEntry] = {entry.table.kind: entry for entry in dialect.contents.tables}
    x = operators.lookup(graph, tables[EmbeddingKind.TOKEN], ids)
    if model_map.embedding_scale:
        x = dialect.scale(x, model_map.embedding_scale, "embedding_scale")
    if EmbeddingKind.POSITION not in tables:
        return x
    if model_map.position_offset:
        positions = graph.op("Add", positions, graph.integers(model_map.position_offset))
    return graph.op("Add", x, operators.lookup(graph, tables[EmbeddingKind.POSITION], positions))


@dataclass(kw_only=True, slots=True)
class Reader(FusedEncoder):
    """The encoder in the fused dialect."""

    def embed(self, ids: str) -> str:
        return embedded(self, ids, self.graph.op("Unsqueeze", self.columns(ids), self.graph.integers(0)))


@dataclass(kw_only=True, slots=True)
class Writer(FusedOperators):
    """The decoder in the fused dialect. The fields are names of values that every block reads."""

    states: str = ""  # of the encoder, in the first step; later steps have their keys and values
    mask: str = ""  # [batch, encoder sequence], int32: 1 for tokens that the encoder read, 0 for padding
    bias: str = ""  # of scores by the distance, [1, heads, queries, keys]; empty for none

    def count(self, ids: str) -> None:
        """Positions of the new tokens, which begin behind those of the caches."""
        graph = self.graph
        zero, one = (graph.constant(f"i64_scalar_{value}", np.array(value, np.int64)) for value in (0, 1))
        past = (
            zero
            if self.states
            else graph.op("Squeeze", graph.op("Shape", self.past(0, "key"), start=2, end=3))
        )
        end = graph.op("Add", past, graph.op("Squeeze", graph.op("Shape", ids, start=1, end=2)))
        new = graph.op("Range", past, end, one)
        self.positions = graph.op("Unsqueeze", new, graph.integers(0))
        bias = self.model_map.position_bias_of(DECODER)
        if bias:
            keys = graph.op("Range", zero, end, one)
            self.bias = self.by_distance(bias, new, keys)

    def by_distance(self, bias: PositionBias, queries: str, keys: str) -> str:
        """Beyond the largest distance the bias stays the same, so answers may be of any length."""
        graph, reach = self.graph, bias.max_distance
        rows = graph.constant("position_bias/rows", bucket_of(bias))
        by_distance = graph.op("Gather", graph.weight(f"{bias.table}.weight"), rows, name=bias.table, axis=0)
        by_distance = graph.op("Transpose", by_distance, perm=[1, 0])
        distances = graph.op(
            "Sub",
            graph.op("Unsqueeze", keys, graph.integers(0)),
            graph.op("Unsqueeze", queries, graph.integers(1)),
        )
        ends = [graph.constant(f"position_bias/{end}", np.array(end, np.int64)) for end in (-reach, reach)]
        places = graph.op("Add", graph.op("Clip", distances, *ends), ends[1])
        return graph.op("Unsqueeze", graph.op("Gather", by_distance, places, axis=1), graph.integers(0))

    def embed(self, ids: str) -> str:
        return embedded(self, ids, self.positions)

    def query_key_value(self, attention: Attention, pack: Pack, x: str) -> list[str]:
        return self.graph.ops("Split", self.project(pack, x), wanted=(True,) * 3, axis=-1, num_outputs=3)

    def attention(self, block: Block, parts: Sequence[str]) -> str:
        """Attention to the tokens that are written so far."""
        facts = block.attentions[0]
        pasts = [] if self.states else [self.past(block.index, kind) for kind in KEY_VALUE]
        attended, *presents = self.graph.ops(
            "MultiHeadAttention", *parts, "", "", self.bias, *pasts,
            name=f"{block.name}/attention", domain=CONTRIB, wanted=(True,) * 3,
            num_heads=facts.num_heads, scale=facts.scale, unidirectional=1, mask_filter_value=-MASKED,
        )  # fmt: skip
        for kind, value in zip(KEY_VALUE, presents, strict=True):
            self.keep(block, DECODER, kind, value)
        return attended

    def cross_attention(self, block: Block, query: str) -> str:
        facts = block.attentions[1]
        if self.states:
            roles = (Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
            made = [self.heads(block, facts, role) for role in roles]
            held = [self.keep(block, ENCODER, *each) for each in zip(KEY_VALUE, made, strict=True)]
        else:
            held = [self.past(block.index, kind, ENCODER) for kind in KEY_VALUE]
        return self.graph.op(
            "MultiHeadAttention", query, *held, "", self.mask,
            name=f"{block.name}/cross_attention", domain=CONTRIB,
            num_heads=facts.num_heads, scale=facts.scale, mask_filter_value=-MASKED,
        )  # fmt: skip

    def heads(self, block: Block, attention: Attention, role: Role) -> str:
        """Keys or values of the encoder's states, [batch, heads, encoder sequence, head_dim]."""
        graph = self.graph
        pack = self.contents.pack_of(role, block.name, is_cross=True)
        assert pack is not None, (block, role)
        sizes = graph.integers(0, 0, attention.num_heads, attention.head_dim)
        apart = graph.op("Reshape", self.project(pack, self.states), sizes)
        return graph.op("Transpose", apart, perm=[0, 2, 1, 3])

    def past(self, index: int, kind: str, stack: str = DECODER) -> str:
        """An input with keys or values of a block."""
        name = f"{PAST}.{index}.{stack}.{kind}"
        if all(known.name != name for known in self.graph.inputs):
            length = "past_decoder_sequence_length" if stack == DECODER else READ
            self.graph.input(name, TensorProto.FLOAT, self.cached(stack, length))
        return name

    def keep(self, block: Block, stack: str, kind: str, value: str) -> str:
        """An output with keys or values of a block; returns the name under which they are read on."""
        name, length = f"{PRESENT}.{block.index}.{stack}.{kind}", "total_decoder_sequence_length"
        shape = self.cached(stack, length if stack == DECODER else READ)
        self.graph.output(value, name, TensorProto.FLOAT, shape)
        return name

    def cached(self, stack: str, length: str) -> list[int | str]:
        facts = self.model_map.blocks[0].attentions[stack == ENCODER]
        return ["batch", facts.num_heads, length, facts.head_dim]

    def output(self, name: str, x: str, width: int | None) -> str:
        shape: list[int | str] = ["batch", "decoder_sequence_length", width or 0]
        self.graph.output(x, name, TensorProto.FLOAT, shape)
        return name
