"""Encoders written straight from a family's facts as fused graphs: BERT, RoBERTa, DistilBERT, ALBERT.

onnxruntime finds attention and add-and-norm in a traced encoder by its float products; once these are
integer, nothing is found and dozens of small operators stay. Here they are put in place from the start:
one product for query, key and value, one attention operator, one activation, few norms.
What a task puts on top of the blocks is a row of `HEADS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export import operators
from quantkit.export.graph import CONTRIB, LATER_OPSETS, Graph
from quantkit.model.model_map import (
    Activation,
    Block,
    EmbeddingKind,
    FfnKind,
    Layer,
    ModelMap,
    Norm,
    NormPlace,
    NormPlacement,
    PositionKind,
    Residual,
    Role,
)
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents, Pack, TableEntry

Steps = tuple[tuple[str, str], ...]  # (projection, the standard operator on its output or none)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What one family puts on its blocks; names are those of its projections without the prefix."""

    classes: tuple[str, ...]  # how its classes are called, before the task
    transform: str  # before the vocabulary, followed by the activation and a norm
    classifier: Steps  # what a sequence classifier reads the first position with
    pooler: str | None = None  # tanh of this projection of the first position
    transform_activation: Activation | None = None  # None: the blocks' own
    widening: str | None = None  # from the width of the embeddings to that of the blocks


HEADS: dict[str, Heads] = {
    "bert": Heads(
        classes=("Bert",),
        transform="cls.predictions.transform.dense",
        pooler="pooler.dense",
        classifier=(("pooler.dense", "Tanh"), ("classifier", "")),
    ),
    "roberta": Heads(
        classes=("Roberta", "XLMRoberta", "Camembert"),
        transform="lm_head.dense",
        pooler="pooler.dense",
        classifier=(("classifier.dense", "Tanh"), ("classifier.out_proj", "")),
        transform_activation=Activation.GELU,
    ),
    "distilbert": Heads(
        classes=("DistilBert",),
        transform="vocab_transform",
        classifier=(("pre_classifier", "Relu"), ("classifier", "")),
    ),
    "albert": Heads(
        classes=("Albert",),
        transform="predictions.dense",
        pooler="pooler",
        classifier=(("pooler", "Tanh"), ("classifier", "")),
        widening="encoder.embedding_hidden_mapping_in",
    ),
}
TASKS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "Model",
)


def why_not_encoder(model_map: ModelMap) -> str | None:
    """Why this encoder cannot be emitted directly, or None when it can."""
    if model_map.family is None:
        return "its family has no row in the table"
    if model_map.family not in HEADS:
        return f"the family {model_map.family} is no plain encoder"
    task = task_of(model_map)
    if task is None:
        return f"{model_map.architecture} is a task without a fused head"
    # Under transformers 5 an untied head keeps a second bias beside it, which no forward pass reads.
    unread = {
        f"{layer.matrix.rpartition('.')[0]}.bias" for layer in model_map.layers if layer.role is Role.LM_HEAD
    }
    unknown = [entry.name for entry in model_map.unmapped if entry.name not in unread]
    if unknown:
        return f"'{unknown[0]}' is a parameter of no known kind"
    for block in model_map.blocks:
        reason = _why_not_block(block)
        if reason:
            return reason
    known = _head_projections(HEADS[model_map.family], task)
    others = [layer for layer in model_map.layers if layer.role is Role.OTHER]
    strays = [layer.name for layer in others if not any(is_called(layer, name) for name in known)]
    return f"'{strays[0]}' has no place in a fused graph" if strays else None


def _why_not_block(block: Block) -> str | None:
    attention, ffn = block.attentions[0], block.ffn
    if block.norm_placement is not NormPlacement.POST or block.residual is not Residual.SEQUENTIAL:
        return f"'{block.name}' is not of the kind whose norms follow each sum"
    if len(block.attentions) > 1 or attention.is_causal or attention.num_kv_heads != attention.num_heads:
        return f"'{block.name}' has more than plain attention in both directions"
    if attention.position is not PositionKind.LEARNED or attention.window or attention.softcap:
        return f"its positions are of kind {attention.position}, or its attention is not plain"
    if ffn is None or ffn.kind is not FfnKind.STANDARD or ffn.activation not in operators.ACTIVATION_OPS:
        return "its FFN has an activation without a fused operator"
    return None


