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


PROBE_PARTS = ("attention.out_proj", "mlp.fc1", "mlp.fc2")
TEXT_TASKS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "Model",
)


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
    transform: Step | None = None  # before the vocabulary
    classifier: tuple[Step, ...] = ()  # what a sequence classifier reads one row of a text with
    tokens: tuple[Step, ...] = (Step("classifier"),)
    answers: tuple[Step, ...] = (Step("qa_outputs"),)
    tasks: tuple[str, ...] = TEXT_TASKS  # ends of its classes
    detector: tuple[Step, ...] = ()  # of replaced tokens: one number a token
    pooler: str | None = None  # tanh of this projection of the first position
    # Of towers: what stands for the whole picture or text, and what is done to it.
    pools: Literal["", "first", "end", "last", "probe"] = ""
    is_pool_normed: bool = False  # by the head's norm
    pooled: tuple[Step, ...] = ()
    embeds: tuple[str, Step] | None = None  # the output of a class with a projection
    teachers: tuple[Step, ...] = ()  # classifiers of the first tokens, whose logits are averaged
    classifies_mean_too: bool = False  # the classifier reads the mean of the patches beside the first token
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
# Of models of pictures, and of the text towers beside them.
TOWERS: dict[str, Heads] = {
    "vit": Heads(
        classes=("ViT",),
        tasks=("Model", "ForImageClassification"),
        pools="first",
        pooled=(Step("pooler.dense", "Tanh"),),
        classifier=(Step("classifier"),),
    ),
    "deit": Heads(
        classes=("DeiT",),
        tasks=("Model", "ForImageClassification", "ForImageClassificationWithTeacher"),
        pools="first",
        pooled=(Step("pooler.dense", "Tanh"),),
        classifier=(Step("classifier"),),
        teachers=(Step("cls_classifier"), Step("distillation_classifier")),
    ),
    "dinov2": Heads(
        classes=("Dinov2",),
        tasks=("Model", "ForImageClassification"),
        pools="first",
        classifier=(Step("classifier"),),
        classifies_mean_too=True,
    ),
    "clip_vision": Heads(
        classes=("CLIPVision",),
        tasks=("Model", "ModelWithProjection"),
        pools="first",
        is_pool_normed=True,
        embeds=("image_embeds", Step("visual_projection")),
    ),
    "clip_text": Heads(
        classes=("CLIPText",),
        tasks=("Model", "ModelWithProjection"),
        pools="end",
        embeds=("text_embeds", Step("text_projection")),
    ),
    "siglip_vision": Heads(classes=("SiglipVision",), tasks=("Model",), pools="probe"),
    "siglip_text": Heads(classes=("SiglipText",), tasks=("Model",), pools="last", pooled=(Step("head"),)),
}
PLACEMENTS = (NormPlacement.POST, NormPlacement.PRE)
POSITIONS = (PositionKind.LEARNED, PositionKind.ROPE, PositionKind.NONE)


def heads_of(model_map: ModelMap) -> Heads | None:
    name = model_map.family or ""
    return HEADS.get(name) or TOWERS.get(name)


def why_not_encoder(model_map: ModelMap) -> str | None:
    """Why this encoder cannot be emitted directly, or None when it can."""
    if model_map.family is None:
        return "its family has no row in the table"
    heads = heads_of(model_map)
    if heads is None:
        return f"the family {model_map.family} is no plain encoder"
    task = task_of(model_map)
    if task is None:
        return f"{model_map.architecture} is a task without a fused head"
    # Under transformers 5 an untied head keeps a second bias beside it, which no forward pass reads.
    unread = {
        f"{layer.matrix.rpartition('.')[0]}.bias" for layer in model_map.layers if layer.role is Role.LM_HEAD
    }
    unread |= model_map.placed
    unknown = [entry.name for entry in model_map.unmapped if entry.name not in unread]
    if unknown:
        return f"'{unknown[0]}' is a parameter of no known kind"
    positions = (*POSITIONS, *([PositionKind.RELATIVE] if model_map.distance_scores else []))
    may_be_causal = heads.pools == "end"
    reasons = (_why_not_block(block, positions, may_be_causal=may_be_causal) for block in model_map.blocks)
    reason = next(filter(None, reasons), None)
    has_own = any(step.then == OWN for step in _steps(heads, task))
    if reason is None and has_own and model_map.head_activation not in (None, *ACTIVATION_OPS):
        reason = "its head has an activation without a fused operator"
    if reason:
        return reason
    names = _head_projections(heads, task)
    if picture := model_map.picture:
        names |= {picture.patches, *(f"{picture.probe}.{part}" for part in PROBE_PARTS if picture.probe)}
    others = [layer for layer in model_map.layers if layer.role is Role.OTHER]
    strays = [layer.name for layer in others if not any(is_called(layer, name) for name in names)]
    return f"'{strays[0]}' has no place in a fused graph" if strays else None


