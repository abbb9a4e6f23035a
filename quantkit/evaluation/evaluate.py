"""Accuracy of an artifact compared with its original, or perplexity of a decoder alone.

The original is the model named by the caller, or the model of the recipe if it is on this disk. Only a model
named by the caller is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Ints, TextPerplexity
from quantkit.evaluation.artifact import OpenArtifact
from quantkit.evaluation.measure import compare
from quantkit.evaluation.measurements import Accuracy, Similarity
from quantkit.evaluation.pictures import compare_pictures
from quantkit.evaluation.reference import named_reference, original_at_hand
from quantkit.evaluation.text import encoded_text, random_text
from quantkit.evaluation.verdict import Judgement, judge
from quantkit.progress import Progress
from quantkit.runtime.encoder import Encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    result: Accuracy | Similarity | TextPerplexity
    reference: str | None
    notes: tuple[str, ...] = ()

    @property
    def judgement(self) -> Judgement | None:
        """The verdict; None without a reference."""
        return None if isinstance(self.result, TextPerplexity) else judge(self.result)


def evaluate(artifact: OpenArtifact, *, reference: str | None, progress: Progress) -> Evaluation:
    """Measure perplexity; with a reference, KL divergence and agreement too."""
    reason = ""
    if reference is None:
        reference, reason = original_at_hand(artifact.recipe)
    if reference is None and not artifact.session.generates:
        raise InputError(
            "an encoder has no perplexity, and its original is not on this disk",
            where=str(artifact.folder),
            next_step="name the original with --reference MODEL",
        )
    original = named_reference(reference, artifact.session, artifact.threads) if reference else None
    is_meaningful, session = not artifact.recipe.random_weights, artifact.session
    result: Accuracy | Similarity | TextPerplexity
    if isinstance(session, Encoder) and session.reads_pictures:
        assert original is not None, "an encoder has no perplexity of its own"
        result = compare_pictures(artifact, session, original, progress, is_meaningful=is_meaningful)
    else:
        result = compare(artifact, text_tokens(artifact), original, progress, is_meaningful=is_meaningful)
    return Evaluation(result=result, reference=reference, notes=(reason,) if reason else ())


def text_tokens(artifact: OpenArtifact) -> tuple[Ints, str]:
    """(token ids, name) of the recipe's text; ids outside the vocabulary raise."""
    measure, vocab_size = artifact.recipe.measure, artifact.vocab_size
    if artifact.recipe.random_weights and vocab_size:
        return random_text(measure, vocab_size)
    ids, name = encoded_text(measure, artifact.folder)
    if vocab_size and ids.max(initial=0) >= vocab_size:
        raise InputError(
            f"the tokenizer gives id {ids.max()}, and the model has {vocab_size} tokens",
            where=str(artifact.folder),
            next_step="copy tokenizer.json of the checkpoint into the folder",
        )
    return ids, name
