"""Evaluates the accuracy of an artifact folder, beside its original or, for a decoder, alone.

The original is used where it is at hand: named by the caller, or by the recipe and on this disk. Nothing is
downloaded unless it is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import TextPerplexity
from quantkit.evaluation.artifact import OpenArtifact
from quantkit.evaluation.measure import Tokens, compare
from quantkit.evaluation.measurements import Accuracy, Similarity
from quantkit.evaluation.reference import named_reference, original_at_hand
from quantkit.evaluation.text import encoded_text, random_text
from quantkit.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The accuracy of an artifact; without a reference, the perplexity of a decoder alone."""

    result: Accuracy | Similarity | TextPerplexity
    reference: str | None
    notes: tuple[str, ...] = ()


def evaluate(artifact: OpenArtifact, *, reference: str | None, progress: Progress) -> Evaluation:
    """Measure perplexity, and beside a reference KL divergence and agreement."""
    reason = ""
    if reference is None:
        reference, reason = original_at_hand(artifact.recipe)
    original = named_reference(reference, artifact.session, artifact.threads) if reference else None
    result = compare(artifact, text_tokens(artifact), original, progress)
    return Evaluation(result=result, reference=reference, notes=(reason,) if reason else ())


def text_tokens(artifact: OpenArtifact) -> tuple[Tokens, str]:
    """(token ids of the recipe's text, its name); a tokenizer of another model is refused."""
    measure, vocab_size = artifact.recipe.measure, artifact.vocab_size
    if artifact.recipe.random_weights and vocab_size:
        return random_text(measure, vocab_size)
    ids, name = encoded_text(measure, artifact.folder)
    if vocab_size and ids.max(initial=0) >= vocab_size:
        raise InputError(
            f"its tokenizer makes id {ids.max()}, and the model has {vocab_size} tokens",
            where=str(artifact.folder),
            next_step="copy the tokenizer.json that the checkpoint came with",
        )
    return ids, name
