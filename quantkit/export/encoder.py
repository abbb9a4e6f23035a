"""The walk over an encoder: embedding, blocks, and the head of its task, in whichever dialect of operators.

onnxruntime finds attention and add-and-norm in a traced encoder by its float products; once these are
integer, nothing is found and dozens of small operators stay. Here the fused operators are put in place from
the start. The head of a task is a row of `HEADS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from quantkit.export.operators import ACTIVATION_OPS
from quantkit.export.walk import Operators, Stream, Walk, norm_at
from quantkit.model.model_map import (
    Activation,
    Attention,
    Block,
    Layer,
    ModelMap,
    NormPlace,
    NormPlacement,
    PositionKind,
    Residual,
    Role,
)
from quantkit.quantization.layout import Pack

OWN: Final = "own"  # the activation of the head where the config sets it apart, or else of the blocks
OF_BLOCKS: Final = "of blocks"


class Step(NamedTuple):
    """A projection of a head, and what follows it."""

    projection: str
    then: Literal["", "Tanh", "Relu", "own", "of blocks"] | Activation = (
        ""  # a standard operator, or an activation
    )
    is_normed: bool = False  # by the head's norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What one family puts on its blocks; names are those of its projections without the prefix."""

    classes: tuple[str, ...]  # how its classes are called, before the task
    transform: Step  # before the vocabulary
    classifier: tuple[Step, ...]  # what a sequence classifier reads one row of a text with
    tokens: tuple[Step, ...] = (Step("classifier"),)
    answers: tuple[Step, ...] = (Step("qa_outputs"),)
    detector: tuple[Step, ...] = ()  # of replaced tokens: one number a token
    pooler: str | None = None  # tanh of this projection of the first position
    widening: str | None = None  # from the width of the embeddings to that of the blocks, where they differ


MODERN_HEAD = Step("head.dense", OWN, is_normed=True)
HEADS: dict[str, Heads] = {
    "bert": Heads(
        classes=("Bert",),
        transform=Step("cls.predictions.transform.dense", OWN, is_normed=True),
        pooler="pooler.dense",
        classifier=(Step("pooler.dense", "Tanh"), Step("classifier")),
    ),
    "roberta": Heads(
        classes=("Roberta", "XLMRoberta", "Camembert"),
        transform=Step("lm_head.dense", Activation.GELU, is_normed=True),
        pooler="pooler.dense",
        classifier=(Step("classifier.dense", "Tanh"), Step("classifier.out_proj")),
    ),
    "mpnet": Heads(
        classes=("MPNet",),
        transform=Step("lm_head.dense", Activation.GELU, is_normed=True),
        pooler="pooler.dense",
        classifier=(Step("classifier.dense", "Tanh"), Step("classifier.out_proj")),
    ),
    "electra": Heads(
        classes=("Electra",),
        transform=Step("generator_predictions.dense", Activation.GELU, is_normed=True),
        classifier=(Step("classifier.dense", Activation.GELU), Step("classifier.out_proj")),
        detector=(
            Step("discriminator_predictions.dense", OWN),
            Step("discriminator_predictions.dense_prediction"),
        ),
        widening="embeddings_project",
    ),
    "deberta_v2": Heads(
        classes=("DebertaV2",),
        transform=Step("cls.predictions.transform.dense", OF_BLOCKS, is_normed=True),
        classifier=(Step("pooler.dense", OWN), Step("classifier")),
    ),
    "modernbert": Heads(
        classes=("ModernBert",),
        transform=MODERN_HEAD,
        classifier=(MODERN_HEAD, Step("classifier")),
        tokens=(MODERN_HEAD, Step("classifier")),
        answers=(MODERN_HEAD, Step("classifier")),
    ),
    "distilbert": Heads(
        classes=("DistilBert",),
        transform=Step("vocab_transform", OWN, is_normed=True),
        classifier=(Step("pre_classifier", "Relu"), Step("classifier")),
    ),
    "albert": Heads(
        classes=("Albert",),
        transform=Step("predictions.dense", OWN, is_normed=True),
        pooler="pooler",
        classifier=(Step("pooler", "Tanh"), Step("classifier")),
        widening="encoder.embedding_hidden_mapping_in",
    ),
}
TASKS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForPreTraining",
    "Model",
)
PLACEMENTS = (NormPlacement.POST, NormPlacement.PRE)
POSITIONS = (PositionKind.LEARNED, PositionKind.ROPE, PositionKind.NONE)


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
    positions = (*POSITIONS, *([PositionKind.RELATIVE] if model_map.distance_scores else []))
    reasons = (_why_not_block(block, positions) for block in model_map.blocks)
    reason = next(filter(None, reasons), None)
    heads = HEADS[model_map.family]
    has_own = any(step.then == OWN for step in _steps(heads, task))
    if reason is None and has_own and model_map.head_activation not in (None, *ACTIVATION_OPS):
        reason = "its head has an activation without a fused operator"
    if reason:
        return reason
    names = _head_projections(heads, task)
    others = [layer for layer in model_map.layers if layer.role is Role.OTHER]
    strays = [layer.name for layer in others if not any(is_called(layer, name) for name in names)]
    return f"'{strays[0]}' has no place in a fused graph" if strays else None


