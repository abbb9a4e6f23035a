"""Encoders as fused graphs: one product for query, key and value, one attention operator, few norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export import operators
from quantkit.export.encoder import HEADS, EncoderWalk, why_not_encoder
from quantkit.export.fused.operators import MASKED, FusedOperators
from quantkit.export.graph import CONTRIB, LATER_OPSETS, Graph
from quantkit.export.sentence import emit_sentence
from quantkit.model.model_map import Attention, Block, EmbeddingKind, ModelMap
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents, Pack, TableEntry


def emit_encoder(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    target: Target,
    keeps_weights_outside: bool,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """The whole encoder with the head of its task, as one graph."""
    reason = why_not_encoder(model_map)
    if reason:
        raise InputError(f"no fused graph for it: {reason}", where=model_map.name)
    assert model_map.family
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=keeps_weights_outside)
    dialect = FusedEncoder(
        graph=graph,
        model_map=model_map,
        contents=contents,
        is_standard=(target.opset, target.ir_version) >= LATER_OPSETS["Attention"],
    )
    walk = EncoderWalk(model_map=model_map, operators=dialect, heads=HEADS[model_map.family])
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch", "sequence"])
    x = walk.embed(ids)
    if dialect.is_standard:
        dialect.mask = dialect.padding_bias(mask, graph.op("Shape", ids, start=1, end=2))
    else:
        dialect.mask = graph.op("Cast", mask, to=TensorProto.INT32)
    walk.head(walk.blocks(x))
    if model_map.sentence:
        width = model_map.hidden_size or 0
        emit_sentence(graph, model_map.sentence, states="last_hidden_state", mask=mask, width=width)
    return graph.finish(name=model_map.name, target=target, metadata=metadata)


@dataclass(kw_only=True, slots=True)
class FusedEncoder(FusedOperators):
    """Encoders in the fused dialect."""

    is_standard: bool  # whether attention is the standard's operator, on CPUs the faster one
    mask: str = ""

    def embed(self, ids: str) -> str:
        graph = self.graph
        tables = {entry.table.kind: entry for entry in self.contents.tables}
        words = operators.lookup(graph, tables[EmbeddingKind.TOKEN], ids)
        places = operators.lookup(graph, tables[EmbeddingKind.POSITION], self.positions(ids))
        if EmbeddingKind.TOKEN_TYPE in tables:
            places = graph.op("Add", places, self.token_types(tables[EmbeddingKind.TOKEN_TYPE]))
        return graph.op("Add", words, places)

    def token_types(self, entry: TableEntry) -> str:
        """Embedding of the sentence that a token is in; always the row of a table of one."""
        graph = self.graph
        if entry.table.num_rows > 1:
            kinds = graph.input("token_type_ids", TensorProto.INT64, ["batch", "sequence"])
        else:
            kinds = graph.constant("first_kind", np.zeros((1, 1), np.int64))
        return operators.lookup(graph, entry, kinds)

    def positions(self, ids: str) -> str:
        """Columns, [1, sequence]; where padding has a row of its own, real tokens are counted after it."""
        graph, offset = self.graph, self.model_map.position_offset
        if offset:
            padding = graph.constant("padding", np.array(offset - 1, np.int64))
            is_real = graph.op("Not", graph.op("Equal", ids, padding))
            real = graph.op("Cast", is_real, to=TensorProto.INT64)
            counted = graph.op("CumSum", real, graph.constant("axis_1", np.array(1, np.int64)))
            return graph.op("Add", graph.op("Mul", counted, real), padding)
        length = graph.op("Squeeze", graph.op("Shape", ids, start=1, end=2))
        zero, one = (graph.constant(f"i64_{v}_scalar", np.array(v, np.int64)) for v in (0, 1))
        return graph.op("Unsqueeze", graph.op("Range", zero, length, one), graph.integers(0))

    def query_key_value(self, attention: Attention, pack: Pack, x: str) -> list[str]:
        return self.graph.ops("Split", self.project(pack, x), wanted=(True,) * 3, axis=-1, num_outputs=3)

    def attention(self, block: Block, parts: Sequence[str]) -> str:
        facts, name = block.attentions[0], f"{block.name}/attention"
        heads, scale = facts.num_heads, facts.scale
        if self.is_standard:
            return self.graph.op(
                "Attention", *parts, self.mask, name=name, q_num_heads=heads, kv_num_heads=heads, scale=scale
            )
        return self.graph.op(
            "MultiHeadAttention", *parts, "", self.mask,
            name=name, domain=CONTRIB, num_heads=heads, mask_filter_value=-MASKED, scale=scale,
        )  # fmt: skip

    def first_token(self, x: str) -> str:
        return self.graph.op("Gather", x, self.graph.constant("first", np.array(0, np.int64)), axis=1)

    def output(self, name: str, x: str, width: int | None, *, of_tokens: bool = True) -> str:
        if width is None:
            x = self.graph.op("Squeeze", x, self.graph.integers(-1))
        shape: list[int | str] = ["batch", *(["sequence"] if of_tokens else []), *([width] if width else [])]
        self.graph.output(x, name, TensorProto.FLOAT, shape)
        return name
