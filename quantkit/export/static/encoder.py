"""Encoders as static graphs of one fixed length.

A text stands at the beginning of the graph's places, and a mask names the filled ones. Positions are
therefore constants, which leaves an NPU nothing to count: positions of RoBERTa begin behind its padding row,
as they do for a text without padding inside. Tables stay in the graph: lookups by 32-bit ids compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export.encoder import EncoderWalk, heads_of, task_of, why_not_encoder
from quantkit.export.graph import Graph
from quantkit.export.static.operators import StaticOperators, StaticShape, table_values
from quantkit.model.model_map import SUMMED_KINDS, EmbeddingKind, ModelMap
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents


def why_not_static_encoder(model_map: ModelMap, tokens: int) -> str | None:
    """Why this encoder has no such graph, or None when it has."""
    reason = why_not_encoder(model_map)
    heads = heads_of(model_map)
    if reason is None and heads and heads.pools:
        reason = "graphs of fixed shapes are written for texts and their usual heads alone"
    longest = model_map.context or tokens
    if reason is None and model_map.distance_scores:
        reason = "its scores of tokens and distances (disentangled attention) have no operator of fixed shape"
    if reason is None and not 0 < tokens <= longest:
        reason = f"it has {longest} positions, and {tokens} were asked for"
    if reason is None and model_map.reads_mean and task_of(model_map) == "ForSequenceClassification":
        reason = "its classifier reads the mean of a text (classifier_pooling)"
    if reason is None and task_of(model_map) == "ForPreTraining":
        reason = "its output is one number a token, which a runner of static graphs takes for classes"
    return reason


def emit_static_encoder(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    tokens: int,
    target: Target,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """One float graph; batch 1. Inputs, all [1, tokens] and int32: input_ids, attention_mask, and
    token_type_ids where there are several. Outputs are called as transformers calls them.
    """
    reason = why_not_static_encoder(model_map, tokens)
    if reason:
        raise InputError(f"no static graph for it: {reason}", where=model_map.name)
    heads = heads_of(model_map)
    assert heads is not None
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=False)
    operators = StaticEncoder(
        graph=graph, model_map=model_map, contents=contents, shape=StaticShape(tokens=tokens)
    )
    walk = EncoderWalk(model_map=model_map, operators=operators, heads=heads)
    ids = graph.input("input_ids", TensorProto.INT32, [1, tokens])
    operators.read_mask()
    walk.head(walk.blocks(walk.embed(ids)))
    described = {**metadata, "tokens": tokens, "past": 0}
    return graph.finish(name=model_map.name, target=target, metadata=described)


class StaticEncoder(StaticOperators):
    """Encoders in the static dialect."""

    def embed(self, ids: str) -> str:
        graph, tokens = self.graph, self.shape.tokens
        summed = [entry for entry in self.contents.tables if entry.table.kind in SUMMED_KINDS]
        entries = {entry.table.kind: entry for entry in summed}
        x = self.token_rows(entries.pop(EmbeddingKind.TOKEN), ids)
        if not entries:
            return x
        tables = {kind: table_values(graph.checkpoint, entry) for kind, entry in entries.items()}
        places = tables[EmbeddingKind.POSITION][self.model_map.position_offset :][:tokens]
        kinds = tables.get(EmbeddingKind.TOKEN_TYPE)
        if kinds is not None and len(kinds) == 1:  # the same row for every token
            places = places + kinds
        x = graph.op("Add", x, self.constant("positions/constant", places), name="embedding/sum")
        if kinds is not None and len(kinds) > 1:
            kind_ids = graph.input("token_type_ids", TensorProto.INT32, [1, tokens])
            rows = self.rows("kinds", kinds, kind_ids, tokens, kinds.shape[1])
            x = graph.op("Add", x, rows, name="embedding/kinds")
        return x

    def first_token(self, x: str, place: int = 0) -> str:
        assert place == 0, "towers have no static graph"
        first = self.graph.constant("first", np.zeros(1, np.int32))
        return self.graph.op("Gather", x, first, name="first/row", axis=0)

    def last_token(self, x: str) -> str:
        raise AssertionError("towers have no static graph")

    end_token = mean_patch = probed = last_token

    def mean_token(self, x: str) -> str:
        raise AssertionError("a classifier of means has no static graph")

    def output(self, name: str, x: str, width: int | None, *, of_tokens: bool = True) -> str:
        """Shaped by a node of its own, because blocks read two dimensions."""
        shape = [1, *([self.shape.tokens] if of_tokens else []), *([width] if width else [])]
        shaped = self.reshape(f"{name}/shaped", x, *shape)
        self.graph.output(shaped, name, TensorProto.FLOAT, shape)
        return x
