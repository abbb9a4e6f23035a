"""Labels of texts, and scores of passages for a query: classifiers and rerankers.

A reranker is a classifier of one label that reads a query and a passage together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.errors import InputError
from quantkit.files import expect, read_json
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.graph import Floats
from quantkit.runtime.picture_batches import picture_vectors
from quantkit.runtime.sentence import vectors
from quantkit.runtime.tokenizer import Text

OF_TEXTS, OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"  # parts of class names
OF_PICTURES = "ForImageClassification"
CROSS_ENCODER_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """How the logits of a classifier are read."""

    labels: tuple[str, ...]
    activation: str  # of ACTIVATIONS
    of_tokens: bool = False

    @property
    def ranks(self) -> bool:
        """Whether it scores pairs of texts."""
        return len(self.labels) == 1 and not self.of_tokens


ACTIVATIONS = {
    "Identity": lambda logits: logits,
    "Sigmoid": lambda logits: 1 / (1 + np.exp(-logits)),
    "Softmax": lambda logits: (
        (weights := np.exp(logits - logits.max(-1, keepdims=True))) / weights.sum(-1, keepdims=True)
    ),
}


def head_of(encoder: Encoder) -> Head | None:
    """The head of a classifier, from config.json beside the graph; None for another encoder."""
    path = encoder.folder / "config.json"
    config = read_json(path) if path.exists() else {}
    architecture = str((expect(config, "architectures", list, where=path) or [""])[0])
    if not (architecture.endswith((OF_TEXTS, OF_TOKENS)) or OF_PICTURES in architecture):
        return None
    width = encoder.session.get_outputs()[0].shape[-1]
    names = expect(config, "id2label", dict, where=path) or {}
    count = width if isinstance(width, int) else len(names) or 2  # transformers leaves out its default of two
    return Head(
        labels=tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count)),
        activation=_activation(encoder, config, count),
        of_tokens=architecture.endswith(OF_TOKENS),
    )


def _activation(encoder: Encoder, config: dict[str, object], count: int) -> str:
    """As transformers' pipeline chooses it, and for one label sentence-transformers' CrossEncoder."""
    path = encoder.folder / CROSS_ENCODER_FILE
    settings = expect(config, "sentence_transformers", dict, where=encoder.folder / "config.json") or {}
    has_modules = path.exists() and (encoder.folder / "modules.json").exists()  # else it is not read
    named = (read_json(path) if has_modules else {}).get("activation_fn") or settings.get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    problem = config.get("problem_type")
    if count == 1 and named:
        return str(named).rpartition(".")[2]
    if problem == "regression":
        return "Identity"
    return "Sigmoid" if count == 1 or problem == "multi_label_classification" else "Softmax"


def pair_rows(
    encoder: Encoder, tokenizer: Text, query: str | None, texts: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """(token ids, token types) of each text, behind a query where there is one; longer texts are cut."""
    if not texts:
        raise InputError("there is no text", where="texts", allowed="one text or more")
    limits = [encoder.context, encoder.fixed_length, _cut_at(encoder)]
    most = min((limit for limit in limits if limit), default=None)
    encodings = [tokenizer.read(text if query is None else (query, text), most=most) for text in texts]
    return [list(encoding.ids) for encoding in encodings], [list(encoding.type_ids) for encoding in encodings]


def score_pictures(encoder: Encoder, paths: Sequence[Path], query: str | None = None) -> Floats:
    """Probabilities of the labels of pictures, [pictures, labels]."""
    head, where = head_of(encoder), str(encoder.folder)
    if head is None:
        raise InputError(
            "the model has no labels", where=where, allowed="a classifier", next_step="'quantkit encode'"
        )
    if query is not None:
        raise InputError("a model of pictures reads no query", where="--query", next_step="leave it out")
    values: Floats = ACTIVATIONS[head.activation](picture_vectors(encoder, paths))
    return values


def _cut_at(encoder: Encoder) -> int | None:
    """Where the tokenizer of the model cuts texts."""
    path = encoder.folder / "tokenizer_config.json"
    limit = (read_json(path) if path.exists() else {}).get("model_max_length")
    return limit if type(limit) is int and 0 < limit < 1 << 31 else None


def score(encoder: Encoder, tokenizer: Text, texts: Sequence[str], query: str | None = None) -> Floats:
    """Probabilities of labels or scores of passages, [texts, labels]."""
    head, where = head_of(encoder), str(encoder.folder)
    if head is None or head.of_tokens:
        what = "labels its tokens" if head else "has no labels"
        other = "transformers' pipeline('token-classification')" if head else "'quantkit encode'"
        raise InputError(f"the model {what}", where=where, allowed="a classifier of texts", next_step=other)
    if head.ranks and query is None:
        raise InputError("a reranker reads a query and passages", where=where, next_step="give --query")
    if head.activation not in ACTIVATIONS:
        raise InputError(f"the activation '{head.activation}'", where=where, allowed=", ".join(ACTIVATIONS))
    values: Floats = ACTIVATIONS[head.activation](
        vectors(encoder, *pair_rows(encoder, tokenizer, query, texts))
    )
    return values
