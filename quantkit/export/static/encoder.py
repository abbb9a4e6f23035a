"""Encoders of one fixed length in standard operators only, as NPU compilers want them.

One graph reads one text of at most so many tokens, which stands at the beginning of its places; a mask tells
which are filled. Positions are therefore constants, which leaves an NPU nothing to count: those of RoBERTa
begin behind its padding row, as they do for a text without padding inside. Tables stay in the graph; looking
rows up by 32-bit ids compiles. Hidden places are marked by a finite number, as in `emit_static`. What a task
puts on top of the blocks is the row of `HEADS` that the fused graphs use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export.fused.encoder import HEADS, Heads, Steps, depths, is_called, task_of, why_not_encoder
from quantkit.export.graph import Graph
from quantkit.export.static import operators as static_operators
from quantkit.export.static.weights import table_values
from quantkit.model.model_map import Block, EmbeddingKind, ModelMap, Norm, NormPlace, Role
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents, Pack


def why_not_static_encoder(model_map: ModelMap, tokens: int) -> str | None:
    """Why this encoder has no such graph, or None when it has."""
    reason = why_not_encoder(model_map)
    longest = (model_map.max_positions or tokens) - model_map.position_offset
    if reason is None and not 0 < tokens <= longest:
        reason = f"it has {longest} positions, and {tokens} were asked for"
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
    assert model_map.family
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=False)
    _StaticEncoder(
        graph=graph,
        model_map=model_map,
        contents=contents,
        heads=HEADS[model_map.family],
        norms={(norm.block, norm.place): norm for norm in model_map.norms},
        tokens=tokens,
    ).build()
    described = {**metadata, "tokens": tokens, "past": 0}
    return graph.finish(name=model_map.name, target=target, metadata=described)


@dataclass(kw_only=True, slots=True)
class _StaticEncoder:
    graph: Graph
    model_map: ModelMap
    contents: Contents
    heads: Heads
    norms: Mapping[tuple[str | None, NormPlace], Norm]
    tokens: int

    def build(self) -> None:
        graph, shape = self.graph, [1, self.tokens]
        ids = graph.input("input_ids", TensorProto.INT32, shape)
        mask = graph.input("attention_mask", TensorProto.INT32, shape)
        shown = static_operators.floats(graph, "hidden_shown", [static_operators.HIDDEN, 0])
        shown = graph.op("Gather", shown, mask, name="mask/values", axis=0)
        shown = static_operators.reshape(graph, "mask/row", shown, 1, 1, 1, self.tokens)
        x = self.embed(ids)
        for block in depths(self.model_map.blocks):
            x = self.block(block, x, shown)
        self.finish(x)

    def embed(self, ids: str) -> str:
        """The sum of all tables, normed, at the width of the blocks: [tokens, hidden]."""
        graph, model_map = self.graph, self.model_map
        entries = {entry.table.kind: entry for entry in self.contents.tables}
        words = entries.pop(EmbeddingKind.TOKEN)
        x = static_operators.token_rows(graph, words, ids, self.tokens, words.table.num_columns)
        tables = {kind: table_values(graph.checkpoint, entry) for kind, entry in entries.items()}
        places = tables[EmbeddingKind.POSITION][model_map.position_offset :][: self.tokens]
        kinds = tables.get(EmbeddingKind.TOKEN_TYPE)
        if kinds is not None and len(kinds) == 1:  # one kind leaves nothing to be told
            places = places + kinds
        x = self.add("embedding/sum", x, static_operators.floats(graph, "positions/constant", places))
        if kinds is not None and len(kinds) > 1:
            told = graph.input("token_type_ids", TensorProto.INT32, [1, self.tokens])
            found = static_operators.rows(graph, "kinds", kinds, told, self.tokens, kinds.shape[1])
            x = self.add("embedding/kinds", x, found)
        x = self.norm(None, NormPlace.EMBEDDING, x)
        return self.product(self.named(self.heads.widening), x) if self.heads.widening else x

    def add(self, name: str, left: str, right: str) -> str:
        return self.graph.op("Add", left, right, name=name)

    def named(self, name: str | None) -> Pack:
        return next(pack for pack in self.contents.packs if name and is_called(pack.layers[0], name))

    def product(self, pack: Pack, x: str) -> str:
        return static_operators.product(self.graph, self.contents, pack, x)

    def project(self, role: Role, block: Block | None, x: str) -> str:
        pack = self.contents.pack_of(role, block.name if block else None)
        assert pack is not None, (block, role)
        return self.product(pack, x)

    def norm(self, block: Block | None, place: NormPlace, x: str) -> str:
        entry = self.norms[(block.name if block else None, place)]
        weights = [self.graph.weight(f"{entry.name}.{kind}") for kind in ("weight", "bias")]
        return self.graph.op(
            "LayerNormalization", x, *weights, name=entry.name, axis=-1, epsilon=entry.epsilon
        )

    def block(self, block: Block, x: str, shown: str) -> str:
        """Attention and FFN, each summed with what it read and then normed."""
        assert block.ffn is not None
        attended = self.project(Role.ATTENTION_OUT, block, self.attention(block, x, shown))
        x = self.norm(block, NormPlace.AFTER_ATTENTION, self.add(f"{block.name}/attended", x, attended))
        hidden = self.project(Role.FFN_UP, block, x)
        hidden = static_operators.bend(self.graph, f"{block.name}/ffn", block.ffn.activation, hidden)
        fed = self.project(Role.FFN_DOWN, block, hidden)
        return self.norm(block, NormPlace.AFTER_FFN, self.add(f"{block.name}/fed", x, fed))

    def attention(self, block: Block, x: str, shown: str) -> str:
        graph, facts, name = self.graph, block.attentions[0], f"{block.name}/attention"
        count, size = facts.num_heads, facts.head_dim
        query, key, value = (
            static_operators.heads(graph, f"{name}/{kind}", each, count, size, self.tokens)
            for kind, each in zip(("query", "key", "value"), self.query_key_value(block, x), strict=True)
        )
        factor = facts.scale if facts.scale is not None else size**-0.5
        scale = static_operators.floats(graph, f"{name}/scale", factor)
        query = graph.op("Mul", query, scale, name=f"{name}/query/scaled")
        turned = graph.op("Transpose", key, name=f"{name}/keys/turned", perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", query, turned, name=f"{name}/scores")
        masked = self.add(f"{name}/masked", scores, shown)
        seen = graph.op("Softmax", masked, name=f"{name}/softmax", axis=-1)
        given = graph.op("MatMul", seen, value, name=f"{name}/given")
        given = graph.op("Transpose", given, name=f"{name}/given/turned", perm=[0, 2, 1, 3])
        return static_operators.reshape(graph, f"{name}/given/rows", given, self.tokens, count * size)

    def query_key_value(self, block: Block, x: str) -> list[str]:
        roles = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
        pack = self.contents.pack_of(Role.ATTENTION_QUERY, block.name)
        assert pack is not None, block
        if len(pack.layers) != len(roles):
            return [self.project(role, block, x) for role in roles]
        facts = block.attentions[0]
        widths = self.graph.integers(*[facts.num_heads * facts.head_dim] * 3)
        packed = self.product(pack, x)
        return self.graph.ops("Split", packed, widths, name=f"{pack.name}/parts", wanted=(True,) * 3, axis=-1)

    def finish(self, x: str) -> None:
        """What the task makes of the last block's output."""
        heads, task = self.heads, task_of(self.model_map)
        if task == "Model":
            self.give("last_hidden_state", x, 1, self.tokens, self.model_map.hidden_size or 0)
            if heads.pooler and any(is_called(layer, heads.pooler) for layer in self.model_map.layers):
                pooled, width = self.first(x, ((heads.pooler, "Tanh"),))
                self.give("pooler_output", pooled, 1, width)
        elif task == "ForQuestionAnswering":
            scores = self.product(self.named("qa_outputs"), x)
            both = self.graph.ops("Split", scores, wanted=(True, True), name="ends", axis=-1, num_outputs=2)
            for made, name in zip(both, ("start_logits", "end_logits"), strict=True):
                self.give(name, made, 1, self.tokens)
        elif task == "ForSequenceClassification":
            logits, width = self.first(x, heads.classifier)
            self.give("logits", logits, 1, width)
        else:
            reads = self.vocabulary(x) if task == "ForMaskedLM" else x
            head = self.contents.pack_of(Role.LM_HEAD) if task == "ForMaskedLM" else self.named("classifier")
            assert head is not None, "why_not_encoder asks for a head"
            self.give("logits", self.product(head, reads), 1, self.tokens, head.out_features)

    def give(self, name: str, value: str, *sizes: int) -> None:
        """An output, shaped by a node of its own: what the blocks read keeps its two dimensions."""
        made = static_operators.reshape(self.graph, f"{name}/shaped", value, *sizes)
        self.graph.output(made, name, TensorProto.FLOAT, list(sizes))

    def first(self, x: str, steps: Steps) -> tuple[str, int]:
        """(the first place through some projections, its width)."""
        graph = self.graph
        x = graph.op("Gather", x, graph.constant("first", np.zeros(1, np.int32)), name="first/row", axis=0)
        width = 0
        for name, op_type in steps:
            pack = self.named(name)
            x, width = self.product(pack, x), pack.out_features
            x = graph.op(op_type, x, name=f"{pack.name}/{op_type.lower()}") if op_type else x
        return x, width

    def vocabulary(self, x: str) -> str:
        """What the vocabulary's projection reads."""
        ffn = self.model_map.blocks[0].ffn
        assert ffn is not None
        x = self.product(self.named(self.heads.transform), x)
        kind = self.heads.transform_activation or ffn.activation
        x = static_operators.bend(self.graph, self.heads.transform, kind, x)
        return self.norm(None, NormPlace.FINAL, x)
