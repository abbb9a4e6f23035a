"""Encoders as fused graphs: one product for query, key and value, one attention operator, few norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export import operators
from quantkit.export.encoder import EncoderWalk, heads_of, why_not_encoder
from quantkit.export.fused.operators import MASKED, FusedOperators
from quantkit.export.fused.pictures import embed_picture, pixel_input, probe_tokens
from quantkit.export.graph import CONTRIB, LATER_OPSETS, Graph
from quantkit.export.sentence import emit_sentence
from quantkit.export.walk import norm_at
from quantkit.model.model_map import (
    Attention,
    Block,
    DistanceScores,
    EmbeddingKind,
    ModelMap,
    NormPlace,
    PositionBias,
    PositionKind,
)
from quantkit.model.position_bias import bucket_of, row_of
from quantkit.plan.targets import Target
from quantkit.quantization.layout import PACKED_ROLES, Checkpoint, Contents, Pack, TableEntry


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
    heads = heads_of(model_map)
    assert heads is not None
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=keeps_weights_outside)
    dialect = FusedEncoder(
        graph=graph,
        model_map=model_map,
        contents=contents,
        is_standard=(target.opset, target.ir_version) >= LATER_OPSETS["Attention"],
    )
    walk = EncoderWalk(model_map=model_map, operators=dialect, heads=heads)
    if model_map.picture:
        walk.head(walk.blocks(walk.embed(pixel_input(graph, model_map.picture))))
        return graph.finish(name=model_map.name, target=target, metadata=metadata)
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch", "sequence"])
    dialect.ids, dialect.padding = ids, mask
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


OLD_END = 2


@dataclass(kw_only=True, slots=True)
class FusedEncoder(FusedOperators):
    """Encoders in the fused dialect. Names of values are those that several blocks read."""

    is_standard: bool  # whether attention is the standard's operator, on CPUs the faster one
    ids: str = ""
    padding: str = ""  # the input mask: 1 for tokens, 0 for padding
    mask: str = ""  # the mask of attention without a window
    biases: dict[int | None, str] = field(default_factory=dict)  # of scores, by the window of the attention
    masks: dict[int | None, str] = field(default_factory=dict)  # the mask with those biases
    of_distances: str = ""  # rows of the table of distances
    places: tuple[str, str] | None = None  # of those rows, for the distances of a text

    def embed(self, ids: str) -> str:
        graph = self.graph
        if picture := self.model_map.picture:
            pack = next(pack for pack in self.contents.packs if pack.name == picture.patches)
            width = self.model_map.hidden_size or 0
            return embed_picture(graph, picture, lambda patches: self.project(pack, patches), width)
        tables = {entry.table.kind: entry for entry in self.contents.tables}
        words = operators.lookup(graph, tables[EmbeddingKind.TOKEN], ids)
        places = []
        if EmbeddingKind.POSITION in tables:
            places.append(operators.lookup(graph, tables[EmbeddingKind.POSITION], self.position_ids(ids)))
        if EmbeddingKind.TOKEN_TYPE in tables:
            places.append(self.token_types(tables[EmbeddingKind.TOKEN_TYPE]))
        if not places:
            return words
        return graph.op("Add", words, graph.op("Add", *places) if len(places) > 1 else places[0])

    def token_types(self, entry: TableEntry) -> str:
        """Embedding of the sentence that a token is in; always the row of a table of one."""
        graph = self.graph
        if entry.table.num_rows > 1:
            kinds = graph.input("token_type_ids", TensorProto.INT64, ["batch", "sequence"])
        else:
            kinds = graph.constant("first_kind", np.zeros((1, 1), np.int64))
        return operators.lookup(graph, entry, kinds)

    def position_ids(self, ids: str) -> str:
        """Columns, [1, sequence]; where padding has a row of its own, real tokens are counted after it."""
        graph, offset = self.graph, self.model_map.position_offset
        if offset:
            padding = graph.constant("padding", np.array(offset - 1, np.int64))
            is_real = graph.op("Not", graph.op("Equal", ids, padding))
            real = graph.op("Cast", is_real, to=TensorProto.INT64)
            counted = graph.op("CumSum", real, graph.constant("axis_1", np.array(1, np.int64)))
            return graph.op("Add", graph.op("Mul", counted, real), padding)
        return graph.op("Unsqueeze", self.columns(ids), graph.integers(0))

    def columns(self, ids: str) -> str:
        """0, 1, 2, ... for each token of a row."""
        graph = self.graph
        length = graph.op("Squeeze", graph.op("Shape", ids, start=1, end=2))
        zero, one = (graph.constant(f"i64_{v}_scalar", np.array(v, np.int64)) for v in (0, 1))
        return graph.op("Range", zero, length, one)

    def distances(self) -> str:
        """From each query to each key, [queries, keys]."""
        graph, columns = self.graph, self.columns(self.ids)
        keys, queries = (graph.op("Unsqueeze", columns, graph.integers(axis)) for axis in (0, 1))
        return graph.op("Sub", keys, queries)

    def bias(self, window: int | None) -> str:
        """Added to the scores of every row alike, [1, heads or 1, queries, keys]; empty for nothing."""
        if window not in self.biases:
            by_distance = self.model_map.position_bias_of("encoder")
            parts = [self.position_bias(by_distance)] if by_distance else []
            parts += [self.window_bias(window)] if window else []
            parts += [self.causal_bias()] if self.model_map.blocks[0].attentions[0].is_causal else []
            bias = parts[0] if parts else ""
            self.biases[window] = self.graph.op("Add", *parts) if len(parts) > 1 else bias
        return self.biases[window]

    def position_bias(self, bias: PositionBias) -> str:
        """Beyond the largest distance the bias stays the same, so texts may be of any length."""
        graph, reach = self.graph, bias.max_distance
        rows = graph.constant("position_bias/rows", bucket_of(bias))
        by_distance = graph.op("Gather", graph.weight(f"{bias.table}.weight"), rows, name=bias.table, axis=0)
        by_distance = graph.op("Transpose", by_distance, perm=[1, 0])
        ends = [graph.constant(f"position_bias/{end}", np.array(end, np.int64)) for end in (-reach, reach)]
        places = graph.op("Add", graph.op("Clip", self.distances(), *ends), ends[1])
        return graph.op("Unsqueeze", graph.op("Gather", by_distance, places, axis=1), graph.integers(0))

    def causal_bias(self) -> str:
        """Hides later keys."""
        graph = self.graph
        zero = graph.constant("i64_0_scalar", np.array(0, np.int64))
        is_shown = graph.op("LessOrEqual", self.distances(), zero)
        added = graph.constant("hidden_shown", np.array([-MASKED, 0], np.float32))
        bias = graph.op("Gather", added, graph.op("Cast", is_shown, to=TensorProto.INT64))
        return graph.op("Unsqueeze", bias, graph.integers(0, 1))

    def window_bias(self, window: int) -> str:
        """Hides keys at the distance of the window and farther."""
        graph = self.graph
        limit = graph.constant(f"window_{window}", np.array(window, np.int64))
        is_near = graph.op("Less", graph.op("Abs", self.distances()), limit)
        added = graph.constant("hidden_shown", np.array([-MASKED, 0], np.float32))
        bias = graph.op("Gather", added, graph.op("Cast", is_near, to=TensorProto.INT64))
        return graph.op("Unsqueeze", bias, graph.integers(0, 1))

    def mask_of(self, window: int | None) -> str:
        """Padding and the biases of the scores in one."""
        if window not in self.masks:
            bias = self.bias(window)
            self.masks[window] = self.graph.op("Add", self.mask, bias) if bias else self.mask
        return self.masks[window]

    def distance_rows(self) -> str:
        """The rows of the table of distances, normed where the family does that, [1, rows, hidden]."""
        scores = self.model_map.distance_scores
        assert scores is not None
        if not self.of_distances:
            entry = next(entry for entry in self.contents.tables if entry.table.name == scores.table)
            ids = self.graph.constant("distances/ids", np.arange(2 * scores.reach)[None])
            rows, norm = (
                operators.lookup(self.graph, entry, ids),
                norm_at(self.contents, None, NormPlace.DISTANCE),
            )
            self.of_distances = self.norm(norm, rows) if norm else rows
        return self.of_distances

    def distance_places(self, scores: DistanceScores) -> tuple[str, str]:
        """Rows of the table for the distances L - 1 to -L from key to query, and for -(L - 1) to L, [2 L]."""
        if not self.places:
            graph, reach = self.graph, scores.max_distance
            length = graph.op("Squeeze", graph.op("Shape", self.ids, start=1, end=2))
            first, last = graph.op("Sub", self.scalar(1), length), graph.op("Add", length, self.scalar(1))
            steps = graph.op("Range", first, last, self.scalar(1))
            ends = [self.scalar(end) for end in (-reach, reach)]
            rows = graph.constant("distances/rows", row_of(scores))
            places = [
                graph.op("Add", graph.op("Clip", values, *ends), ends[1])
                for values in (graph.op("Neg", steps), steps)
            ]
            first_rows, second_rows = (graph.op("Gather", rows, place) for place in places)
            self.places = first_rows, second_rows
        return self.places

    def scalar(self, value: int) -> str:
        return self.graph.constant(f"i64_{value}_scalar", np.array(value, np.int64))

    def scores_of_distances(self, block: Block, parts: Sequence[str], scores: DistanceScores) -> str:
        """Scores of tokens and distances, [batch, heads, queries, keys].

        Keys and queries of distances depend on weights alone: onnxruntime computes them as it opens a graph.
        """
        graph, facts = self.graph, block.attentions[0]
        rows = self.projected(block, self.distance_rows())
        terms = []
        for token, distance, places, is_wanted in (
            (parts[0], rows[1], self.distance_places(scores)[0], scores.has_keys),
            (parts[1], rows[0], self.distance_places(scores)[1], scores.has_queries),
        ):
            if is_wanted:
                scale = facts.scale if facts.scale is not None else facts.head_dim**-0.5
                heads_HRD = graph.op("Squeeze", self.heads(facts, distance), graph.integers(0))
                heads_HRD = self.scale(heads_HRD, scale, f"score_scale_{scale:g}")
                chosen_HDR = graph.op(
                    "Transpose", graph.op("Gather", heads_HRD, places, axis=1), perm=[0, 2, 1]
                )
                terms.append(self.by_place(graph.op("MatMul", self.heads(facts, token), chosen_HDR)))
        if scores.has_queries:  # whose rows are the keys
            terms[-1] = graph.op("Transpose", terms[-1], perm=[0, 1, 3, 2])
        return graph.op("Add", *terms) if len(terms) > 1 else "".join(terms)

    def projected(self, block: Block, x: str) -> list[str]:
        """Query, key and value of other rows than the tokens of a block."""
        packs = [self.contents.pack_of(role, block.name) for role in PACKED_ROLES]
        assert packs[0] and packs[1]
        if packs[0] is packs[1]:
            packed = operators.constant_matmul(self.graph, packs[0], x)
            return self.graph.ops("Split", packed, wanted=(True,) * 3, axis=-1, num_outputs=3)
        return [operators.constant_matmul(self.graph, pack, x) for pack in (packs[0], packs[1])]

    def heads(self, attention: Attention, x: str) -> str:
        """[batch, tokens, heads x size] as [batch, heads, tokens, size]."""
        apart = self.graph.op(
            "Reshape", x, self.graph.integers(0, 0, attention.num_heads, attention.head_dim)
        )
        return self.graph.op("Transpose", apart, perm=[0, 2, 1, 3])

    def by_place(self, x: str) -> str:
        """Column j - i + L - 1 of row i of [..., L, 2 L] as column j: rows of 2 L - 1 in the flat values."""
        graph = self.graph
        length = graph.op("Shape", self.ids, start=1, end=2)
        width = graph.op("Sub", graph.op("Add", length, length), graph.integers(1))
        flat = graph.op("Reshape", x, graph.integers(0, 0, -1))
        first = graph.op("Sub", length, graph.integers(1))
        last = graph.op("Add", first, graph.op("Mul", length, width))
        skewed = graph.op("Slice", flat, first, last, graph.integers(2))
        shape = graph.op("Concat", graph.integers(0, 0), length, width, axis=0)
        skewed = graph.op("Reshape", skewed, shape)
        return graph.op("Slice", skewed, graph.integers(0), length, graph.integers(3))

    def query_key_value(self, attention: Attention, pack: Pack, x: str) -> list[str]:
        return self.graph.ops("Split", self.project(pack, x), wanted=(True,) * 3, axis=-1, num_outputs=3)

    def attention(self, block: Block, parts: Sequence[str]) -> str:
        facts, name = block.attentions[0], f"{block.name}/attention"
        heads, scale = facts.num_heads, facts.scale
        if facts.position is PositionKind.ROPE:
            self.positions = self.graph.integers(0)  # of the first column
            parts = [*(self.rotate(facts, part, heads) for part in parts[:2]), parts[2]]
        distances = self.model_map.distance_scores
        added = self.scores_of_distances(block, parts, distances) if distances else ""
        if self.is_standard:
            mask = self.mask_of(facts.window)
            mask = self.graph.op("Add", added, mask) if added else mask
            return self.graph.op(
                "Attention", *parts, mask, name=name, q_num_heads=heads, kv_num_heads=heads, scale=scale
            )
        bias = self.bias(facts.window)
        bias = self.graph.op("Add", added, bias) if added and bias else added or bias
        return self.graph.op(
            "MultiHeadAttention", *parts, "", self.mask, *([bias] if bias else []),
            name=name, domain=CONTRIB, num_heads=heads, mask_filter_value=-MASKED, scale=scale,
        )  # fmt: skip

    def first_token(self, x: str, place: int = 0) -> str:
        name = "first" if place == 0 else f"place_{place}"
        return self.graph.op("Gather", x, self.graph.constant(name, np.array(place, np.int64)), axis=1)

    def last_token(self, x: str) -> str:
        return self.graph.op("Gather", x, self.graph.constant("last", np.array(-1, np.int64)), axis=1)

    def end_token(self, x: str) -> str:
        """The first place with the token that ends a text.

        Where config.json says 2, it is the one with the largest id, as in transformers: configs of the first
        CLIP models name a wrong token.
        """
        graph, end = self.graph, self.model_map.end_token
        found = self.ids
        if end is not None and end != OLD_END:
            found = graph.op("Equal", self.ids, graph.constant("end_token", np.array(end, np.int64)))
        places = graph.op("ArgMax", graph.op("Cast", found, to=TensorProto.INT32), axis=1, keepdims=1)
        return graph.op("GatherND", x, places, batch_dims=1)

    def mean_patch(self, x: str) -> str:
        graph, picture = self.graph, self.model_map.picture
        assert picture is not None
        first, end = graph.integers(len(picture.first)), graph.integers(np.iinfo(np.int64).max)
        patches = graph.op("Slice", x, first, end, graph.integers(1))
        return graph.op("ReduceMean", patches, graph.integers(1), keepdims=0)

    def probed(self, x: str) -> str:
        picture = self.model_map.picture
        assert picture is not None and picture.probe
        heads = self.model_map.blocks[0].attentions[0].num_heads
        return probe_tokens(self.graph, picture, x, width=self.model_map.hidden_size or 0, num_heads=heads)

    def mean_token(self, x: str) -> str:
        graph = self.graph
        real = graph.op("Cast", self.padding, to=TensorProto.FLOAT)
        count = graph.op("ReduceSum", real, graph.integers(1), keepdims=1)
        weights = graph.op("Unsqueeze", graph.op("Div", real, count), graph.integers(1))
        return graph.op("Squeeze", graph.op("MatMul", weights, x), graph.integers(1))

    def output(self, name: str, x: str, width: int | None, *, of_tokens: bool = True) -> str:
        if width is None:
            x = self.graph.op("Squeeze", x, self.graph.integers(-1))
        shape: list[int | str] = ["batch", *(["sequence"] if of_tokens else []), *([width] if width else [])]
        self.graph.output(x, name, TensorProto.FLOAT, shape)
        return name
