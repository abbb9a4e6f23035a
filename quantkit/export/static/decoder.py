"""Decoders of fixed shapes in standard operators only, as NPU compilers want them.

Two graphs make a decoder: one reads a whole prompt, the other a single token with a cache of fixed length.
Neither writes into a cache: each gives the keys and values of its own tokens, and the host puts them where
they belong. Hidden places are marked by a finite number, because the range of a value decides its rounding
and an infinite one leaves nothing of it. Both graphs call a value by the same name, so that ranges which
were seen in one hold for the other. Which norms stand where comes from the model map, as in `emit`.

Two graphs of fixed shape for prompt and token, e.g. in Xu et al. 2024 (https://arxiv.org/abs/2407.05858).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export.fused.decoder import OPT_PROJECTIONS, why_not
from quantkit.export.graph import Graph
from quantkit.export.rotary import rotation_of
from quantkit.export.static import operators as static_operators
from quantkit.export.static.operators import HIDDEN
from quantkit.export.static.weights import Floats, table_values
from quantkit.model.model_map import (
    Activation,
    Attention,
    Block,
    EmbeddingKind,
    ModelMap,
    Norm,
    NormKind,
    NormPlace,
    NormPlacement,
    PositionKind,
    Residual,
    Role,
)
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents, Pack


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """What is fixed of a graph."""

    tokens: int  # read at once
    past: int = 0  # places of the cache in front of them
    gives_all_logits: bool = True  # else those of the token that an input `logit_position` names

    @property
    def total(self) -> int:
        """Places that a token can look at."""
        return self.past + self.tokens


def why_not_static(model_map: ModelMap, shape: StaticShape) -> str | None:
    """Why this model has no such graph, or None when it has."""
    windows = [attention.window for block in model_map.blocks for attention in block.attentions]
    limits = [window for window in windows if window is not None and window < shape.total]
    reason = why_not(model_map)
    if reason is None and limits:
        reason = (
            f"its attention looks back {min(limits)} tokens only, and {shape.total} places were asked for"
        )
    if reason is None and model_map.max_positions and shape.total > model_map.max_positions:
        reason = f"it has {model_map.max_positions} positions, and {shape.total} were asked for"
    return reason


def emit_static(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    shape: StaticShape,
    target: Target,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """One float graph of fixed shapes; batch 1. Inputs and outputs:

    input_ids [1, tokens], attention_mask [1, past + tokens], position_ids [1, tokens] where there is a past,
    logit_position [1] unless all logits are given, all int32; past_key_values.N.key and .value
    [1, heads, past, head size] -> logits, present.N.key and .value [1, heads, tokens, head size].
    """
    reason = why_not_static(model_map, shape)
    if reason:
        raise InputError(f"no static graph for it: {reason}", where=model_map.name)
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=False)
    norms = {(norm.block, norm.place): norm for norm in model_map.norms}
    spells_norms = "RMSNormalization" not in (target.standard_operators or ("RMSNormalization",))
    _Static(
        graph=graph,
        model_map=model_map,
        contents=contents,
        norms=norms,
        shape=shape,
        spells_norms=spells_norms,
    ).build()
    described = {**metadata, "tokens": shape.tokens, "past": shape.past}
    return graph.finish(name=model_map.name, target=target, metadata=described)


@dataclass(kw_only=True, slots=True)
class _Static:
    graph: Graph
    model_map: ModelMap
    contents: Contents
    norms: Mapping[tuple[str | None, NormPlace], Norm]
    shape: StaticShape
    spells_norms: bool = False  # RMS norms in operators that were there before theirs
    positions: str = ""  # empty where they are 0, 1, 2, ...
    rotations: dict[Any, list[str]] = field(default_factory=dict)  # cosines and signed sines

    def build(self) -> None:
        graph, shape = self.graph, self.shape
        ids = graph.input("input_ids", TensorProto.INT32, [1, shape.tokens])
        mask = graph.input("attention_mask", TensorProto.INT32, [1, shape.total])
        if shape.past:
            self.positions = graph.input("position_ids", TensorProto.INT32, [1, shape.tokens])
        shown = graph.constant("hidden_shown", np.array([HIDDEN, 0], np.float32))
        shown = graph.op("Gather", shown, mask, name="mask/values", axis=0)
        shown = self.reshape("mask/row", shown, 1, 1, 1, shape.total)
        x = self.embed(ids)
        for index, block in enumerate(self.model_map.blocks):
            x = self.block(index, block, x, shown)
        self.head(x)

    def reshape(self, name: str, x: str, *sizes: int) -> str:
        return static_operators.reshape(self.graph, name, x, *sizes)

    def add(self, name: str, left: str, right: str) -> str:
        return self.graph.op("Add", left, right, name=name)

    def constant(self, name: str, values: Any) -> str:
        return static_operators.floats(self.graph, name, values)

    def embed(self, ids: str) -> str:
        model_map, shape = self.model_map, self.shape
        tables = {entry.table.kind: entry for entry in self.contents.tables}
        words, factor = tables[EmbeddingKind.TOKEN], model_map.embedding_scale or 1.0
        sizes = (shape.tokens, words.table.num_columns)
        x = static_operators.token_rows(self.graph, words, ids, *sizes, factor=factor)
        x = self.optional_projection(OPT_PROJECTIONS[0], x)
        if EmbeddingKind.POSITION in tables:
            learned = table_values(self.graph.checkpoint, tables[EmbeddingKind.POSITION])
            learned = learned[model_map.position_offset :][: shape.total]
            places = self.at_positions("positions", learned, shape.tokens, learned.shape[1])
            x = self.add("embedding/sum", x, places)
        return x

    def rows(self, name: str, table: Floats, ids: str, *sizes: int) -> str:
        return static_operators.rows(self.graph, name, table, ids, *sizes)

    def at_positions(self, name: str, table: Floats, *sizes: int) -> str:
        """The rows of a table that belong to the tokens' positions: constant where positions are."""
        if self.positions:
            return self.rows(name, table, self.positions, *sizes)
        return self.constant(f"{name}/constant", table[: self.shape.tokens].reshape(sizes))

    def optional_projection(self, name: str, x: str) -> str:
        found = next((pack for pack in self.contents.packs if pack.name.endswith(name)), None)
        return self.product(found, x) if found else x

    def product(self, pack: Pack, x: str) -> str:
        return static_operators.product(self.graph, self.contents, pack, x)

    def project(self, block: Block, role: Role, x: str) -> str:
        pack = self.contents.pack_of(role, block.name)
        assert pack is not None, (block.name, role)
        return self.product(pack, x)

    def norm(self, block: Block | None, place: NormPlace, x: str) -> str:
        """The norm at a place, or nothing where the family has none there."""
        entry = self.norms.get((block.name if block else None, place))
        if entry is None:
            return x
        inputs = [x, self.graph.weight(f"{entry.name}.weight")]
        if entry.name in self.contents.norm_biases:
            inputs.append(self.graph.weight(f"{entry.name}.bias"))
        if entry.kind is NormKind.RMS_NORM and self.spells_norms:
            return self.spelled_norm(entry, *inputs)
        kind = "LayerNormalization" if entry.kind is NormKind.LAYER_NORM else "RMSNormalization"
        return self.graph.op(kind, *inputs, name=entry.name, axis=-1, epsilon=entry.epsilon)

    def spelled_norm(self, entry: Norm, x: str, gain: str) -> str:
        graph, name = self.graph, entry.name
        squares = graph.op("Mul", x, x, name=f"{name}/squares")
        mean = graph.op("ReduceMean", squares, graph.integers(-1), name=f"{name}/mean", keepdims=1)
        root = graph.op(
            "Sqrt", self.add(f"{name}/safe", mean, self.constant(f"{name}/epsilon", entry.epsilon))
        )
        return graph.op("Mul", graph.op("Div", x, root, name=f"{name}/unit"), gain, name=name)

    def block(self, index: int, block: Block, x: str, shown: str) -> str:
        middle, end = f"{block.name}/attended", f"{block.name}/fed"
        if block.norm_placement is NormPlacement.POST:
            attended = self.attention(index, block, x, shown)
            x = self.norm(block, NormPlace.AFTER_ATTENTION, self.add(middle, x, attended))
            if block.ffn is None:
                return x
            return self.norm(block, NormPlace.AFTER_FFN, self.add(end, x, self.ffn(block, x)))
        attended = self.attention(index, block, self.norm(block, NormPlace.BEFORE_ATTENTION, x), shown)
        if block.residual is Residual.PARALLEL:
            fed = self.ffn(block, self.norm(block, NormPlace.BEFORE_FFN, x))
            return self.add(end, self.add(middle, x, attended), fed)
        x = self.add(middle, x, self.norm(block, NormPlace.AFTER_ATTENTION, attended))
        if block.ffn is None:
            return x
        fed = self.ffn(block, self.norm(block, NormPlace.BEFORE_FFN, x))
        return self.add(end, x, self.norm(block, NormPlace.AFTER_FFN, fed))

    def attention(self, index: int, block: Block, x: str, shown: str) -> str:
        graph, shape, name = self.graph, self.shape, f"{block.name}/attention"
        facts = block.attentions[0]
        kv_heads, group, size = facts.num_kv_heads, facts.num_heads // facts.num_kv_heads, facts.head_dim
        query, key, value = self.query_key_value(block, x)
        query = self.heads(f"{name}/query", query, facts.num_heads, size)
        key = self.heads(f"{name}/key", key, kv_heads, size)
        value = self.heads(f"{name}/value", value, kv_heads, size)
        if facts.has_query_key_norm:
            query = self.norm(block, NormPlace.QUERY, query)
            key = self.norm(block, NormPlace.KEY, key)
        if facts.position is PositionKind.ROPE:
            query, key = self.rotate(f"{name}/query", facts, query), self.rotate(f"{name}/key", facts, key)
        scale = self.constant(f"{name}/scale", facts.scale if facts.scale is not None else size**-0.5)
        query = graph.op("Mul", query, scale, name=f"{name}/query/scaled")
        if group > 1:  # the queries that share a key stand below each other
            query = self.reshape(f"{name}/query/groups", query, 1, kv_heads, group * shape.tokens, size)
        whole = [self.joined(index, kind, new) for kind, new in (("key", key), ("value", value))]
        turned = graph.op("Transpose", whole[0], name=f"{name}/keys/turned", perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", query, turned, name=f"{name}/scores")
        if facts.softcap:
            scores = self.softcap(f"{name}/softcap", scores, facts.softcap)
        masked = self.add(f"{name}/masked", scores, self.mask(shown, group))
        seen = graph.op("Softmax", masked, name=f"{name}/softmax", axis=-1)
        given = graph.op("MatMul", seen, whole[1], name=f"{name}/given")
        if group > 1:
            given = self.reshape(f"{name}/given/heads", given, 1, facts.num_heads, shape.tokens, size)
        given = graph.op("Transpose", given, name=f"{name}/given/turned", perm=[0, 2, 1, 3])
        return self.project(
            block,
            Role.ATTENTION_OUT,
            self.reshape(f"{name}/given/rows", given, shape.tokens, facts.num_heads * size),
        )

    def query_key_value(self, block: Block, x: str) -> list[str]:
        facts = block.attentions[0]
        pack = self.contents.pack_of(Role.ATTENTION_QUERY, block.name)
        assert pack is not None
        if len(pack.layers) != 3:
            roles = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
            return [self.project(block, role, x) for role in roles]
        kv_width = facts.num_kv_heads * facts.head_dim
        widths = self.graph.integers(facts.num_heads * facts.head_dim, kv_width, kv_width)
        packed = self.product(pack, x)
        return self.graph.ops("Split", packed, widths, name=f"{pack.name}/parts", wanted=(True,) * 3, axis=-1)

    def heads(self, name: str, x: str, count: int, size: int) -> str:
        return static_operators.heads(self.graph, name, x, count, size, self.shape.tokens)

    def rotate(self, name: str, facts: Attention, x: str) -> str:
        """x cos + (x with its halves swapped) sin, the sign of the swap being in the table of sines."""
        graph, shape = self.graph, self.shape
        assert facts.rotary_dim is not None
        sizes = (1, 1, shape.tokens, facts.head_dim)
        half, rest = facts.rotary_dim // 2, facts.head_dim - facts.rotary_dim
        turn = rotation_of(facts, max_positions=self.model_map.max_positions or 2048)
        angles = np.arange(shape.total, dtype=np.float32)[:, None] * turn.frequencies[None, :]
        cos, sin = np.cos(angles) * turn.factor, np.sin(angles) * turn.factor
        still = np.zeros((shape.total, rest), np.float32)
        key = (facts.rope_theta, facts.rotary_dim, facts.rope_scaling)
        if key not in self.rotations:
            label = f"rope_{len(self.rotations)}"
            tables = {"cos": [cos, cos, still + 1], "sin": [-sin, sin, still]}
            self.rotations[key] = [
                self.at_positions(f"{label}/{kind}", np.concatenate(parts, axis=1), *sizes)
                for kind, parts in tables.items()
            ]
        factors = self.rotations[key]
        widths = graph.integers(*([half, half, rest] if rest else [half, half]))
        wanted = (True,) * (3 if rest else 2)
        parts = graph.ops("Split", x, widths, name=f"{name}/halves", wanted=wanted, axis=-1)
        swapped = graph.op("Concat", parts[1], parts[0], *parts[2:], name=f"{name}/swapped", axis=-1)
        straight = graph.op("Mul", x, factors[0], name=f"{name}/straight")
        across = graph.op("Mul", swapped, factors[1], name=f"{name}/across")
        return self.add(f"{name}/rotated", straight, across)

    def joined(self, index: int, kind: str, new: str) -> str:
        """Keys or values of all places; the new ones are an output of the graph."""
        graph, shape, facts = self.graph, self.shape, self.model_map.blocks[index].attentions[0]
        size = (facts.num_kv_heads, facts.head_dim)
        made = f"present.{index}.{kind}"
        graph.output(new, made, TensorProto.FLOAT, [1, size[0], shape.tokens, size[1]])
        if not shape.past:
            return made
        name = f"past_key_values.{index}.{kind}"
        past = graph.input(name, TensorProto.FLOAT, [1, size[0], shape.past, size[1]])
        return graph.op("Concat", past, made, name=f"{name}/joined", axis=2)

    def mask(self, shown: str, group: int) -> str:
        """What is added to the scores, [1, 1, group x tokens, total]."""
        tokens, total = self.shape.tokens, self.shape.total
        if tokens == 1:
            return shown
        if f"mask/{group}" not in self.graph.labels:
            later = np.arange(total)[None, :] > np.arange(tokens)[:, None] + self.shape.past
            rows = np.tile(np.where(later, np.float32(HIDDEN), np.float32(0)), (group, 1))
            self.add(f"mask/{group}", shown, self.constant(f"mask/later/{group}", rows[None, None]))
        return f"mask/{group}/out0"

    def softcap(self, name: str, x: str, cap: float) -> str:
        inverse, limit = self.constant(f"{name}/inverse", 1 / cap), self.constant(f"{name}/cap", cap)
        small = self.graph.op("Mul", x, inverse, name=f"{name}/small")
        bent = self.graph.op("Tanh", small, name=f"{name}/bent")
        return self.graph.op("Mul", bent, limit, name=f"{name}/large")

    def ffn(self, block: Block, x: str) -> str:
        assert block.ffn is not None
        up = self.project(block, Role.FFN_UP, x)
        name = f"{block.name}/ffn"
        if self.contents.pack_of(Role.FFN_GATE, block.name):
            gate = self.bend(name, block.ffn.activation, self.project(block, Role.FFN_GATE, x))
            hidden = self.graph.op("Mul", gate, up, name=f"{name}/gated")
        else:
            hidden = self.bend(name, block.ffn.activation, up)
        return self.project(block, Role.FFN_DOWN, hidden)

    def bend(self, name: str, kind: Activation, x: str) -> str:
        return static_operators.bend(self.graph, name, kind, x)

    def head(self, x: str) -> str:
        graph, shape = self.graph, self.shape
        count = shape.tokens
        if not shape.gives_all_logits and shape.tokens > 1:
            place = graph.input("logit_position", TensorProto.INT32, [1])
            x, count = graph.op("Gather", x, place, name="last", axis=0), 1
        x = self.norm(None, NormPlace.FINAL, x)
        x = self.optional_projection(OPT_PROJECTIONS[1], x)
        pack = self.contents.pack_of(Role.LM_HEAD)
        assert pack is not None, "why_not asks for a head"
        logits = self.product(pack, x)
        if self.model_map.final_softcap:
            logits = self.softcap("softcap", logits, self.model_map.final_softcap)
        logits = self.reshape("logits/shaped", logits, 1, count, pack.out_features)
        graph.output(logits, "logits", TensorProto.FLOAT, [1, count, pack.out_features])
        return "logits"