def _why_not_block(block: Block, positions: Sequence[PositionKind], *, may_be_causal: bool) -> str | None:
    attention, ffn = block.attentions[0], block.ffn
    if block.norm_placement not in PLACEMENTS or block.residual is not Residual.SEQUENTIAL:
        return f"'{block.name}' has neither a norm before each sublayer nor one after each sum"
    is_causal = attention.is_causal and not may_be_causal
    if len(block.attentions) > 1 or is_causal or attention.num_kv_heads != attention.num_heads:
        return f"'{block.name}' has more than plain attention in both directions"
    if attention.position not in positions or attention.has_query_key_norm or _bends_scores(attention):
        return f"its positions are of kind {attention.position}, or its attention is not plain"
    if ffn is None or ffn.activation not in ACTIVATION_OPS:
        return "its FFN has an activation without a fused operator"
    return None


def _bends_scores(attention: Attention) -> bool:
    return attention.softcap is not None or attention.clip is not None


def task_of(model_map: ModelMap) -> str | None:
    """The task that the architecture's name ends with, where the family has such a head."""
    heads = heads_of(model_map)
    if heads is None:
        return None
    tasks = (*heads.tasks, *(["ForPreTraining"] if heads.detector else []))
    return next(
        (task for task in tasks for name in heads.classes if model_map.architecture == name + task), None
    )


def vector_output(model_map: ModelMap) -> str | None:
    """The output of the fused graph with one vector for each text or picture."""
    heads, task = heads_of(model_map), task_of(model_map)
    if heads is None or not heads.pools:
        return None
    names = {"Model": "pooler_output", "ModelWithProjection": heads.embeds[0] if heads.embeds else None}
    return names.get(task or "") if _pools(heads, model_map) else None


def fills_texts(model_map: ModelMap) -> bool:
    """Whether each text is padded to the whole context and pooled at its last place, as SigLIP is."""
    heads = heads_of(model_map)
    return heads is not None and heads.pools == "last"


def _pools(heads: Heads, model_map: ModelMap) -> bool:
    """Whether the model has all that its pooled output needs."""
    if heads.pools == "probe":
        return bool(model_map.picture and model_map.picture.probe)
    names = [step.projection for step in heads.pooled]
    return all(any(is_called(layer, name) for layer in model_map.layers) for name in names)


def _steps(heads: Heads, task: str) -> tuple[Step, ...]:
    """What a task puts on the blocks, the pooler of a bare model apart."""
    steps: Mapping[str, tuple[Step, ...]] = {
        "Model": (),
        "ForMaskedLM": (heads.transform,) if heads.transform else (),
        "ForSequenceClassification": heads.classifier,
        "ForImageClassification": heads.classifier,
        "ForTokenClassification": heads.tokens,
        "ForQuestionAnswering": heads.answers,
        "ForPreTraining": heads.detector,
        "ForImageClassificationWithTeacher": heads.teachers,
        "ModelWithProjection": (*heads.pooled, *(heads.embeds or ())[1:]),
    }
    return steps[task]


def _head_projections(heads: Heads, task: str) -> set[str]:
    """Projections outside of the blocks that the task's graph computes."""
    pooled = heads.pooled if task == "Model" else ()
    pooler = heads.pooler if task == "Model" else None
    names = [step.projection for step in (*_steps(heads, task), *pooled)]
    return {name for name in (*names, pooler, heads.widening) if name}


def is_called(layer: Layer, name: str) -> bool:
    """Whether this is the projection of that name, whatever module it lies in."""
    return layer.name == name or layer.name.endswith(f".{name}")


