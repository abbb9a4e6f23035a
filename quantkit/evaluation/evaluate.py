"""The accuracy of an artifact that lies in a folder, beside its original or, where it predicts tokens, alone.

The original stands beside it where it is at hand: named by the caller, or by the recipe and on this disk.
Nothing is downloaded unless it is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Logits, TextPerplexity, measure_accuracy, measure_perplexity
from quantkit.evaluation.artifact import Opened
from quantkit.evaluation.encoder_decoder import AnswerLogits, measure_halves, perplexity_of_halves
from quantkit.evaluation.measure import LARGEST_WINDOW, answers_window, encoded_text, random_text, stride_of
from quantkit.evaluation.measurements import Accuracy, Similarity
from quantkit.evaluation.models import open_measured
from quantkit.evaluation.similarity import measure_similarity
from quantkit.model.load import DEMO_NAME, Source, open_source
from quantkit.model.weights.open import reference_answer_logits, reference_logits, with_weights
from quantkit.progress import Progress
from quantkit.recipe import Recipe
from quantkit.runtime.graph import holds_model
from quantkit.runtime.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """How accurate an artifact is; beside a reference, or for a decoder alone."""

    result: Accuracy | Similarity | TextPerplexity
    reference: str | None
    notes: tuple[str, ...]


def evaluate(opened: Opened, *, reference: str | None, progress: Progress) -> Evaluated:
    """Perplexity, and where there is an original everything that is measured beside it."""
    notes: list[str] = []
    name = reference or original_at_hand(opened.recipe, notes)
    if not opened.model.generates and name is None:
        raise InputError(
            "an encoder predicts no next token, and its original is not at hand",
            where=str(opened.folder),
            next_step="name the original with --reference MODEL",
        )
    ids, text = tokens_of(opened)
    common = {"token_ids": ids, "text": text}
    result: Accuracy | Similarity | TextPerplexity
    if not opened.model.generates:
        assert name is not None
        result = _similarity(opened, opened.model, name, common, progress)
    elif opened.model.reads_and_answers:
        result = _answers(opened, opened.model, name, common, progress)
    else:
        result = _next_tokens(opened, name, common, progress)
    return Evaluated(result=result, reference=name, notes=tuple(notes))


def _similarity(
    opened: Opened, model: Session, name: str, common: Mapping[str, Any], progress: Progress
) -> Similarity:
    """An encoder's vectors beside those of the original."""
    wanted, ids = opened.recipe.measure, common["token_ids"]
    window = min(wanted.window or wanted.prompt, model.fixed_length or opened.context, len(ids))
    reference = logits_of(name, opened.threads)
    with progress.stage("accuracy", total=len(ids), unit="tokens") as count:
        return measure_similarity(
            **common, reference=reference, quantized=model.logits, window=window, progress=count
        )


def _answers(
    opened: Opened, model: Session, name: str | None, common: Mapping[str, Any], progress: Progress
) -> Accuracy | TextPerplexity:
    """What a decoder answers to what its encoder read."""
    ids = common["token_ids"]
    window = answers_window(opened.recipe.measure, model, len(ids))
    reference = _answers_of(name, opened.threads) if name else None
    options: dict[str, Any] = {**common, "window": window, "start_ids": model.start_ids}
    with progress.stage("accuracy", total=len(ids) - window // 2, unit="tokens") as count:
        if reference is None:
            return perplexity_of_halves(**options, model=model.answer_logits, progress=count)
        return measure_halves(**options, reference=reference, quantized=model.answer_logits, progress=count)


def _next_tokens(
    opened: Opened, name: str | None, common: Mapping[str, Any], progress: Progress
) -> Accuracy | TextPerplexity:
    """What a decoder says comes next."""
    wanted, ids = opened.recipe.measure, common["token_ids"]
    window = min(wanted.window or LARGEST_WINDOW, opened.model.fixed_length or opened.context, len(ids))
    reference = logits_of(name, opened.threads) if name else None
    options: dict[str, Any] = {**common, "window": window, "stride": stride_of(wanted, window)}
    quantized = opened.model.logits
    with progress.stage("accuracy", total=len(ids) - 1, unit="tokens") as count:
        if reference is None:
            return measure_perplexity(**options, model=quantized, progress=count)
        return measure_accuracy(**options, reference=reference, quantized=quantized, progress=count)


def original_at_hand(recipe: Recipe, notes: list[str]) -> str | None:
    """The recipe's model where it lies on this disk; a name is not fetched for the asking."""
    if recipe.model is None:
        notes.append("no recipe names the original; --reference MODEL compares with it")
        return None
    if recipe.random_weights:
        notes.append("the weights are random, so perplexity says nothing")
        return None
    path = Path(recipe.model).expanduser()
    if recipe.model == DEMO_NAME or (path / "config.json").exists() or path.is_file():
        return recipe.model
    notes.append(f"the original, {recipe.model}, is not on this disk; --reference MODEL compares with it")
    return None


def logits_of(name: str, threads: int) -> Logits:
    """Another artifact in the runtime, or a model in transformers."""
    found = _reference(name, threads, answers=False)
    return reference_logits(found) if isinstance(found, Source) else found.logits


def _answers_of(name: str, threads: int) -> AnswerLogits:
    """The same of an encoder and its decoder."""
    found = _reference(name, threads, answers=True)
    if isinstance(found, Source):
        return reference_answer_logits(found)
    return found.answer_logits


def _reference(name: str, threads: int, *, answers: bool) -> Session | Source:
    """What is compared with, if it reads and answers, or does not, like the artifact."""
    folder = Path(name).expanduser()
    found: Session | Source
    if holds_model(folder):
        found = open_measured(folder, threads=threads)
        does_answer = found.reads_and_answers
    else:
        found = with_weights(open_source(name), random_weights=False)
        does_answer = bool(found.config.get("is_encoder_decoder"))
    if does_answer != answers:
        what, other = "an encoder with a decoder behind it", "one model alone"
        raise InputError(
            f"it is {what if does_answer else other}, and the artifact is {other if does_answer else what}",
            where=f"--reference {name}",
            allowed="the artifact's original, or another artifact of it",
        )
    return found


def tokens_of(opened: Opened) -> tuple[NDArray[np.int64], str]:
    """(token ids, name of the text)."""
    wanted, model = opened.recipe.measure, opened.model
    vocab_size = model.vocab_size
    if opened.recipe.random_weights and vocab_size:
        return random_text(wanted, vocab_size)
    ids, name = encoded_text(wanted, opened.folder)
    if vocab_size and len(ids) and ids.max() >= vocab_size:
        raise InputError(
            f"its tokenizer makes id {ids.max()}, and the model has {vocab_size} tokens",
            where=str(opened.folder),
            next_step="copy the tokenizer.json that the checkpoint came with",
        )
    return ids, name