def task_of(model_map: ModelMap) -> str | None:
    """The row of `TASKS` that the architecture's name ends with."""
    classes = HEADS[model_map.family].classes if model_map.family in HEADS else ()
    return next((task for task in TASKS for name in classes if model_map.architecture == name + task), None)


def _head_projections(heads: Heads, task: str) -> set[str]:
    """Projections outside of the blocks that the task's graph computes."""
    names: Mapping[str, tuple[str | None, ...]] = {
        "Model": (heads.pooler,),
        "ForMaskedLM": (heads.transform,),
        "ForSequenceClassification": tuple(name for name, _ in heads.classifier),
        "ForTokenClassification": ("classifier",),
        "ForQuestionAnswering": ("qa_outputs",),
    }
    return {name for name in (*names[task], heads.widening) if name}


def is_called(layer: Layer, name: str) -> bool:
    """Whether this is the projection of that name, whatever module it lies in."""
    return layer.name == name or layer.name.endswith(f".{name}")


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
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=keeps_weights_outside)
    assert model_map.family
    emitter = _Encoder(
        graph=graph,
        model_map=model_map,
        contents=contents,
        heads=HEADS[model_map.family],
        norms={(norm.block, norm.place): norm for norm in model_map.norms},
        is_standard=(target.opset, target.ir_version) >= LATER_OPSETS["Attention"],
    )
    emitter.build()
    return graph.finish(name=model_map.name, target=target, metadata=metadata)