class EncoderOperators(Operators, Protocol):
    """The nodes outside of an encoder's blocks."""

    def embed(self, ids: str) -> str:
        """The sum of all tables."""

    def first_token(self, x: str, place: int = 0) -> str:
        """The first token of a text or picture, or another one of the first."""

    def last_token(self, x: str) -> str:
        """The last place of a text, whether or not it is padding."""

    def end_token(self, x: str) -> str:
        """The token at which a text ends."""

    def mean_patch(self, x: str) -> str:
        """The mean of the tokens of patches."""

    def probed(self, x: str) -> str:
        """What a query of its own finds in all tokens, before the output projection."""

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
        x, norm = self.operators.embed(ids), norm_at(self.operators.contents, None, NormPlace.EMBEDDING)
        x = self.operators.norm(norm, x) if norm else x
        widening = self.heads.widening
        return self.named(widening, x) if widening and self.has(widening) else x

    def blocks(self, x: str) -> str:
        """States behind the last block, normed."""
        stream = Stream(x)
        for block in depths(self.model_map.blocks):
            stream = self.block(block, stream)
        if self.model_map.blocks[-1].norm_placement is NormPlacement.POST:
            return stream.value
        final = norm_at(self.operators.contents, None, NormPlace.FINAL)
        if final is None:  # the head's norm follows pooling
            return self.total(stream)
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
        if heads.pools:
            self.tower(x, task or "")
        elif task == "Model":
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
        elif task == "ForMaskedLM" and heads.transform:
            pack, (x, _) = self.pack(Role.LM_HEAD), self.steps((heads.transform,), x)
            operators.output("logits", operators.project(pack, x), pack.out_features)
        elif task == "ForPreTraining":
            operators.output("logits", self.steps(heads.detector, x)[0], None)
        else:
            operators.output("logits", *self.steps(heads.tokens, x))

    def tower(self, x: str, task: str) -> None:
        """The outputs of a model of pictures, or of the text tower beside one."""
        operators, heads, width = self.operators, self.heads, self.model_map.hidden_size
        if task == "ForImageClassification":
            row = operators.first_token(x)
            if heads.classifies_mean_too:
                row = operators.graph.op("Concat", row, operators.mean_patch(x), axis=-1)
            self.text_output("logits", row, heads.classifier)
        elif task == "ForImageClassificationWithTeacher":
            self.teachers(x)
        else:
            pooled, pooled_width = "", width
            if _pools(heads, self.model_map):
                pooled, pooled_width = self.pool(x)
            if task == "ModelWithProjection" and heads.embeds:
                name, step = heads.embeds
                operators.output(name, *self.steps((step,), pooled), of_tokens=False)
            operators.output("last_hidden_state", x, width)
            if task == "Model" and pooled:
                operators.output("pooler_output", pooled, pooled_width, of_tokens=False)

    def pool(self, x: str) -> tuple[str, int | None]:
        """(one row for each picture or text, its width)."""
        operators, heads = self.operators, self.heads
        if heads.pools == "probe":
            return self.probe(x), self.model_map.hidden_size
        row = {
            "first": operators.first_token,
            "end": operators.end_token,
            "last": operators.last_token,
        }[heads.pools](x)
        if heads.is_pool_normed:
            row = operators.norm(self.norm(None, NormPlace.HEAD), row)
        if not heads.pooled:
            return row, self.model_map.hidden_size
        return self.steps(heads.pooled, row)

    def probe(self, x: str) -> str:
        """Attention of one query of its own to all tokens, and an FFN."""
        operators, picture = self.operators, self.model_map.picture
        assert picture is not None and picture.probe
        name = picture.probe
        attended = self.named(f"{name}.attention.out_proj", operators.probed(x))
        normed = operators.norm(self.norm(None, NormPlace.HEAD), attended)
        hidden = self.named(f"{name}.mlp.fc1", normed)
        ffn = self.model_map.blocks[0].ffn
        assert ffn is not None
        hidden = operators.activation(ffn.activation, hidden, f"{name}.mlp")
        return operators.graph.op("Add", attended, self.named(f"{name}.mlp.fc2", hidden))

    def teachers(self, x: str) -> None:
        """Logits of one classifier for each of the first tokens, and before them their mean."""
        operators, names = self.operators, ("cls_logits", "distillation_logits")
        logits = [
            self.steps((step,), operators.first_token(x, place))[0]
            for place, step in enumerate(self.heads.teachers)
        ]
        width = self.pack_named(self.heads.teachers[0].projection).out_features
        total = operators.graph.op("Add", *logits)
        operators.output("logits", operators.scale(total, 0.5, "half"), width, of_tokens=False)
        for name, value in zip(names, logits, strict=True):
            operators.output(name, value, width, of_tokens=False)

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