def _why_not_block(block: Block, positions: Sequence[PositionKind]) -> str | None:
    attention, ffn = block.attentions[0], block.ffn
    if block.norm_placement not in PLACEMENTS or block.residual is not Residual.SEQUENTIAL:
        return f"'{block.name}' has neither a norm before each sublayer nor one after each sum"
    if len(block.attentions) > 1 or attention.is_causal or attention.num_kv_heads != attention.num_heads:
        return f"'{block.name}' has more than plain attention in both directions"
    if attention.position not in positions or attention.has_query_key_norm or _bends_scores(attention):
        return f"its positions are of kind {attention.position}, or its attention is not plain"
    if ffn is None or ffn.activation not in ACTIVATION_OPS:
        return "its FFN has an activation without a fused operator"
    return None


def _bends_scores(attention: Attention) -> bool:
    return attention.softcap is not None or attention.clip is not None


def task_of(model_map: ModelMap) -> str | None:
    """The row of `TASKS` that the architecture's name ends with, where the family has such a head."""
    if model_map.family not in HEADS:
        return None
    heads = HEADS[model_map.family]
    tasks = [task for task in TASKS if task != "ForPreTraining" or heads.detector]
    return next(
        (task for task in tasks for name in heads.classes if model_map.architecture == name + task), None
    )


def _steps(heads: Heads, task: str) -> tuple[Step, ...]:
    """What a task puts on the blocks, the pooler of a bare model apart."""
    steps: Mapping[str, tuple[Step, ...]] = {
        "Model": (),
        "ForMaskedLM": (heads.transform,),
        "ForSequenceClassification": heads.classifier,
        "ForTokenClassification": heads.tokens,
        "ForQuestionAnswering": heads.answers,
        "ForPreTraining": heads.detector,
    }
    return steps[task]


def _head_projections(heads: Heads, task: str) -> set[str]:
    """Projections outside of the blocks that the task's graph computes."""
    pooler = heads.pooler if task == "Model" else None
    names = [step.projection for step in _steps(heads, task)]
    return {name for name in (*names, pooler, heads.widening) if name}


def is_called(layer: Layer, name: str) -> bool:
    """Whether this is the projection of that name, whatever module it lies in."""
    return layer.name == name or layer.name.endswith(f".{name}")


class EncoderOperators(Operators, Protocol):
    """The nodes outside of an encoder's blocks."""

    def embed(self, ids: str) -> str:
        """The sum of all tables."""

    def first_token(self, x: str) -> str:
        """The first token of a text."""

    def mean_token(self, x: str) -> str:
        """The mean of the tokens of a text."""

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
        widening = self.heads.widening
        return self.named(widening, x) if widening and self.has(widening) else x

    def blocks(self, x: str) -> str:
        """States behind the last block, normed."""
        stream = Stream(x)
        for block in depths(self.model_map.blocks):
            stream = self.block(block, stream)
        if self.model_map.blocks[-1].norm_placement is NormPlacement.POST:
            return stream.value
        final = self.norm(None, NormPlace.FINAL)
        return self.operators.norm_stream(final, stream, keeps_sum=False)[0]

    def has(self, name: str) -> bool:
        """Whether the model has this projection."""
        return any(is_called(layer, name) for layer in self.model_map.layers)

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
            if heads.pooler and self.has(heads.pooler):
                self.text_output("pooler_output", operators.first_token(x), (Step(heads.pooler, "Tanh"),))
        elif task == "ForQuestionAnswering":
            scores, _ = self.steps(heads.answers, x)
            ends = operators.graph.ops(
                "Split", scores, wanted=(True, True), name=operators.label("ends"), axis=-1, num_outputs=2
            )
            for end, name in zip(ends, ("start_logits", "end_logits"), strict=True):
                operators.output(name, end, None)
        elif task == "ForSequenceClassification":
            row = operators.mean_token if self.model_map.reads_mean else operators.first_token
            self.text_output("logits", row(x), heads.classifier)
        elif task == "ForMaskedLM":
            pack, (x, _) = self.pack(Role.LM_HEAD), self.steps((heads.transform,), x)
            operators.output("logits", operators.project(pack, x), pack.out_features)
        elif task == "ForPreTraining":
            operators.output("logits", self.steps(heads.detector, x)[0], None)
        else:
            operators.output("logits", *self.steps(heads.tokens, x))

    def text_output(self, name: str, x: str, steps: tuple[Step, ...]) -> None:
        """An output of one row for each text."""
        operators = self.operators
        operators.output(name, *self.steps(steps, x), of_tokens=False)

    def steps(self, steps: tuple[Step, ...], x: str) -> tuple[str, int]:
        """(a value through the projections of a head, its width)."""
        operators, width = self.operators, 0
        for step in steps:
            pack = self.pack_named(step.projection)
            x, width = operators.project(pack, x), pack.out_features
            if step.then in ("Tanh", "Relu"):
                label = operators.label(f"{pack.name}/{step.then.lower()}")
                x = operators.graph.op(step.then, x, name=label)
            elif step.then:
                x = operators.activation(self.activation_of(step), x, step.projection)
            if step.is_normed:
                norm = norm_at(operators.contents, None, NormPlace.HEAD)
                x = operators.norm(norm or self.norm(None, NormPlace.FINAL), x)
        return x, width

    def activation_of(self, step: Step) -> Activation:
        ffn = self.model_map.blocks[0].ffn
        assert ffn is not None
        if isinstance(step.then, Activation):
            return step.then
        return ffn.activation if step.then == OF_BLOCKS else self.model_map.head_activation or ffn.activation


def depths(blocks: tuple[Block, ...]) -> list[Block]:
    """The blocks in the order in which they run: those of one group in turn, as often as it is called."""
    order: list[Block] = []
    for _, group in itertools.groupby(blocks, key=lambda block: block.name.rsplit(".", 1)[0]):
        members = list(group)
        order.extend(members * members[0].calls)
    return order