@dataclass(kw_only=True, slots=True)
class _Encoder:
    graph: Graph
    model_map: ModelMap
    contents: Contents
    heads: Heads
    norms: Mapping[tuple[str | None, NormPlace], Norm]
    is_standard: bool  # whether attention is the standard's operator, on CPUs the faster one

    def build(self) -> None:
        graph = self.graph
        shape = ["batch", "sequence"]
        ids = graph.input("input_ids", TensorProto.INT64, shape)
        mask = graph.input("attention_mask", TensorProto.INT64, shape)
        x = self.embed(ids)
        if self.is_standard:
            seen = operators.hidden_keys(graph, mask, graph.op("Shape", ids, start=1, end=2))
        else:
            seen = graph.op("Cast", mask, to=TensorProto.INT32)
        for block in depths(self.model_map.blocks):
            x = self.block(block, x, seen)
        self.finish(x)

    def embed(self, ids: str) -> str:
        """The sum of all tables, normed, at the width of the blocks."""
        graph = self.graph
        tables = {entry.table.kind: entry for entry in self.contents.tables}
        words = operators.lookup(graph, tables[EmbeddingKind.TOKEN], ids)
        places = operators.lookup(graph, tables[EmbeddingKind.POSITION], self.positions(ids))
        if EmbeddingKind.TOKEN_TYPE in tables:
            kinds = self.token_types(tables[EmbeddingKind.TOKEN_TYPE])
            places = graph.op("Add", places, kinds)
        norm = self.norms[(None, NormPlace.EMBEDDING)]
        x = operators.norm(graph, norm, self.contents, graph.op("Add", words, places))
        return self.project(self.named(self.heads.widening), x) if self.heads.widening else x

    def token_types(self, entry: TableEntry) -> str:
        """Which sentence a token is of; a table of one row leaves nothing to be told."""
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

    def named(self, name: str | None) -> Pack:
        return next(pack for pack in self.contents.packs if name and is_called(pack.layers[0], name))

    def of_role(self, role: Role, block: Block | None = None) -> Pack:
        pack = self.contents.pack_of(role, block.name if block else None)
        assert pack is not None, (block, role)
        return pack

    def project(self, pack: Pack, x: str) -> str:
        return operators.matmul(self.graph, pack, x)

    def block(self, block: Block, x: str, seen: str) -> str:
        """Attention and FFN, each summed with what it read and then normed."""
        assert block.ffn is not None
        attended = self.project(self.of_role(Role.ATTENTION_OUT, block), self.attention(block, x, seen))
        x = self.add_and_norm(block, NormPlace.AFTER_ATTENTION, x, attended)
        hidden = self.project(self.of_role(Role.FFN_UP, block), x)
        hidden = operators.activation(self.graph, block.ffn.activation, hidden, name=block.name)
        fed = self.project(self.of_role(Role.FFN_DOWN, block), hidden)
        return self.add_and_norm(block, NormPlace.AFTER_FFN, x, fed)

    def add_and_norm(self, block: Block, place: NormPlace, x: str, pending: str) -> str:
        norm = self.norms[(block.name, place)]
        return operators.add_and_norm(self.graph, norm, self.contents, x, pending, keeps_sum=False)[0]

    def attention(self, block: Block, x: str, seen: str) -> str:
        graph, facts = self.graph, block.attentions[0]
        roles = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
        pack = self.of_role(Role.ATTENTION_QUERY, block)
        if len(pack.layers) == len(roles):
            parts = graph.ops("Split", self.project(pack, x), wanted=(True,) * 3, axis=-1, num_outputs=3)
        else:
            parts = [self.project(self.of_role(role, block), x) for role in roles]
        extra: dict[str, Any] = {"scale": facts.scale} if facts.scale is not None else {}
        name, heads = f"{block.name}/attention", facts.num_heads
        if self.is_standard:
            return graph.op(
                "Attention", *parts, seen, name=name, q_num_heads=heads, kv_num_heads=heads, **extra
            )
        return graph.op(
            "MultiHeadAttention", *parts, "", seen,
            name=name, domain=CONTRIB, num_heads=heads, mask_filter_value=-operators.MASKED, **extra,
        )  # fmt: skip

    def finish(self, x: str) -> None:
        """What the task makes of the last block's output."""
        graph, heads, task = self.graph, self.heads, task_of(self.model_map)
        width = self.model_map.hidden_size or "hidden"
        rows: list[int | str] = ["batch", "sequence"]
        if task == "Model":
            graph.output(x, "last_hidden_state", TensorProto.FLOAT, [*rows, width])
            if heads.pooler and any(is_called(layer, heads.pooler) for layer in self.model_map.layers):
                pooled = self.first("last_hidden_state", ((heads.pooler, "Tanh"),))
                graph.output(pooled, "pooler_output", TensorProto.FLOAT, ["batch", width])
        elif task == "ForQuestionAnswering":
            scores = self.project(self.named("qa_outputs"), x)
            both = graph.ops("Split", scores, wanted=(True, True), axis=-1, num_outputs=2)
            for made, name in zip(both, ("start_logits", "end_logits"), strict=True):
                graph.output(graph.op("Squeeze", made, graph.integers(-1)), name, TensorProto.FLOAT, rows)
        elif task == "ForSequenceClassification":
            pack = self.named(heads.classifier[-1][0])
            logits = self.first(x, heads.classifier)
            graph.output(logits, "logits", TensorProto.FLOAT, ["batch", pack.out_features])
        else:
            reads = self.vocabulary(x) if task == "ForMaskedLM" else x
            pack = self.of_role(Role.LM_HEAD) if task == "ForMaskedLM" else self.named("classifier")
            logits = self.project(pack, reads)
            graph.output(logits, "logits", TensorProto.FLOAT, [*rows, pack.out_features])

    def first(self, x: str, steps: Steps) -> str:
        """The first position through some projections."""
        graph = self.graph
        x = graph.op("Gather", x, graph.constant("first", np.array(0, np.int64)), axis=1)
        for name, op_type in steps:
            x = self.project(self.named(name), x)
            x = graph.op(op_type, x) if op_type else x
        return x

    def vocabulary(self, x: str) -> str:
        """What the vocabulary's projection reads."""
        ffn = self.model_map.blocks[0].ffn
        assert ffn is not None
        x = self.project(self.named(self.heads.transform), x)
        kind = self.heads.transform_activation or ffn.activation
        x = operators.activation(self.graph, kind, x, name=self.heads.transform)
        return operators.norm(self.graph, self.norms[(None, NormPlace.FINAL)], self.contents, x)


def depths(blocks: tuple[Block, ...]) -> list[Block]:
    """The blocks in the order in which they run: those of one group in turn, as often as it is called."""
    order: list[Block] = []
    for _, group in itertools.groupby(blocks, key=lambda block: block.name.rsplit(".", 1)[0]):
        members = list(group)
        order.extend(members * members[0].calls)
    return order
