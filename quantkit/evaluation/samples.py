"""Answers of a quantized model and of its float reference to the same texts, side by side.

A decoder continues the beginnings of lines of the measured text. An encoder names the nearest other line, and
a classifier a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from quantkit.evaluation.similarity import nearest
from quantkit.files import read_json
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.generate import generate
from quantkit.runtime.session import Session
from quantkit.runtime.tokenizer import Text

NUM_PROMPTS, NUM_TEXTS = 4, 32
PROMPT_TOKENS, NEW_TOKENS = 16, 32
LEAST_LETTERS = 40  # of a line that is used
TEXT_TOKENS = 64  # of a line that an encoder reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A text and both answers: tokens of a continuation, or one nearest text or label."""

    text: str
    reference: tuple[str, ...]
    quantized: tuple[str, ...]
    first_difference: int | None = None  # index of the first token that differs


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    kind: str  # "continuation", "nearest text" or "label"
    samples: tuple[Sample, ...]


def take_samples(
    reference: Session, quantized: Session, tokenizer: Text, text: str, *, folder: Path
) -> Samples | None:
    """Answers to lines of a text; None where it has too few lines."""
    if quantized.generates:
        prompts = lines_of(text, NUM_PROMPTS)
        return _continuations((reference, quantized), tokenizer, prompts) if prompts else None
    lines = lines_of(text, NUM_TEXTS)
    return _vectors((reference, quantized), tokenizer, lines, folder) if len(lines) > 2 else None


def lines_of(text: str, count: int) -> list[str]:
    """Distinct lines of some length, spread evenly over a text."""
    lines = list(dict.fromkeys(line.strip() for line in text.splitlines()))
    lines = [line for line in lines if len(line) >= LEAST_LETTERS]
    return lines[:: max(1, len(lines) // count)][:count]


def _continuations(models: Sequence[Session], tokenizer: Text, lines: Sequence[str]) -> Samples:
    room = min(session.context or PROMPT_TOKENS + NEW_TOKENS for session in models)
    longest = min(PROMPT_TOKENS, room // 2, *(session.fixed_length or room for session in models))
    num_new = min(NEW_TOKENS, room - longest)
    prompts = [tokenizer.encode(line)[:longest] for line in lines]
    answers = []
    for session in models:
        steps = generate(session, prompts, max_new_tokens=num_new, stop_ids=tokenizer.stop_ids)
        answers.append([[token for token in row if token is not None] for row in zip(*steps, strict=True)])
    return Samples(
        kind="continuation",
        samples=tuple(
            Sample(
                text=tokenizer.decode(prompt),
                reference=_pieces(tokenizer, prompt, first),
                quantized=_pieces(tokenizer, prompt, second),
                first_difference=_first_difference(first, second),
            )
            for prompt, first, second in zip(prompts, *answers, strict=True)
        ),
    )


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    pairs = enumerate(zip_longest(first, second))
    return next((index for index, (left, right) in pairs if left != right), None)


def _pieces(tokenizer: Text, prompt: list[int], tokens: list[int]) -> tuple[str, ...]:
    """The text of each token; a letter of several tokens belongs to the last of them."""
    pieces, shown = [], tokenizer.decode(prompt)
    for end in range(1, len(tokens) + 1):
        decoded = tokenizer.decode(prompt + tokens[:end])
        is_whole = not decoded.endswith("\ufffd") and decoded.startswith(shown)
        pieces.append(decoded[len(shown) :] if is_whole else "")
        shown = decoded if is_whole else shown
    return tuple(pieces)


def _vectors(
    models: Sequence[Session], tokenizer: Text, lines: Sequence[str], folder: Path
) -> Samples | None:
    """The nearest other line by the cosine of pooled states, or the label of a classifier."""
    lengths = [
        TEXT_TOKENS,
        *(limit for session in models for limit in (session.fixed_length, session.context) if limit),
    ]
    ids = [np.array([tokenizer.encode(line)[: min(lengths)]], np.int64) for line in lines]
    pools = all(isinstance(session, Encoder) and session.pools for session in models)
    runs = [
        session.vectors if isinstance(session, Encoder) and pools else session.logits for session in models
    ]
    outputs = [[run(ids_BT)[0].astype(np.float64) for ids_BT in ids] for run in runs]
    is_classifier = outputs[0][0].ndim == 1 and not pools
    if is_classifier and len(outputs[0][0]) == 1:  # a reranker reads no text alone
        return None
    if is_classifier:
        labels = read_json(folder / "config.json").get("id2label", {})
        answers = [[str(labels.get(str(row.argmax()), row.argmax())) for row in rows] for rows in outputs]
    else:
        answers = [
            [lines[index] for index in nearest([row if pools else row.mean(axis=0) for row in rows])]
            for rows in outputs
        ]
    return Samples(
        kind="label" if is_classifier else "nearest text",
        samples=tuple(
            Sample(
                text=line,
                reference=(first,),
                quantized=(second,),
                first_difference=None if first == second else 0,
            )
            for line, first, second in zip(lines, *answers, strict=True)
        ),
    )
