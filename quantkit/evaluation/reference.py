"""References of accuracy: the original in transformers, or another artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Floats, Ints, Logits
from quantkit.evaluation.artifact import open_measured
from quantkit.evaluation.encoder_decoder import AnswerLogits
from quantkit.recipe import Recipe
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.graph import holds_model
from quantkit.runtime.manifest import require_whole
from quantkit.runtime.session import Session

if TYPE_CHECKING:
    from quantkit.model.load import Source


PairLogits = Callable[[Ints, Ints], Floats]  # token ids, token types [B, S] -> logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A model that is loaded when its logits are first used."""

    logits: Callable[[], Logits]
    answer_logits: Callable[[], AnswerLogits]  # of an encoder-decoder
    reads_and_answers: bool = False
    vectors: Callable[[], Logits] | None = None  # of a text, where the model pools its states
    pair_logits: Callable[[], PairLogits] | None = None  # of token ids and token types, of an encoder


def session_reference(session: Session) -> Reference:
    encoder = session if isinstance(session, Encoder) else None
    return Reference(
        vectors=(lambda: encoder.vectors) if encoder and encoder.pools else None,
        pair_logits=(lambda: encoder.logits) if encoder else None,
        logits=lambda: session.logits,
        answer_logits=lambda: session.answer_logits,
        reads_and_answers=session.reads_and_answers,
    )


def transformers_reference(source: Source, vector: str | None = None) -> Reference:
    """The original in transformers, in float32; `vector` names its output of one vector an example."""
    from quantkit.model.reference import (
        reference_answer_logits,
        reference_logits,
        reference_output,
        reference_pair_logits,
        reference_vectors,
    )

    vectors = (lambda: reference_vectors(source)) if source.sentence else None
    if vector and not source.sentence:
        vectors = partial(reference_output, source, vector)
    return Reference(
        vectors=vectors,
        logits=lambda: reference_logits(source),
        pair_logits=lambda: reference_pair_logits(source),
        answer_logits=lambda: reference_answer_logits(source),
        reads_and_answers=bool(source.config.get("is_encoder_decoder")),
    )


def named_reference(name: str, session: Session, threads: int) -> Reference:
    """Open an artifact folder or a model by name; it must be of the session's kind."""
    from quantkit.model.inspect import inspect_source
    from quantkit.model.load import open_source
    from quantkit.model.weights.open import require_complete, with_weights

    folder = Path(name).expanduser()
    if holds_model(folder):
        require_whole(folder)
        reference = session_reference(open_measured(folder, threads=threads))
    else:
        source = with_weights(open_source(name), random_weights=False)
        require_complete(source, inspect_source(source))
        vector = session.vector_output if isinstance(session, Encoder) else None
        reference = transformers_reference(source, vector)
    if reference.reads_and_answers != session.reads_and_answers:
        kinds = ("a decoder or an encoder", "an encoder-decoder model")
        raise InputError(
            f"the reference is {kinds[reference.reads_and_answers]}, and the artifact is "
            f"{kinds[session.reads_and_answers]}",
            where=f"--reference {name}",
            allowed="the original, or another artifact of the same model",
        )
    return reference


def original_at_hand(recipe: Recipe) -> tuple[str | None, str]:
    """(model of the recipe, "") if it is on this disk, else (None, reason); nothing is downloaded."""
    if recipe.model is None:
        return None, "no recipe names the original; --reference MODEL compares with it"
    if recipe.random_weights:
        return None, "the weights are random, so perplexity says nothing"
    path = Path(recipe.model).expanduser()
    is_model = path.is_file() or (path / "config.json").exists() or next(path.glob("*.gguf"), None)
    if recipe.model == "demo" or is_model:
        return recipe.model, ""
    return None, f"the original, {recipe.model}, is not on this disk; --reference MODEL compares with it"
