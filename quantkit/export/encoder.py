"""The walk over an encoder: embedding, blocks, and the head of its task, in whichever dialect of operators.

BERT, RoBERTa, DistilBERT, ALBERT. onnxruntime finds attention and add-and-norm in a traced encoder by its
float products; once these are integer, nothing is found and dozens of small operators stay. Here the fused
operators are put in place from the start. The head of a task is a row of `HEADS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from quantkit.export.operators import ACTIVATION_OPS
from quantkit.export.walk import Operators, Stream, Walk
from quantkit.model.model_map import (
    Activation,
    Block,
    FfnKind,
    Layer,
    ModelMap,
    NormPlace,
    NormPlacement,
    PositionKind,
    Residual,
    Role,
)
from quantkit.quantization.layout import Pack

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
    names = _head_projections(HEADS[model_map.family], task)
    others = [layer for layer in model_map.layers if layer.role is Role.OTHER]
    strays = [layer.name for layer in others if not any(is_called(layer, name) for name in names)]
    return f"'{strays[0]}' has no place in a fused graph" if strays else None


def _why_not_block(block: Block) -> str | None:
    attention, ffn = block.attentions[0], block.ffn
    if block.norm_placement is not NormPlacement.POST or block.residual is not Residual.SEQUENTIAL:
        return f"'{block.name}' is not of the kind whose norms follow each sum"
    if len(block.attentions) > 1 or attention.is_causal or attention.num_kv_heads != attention.num_heads:
        return f"'{block.name}' has more than plain attention in both directions"
    if attention.position is not PositionKind.LEARNED or attention.window or attention.softcap:
        return f"its positions are of kind {attention.position}, or its attention is not plain"
    if ffn is None or ffn.kind is not FfnKind.STANDARD or ffn.activation not in ACTIVATION_OPS:
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


class EncoderOperators(Operators, Protocol):
    """The nodes outside of an encoder's blocks."""

    def embed(self, ids: str) -> str:
        """The sum of all tables."""

    def first_token(self, x: str) -> str:
        """The first token of a text."""

    def output(self, name: str, x: str, width: int | None, *, of_tokens: bool = True) -> str:
        """An output of one row for each token or each text, one number where there is no width.

        Returns the name under which the value is read on.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderWalk(Walk):
    """Adds an encoder to a graph."""

    operators: EncoderOperators
    heads: Heads

    def embed(self, ids: str) -> str:
        """Embeddings, normed, at the width of the blocks."""
        x = self.operators.norm(self.norm(None, NormPlace.EMBEDDING), self.operators.embed(ids))
        return self.named(self.heads.widening, x) if self.heads.widening else x

    def blocks(self, x: str) -> str:
        for block in depths(self.model_map.blocks):
            x = self.block(block, Stream(x)).value
        return x

    def pack_named(self, name: str) -> Pack:
        return next(pack for pack in self.operators.contents.packs if is_called(pack.layers[0], name))

    def named(self, name: str, x: str) -> str:
        """A projection outside of blocks."""
        return self.operators.project(self.pack_named(name), x)

    def head(self, x: str) -> None:
        """The outputs of the task, from the last block's output."""
        operators, heads, task = self.operators, self.heads, task_of(self.model_map)
        if task == "Model":
            x = operators.output("last_hidden_state", x, self.model_map.hidden_size)
            if heads.pooler and any(is_called(layer, heads.pooler) for layer in self.model_map.layers):
                self.text_output("pooler_output", x, ((heads.pooler, "Tanh"),))
        elif task == "ForQuestionAnswering":
            scores = self.named("qa_outputs", x)
            ends = operators.graph.ops(
                "Split", scores, wanted=(True, True), name=operators.label("ends"), axis=-1, num_outputs=2
            )
            for end, name in zip(ends, ("start_logits", "end_logits"), strict=True):
                operators.output(name, end, None)
        elif task == "ForSequenceClassification":
            self.text_output("logits", x, heads.classifier)
        else:
            is_masked = task == "ForMaskedLM"
            x = self.transformed(x) if is_masked else x
            pack = self.pack(Role.LM_HEAD) if is_masked else self.pack_named("classifier")
            operators.output("logits", operators.project(pack, x), pack.out_features)

    def text_output(self, name: str, x: str, steps: Steps) -> None:
        """An output from the first token through some projections."""
        operators, width = self.operators, 0
        x = operators.first_token(x)
        for projection, op_type in steps:
            pack = self.pack_named(projection)
            x, width = operators.project(pack, x), pack.out_features
            if op_type:
                x = operators.graph.op(op_type, x, name=operators.label(f"{pack.name}/{op_type.lower()}"))
        operators.output(name, x, width, of_tokens=False)

    def transformed(self, x: str) -> str:
        """Input of the vocabulary's projection."""
        ffn = self.model_map.blocks[0].ffn
        assert ffn is not None
        x = self.named(self.heads.transform, x)
        kind = self.heads.transform_activation or ffn.activation
        x = self.operators.activation(kind, x, self.heads.transform)
        return self.operators.norm(self.norm(None, NormPlace.FINAL), x)


def depths(blocks: tuple[Block, ...]) -> list[Block]:
    """The blocks in the order in which they run: those of one group in turn, as often as it is called."""
    order: list[Block] = []
    for _, group in itertools.groupby(blocks, key=lambda block: block.name.rsplit(".", 1)[0]):
        members = list(group)
        order.extend(members * members[0].calls)
    return order
