"""Answers of the float model and of the artifact to the same texts, with the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.report.tables import Json

SHOWN_CHANGES = 8  # of an encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A text and two answers; `same` tokens are equal, then come the first that differ."""

    text: str
    same: str
    reference: tuple[str, str]  # the first differing token, and the rest
    quantized: tuple[str, str]
    differs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    title: str
    summary: str
    answers: tuple[Answer, ...]
    is_continued: bool


def answers_of(samples: Json | None) -> Answers | None:
    """Continuations, or the answers of an encoder that differ."""
    if not samples:
        return None
    kind, every = samples["kind"], samples["samples"]
    equal = sum("first_difference" not in sample for sample in every)
    if kind == "continuation":
        return Answers(
            title="The same prompts, continued",
            summary="Greedy continuations of the float model and of the artifact. The first token that "
            f"differs is marked; {equal} of {len(every)} have none.",
            answers=tuple(_answer(sample) for sample in every),
            is_continued=True,
        )
    changed = [sample for sample in every if "first_difference" in sample]
    shown = f" The first {SHOWN_CHANGES} changes:" if len(changed) > SHOWN_CHANGES else ""
    return Answers(
        title=f"{kind.capitalize()}s in both models",
        summary=f"{equal} of {len(every)} texts have the same {kind} in the float model and in the "
        f"artifact.{shown}",
        answers=tuple(_answer(sample) for sample in changed[:SHOWN_CHANGES]),
        is_continued=False,
    )


def _answer(sample: Json) -> Answer:
    first = sample.get("first_difference")
    both = (sample["reference"], sample["quantized"])
    cut = len(both[0]) if first is None else first
    reference, quantized = ((_visible(tokens[cut : cut + 1]), _visible(tokens[cut + 1 :])) for tokens in both)
    return Answer(
        text=sample["text"],
        same=_visible(both[0][:cut]),
        reference=reference,
        quantized=quantized,
        differs=first is not None,
    )


def _visible(tokens: Sequence[str]) -> str:
    """The text of tokens in one line, with its line ends shown."""
    return "".join(tokens).replace("\n", "↵ ")
