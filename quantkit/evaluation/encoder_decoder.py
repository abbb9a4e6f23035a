"""Accuracy of an encoder and its decoder, on running text: one half of each window in, the other half out.

A model that answers has no next token for the text that its encoder reads. So each window is cut in two:
the encoder reads the first half, and the decoder, given the true tokens so far, predicts the second. The
next window begins where that half began, so that every token but those of the first half counts once. A
model that was trained to translate finds such text strange, and its perplexity is high; what the original
and the quantized model do differently on it is still theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quantkit.evaluation.accuracy import (
    Floats,
    Ints,
    Logits,
    TextPerplexity,
    measure_accuracy,
    measure_perplexity,
)
from quantkit.evaluation.measurements import Accuracy

# Encoder's token ids [B, E], decoder's token ids [B, D] -> logits [B, D, V]
AnswerLogits = Callable[[Ints, Ints], Floats]
PROTOCOL = "the encoder reads the first half of each window, the decoder predicts the second"


def measure_halves(
    *,
    reference: AnswerLogits,
    quantized: AnswerLogits,
    token_ids: Ints,
    window: int,
    start_ids: Sequence[int],
    text: str,
    is_meaningful: bool = True,
    progress: Callable[[int], None] = lambda count: None,
) -> Accuracy:
    """Compare two models on a text; `start_ids` are what their decoders begin with."""
    ids, half = _halves(token_ids, window)
    made = measure_accuracy(
        reference=_in_turn(reference, ids, half, start_ids),
        quantized=_in_turn(quantized, ids, half, start_ids),
        is_meaningful=is_meaningful,
        progress=progress,
        **_answers(ids, half, text),
    )
    return dataclasses.replace(made, **_protocol(half, text))


def perplexity_of_halves(
    *,
    model: AnswerLogits,
    token_ids: Ints,
    window: int,
    start_ids: Sequence[int],
    text: str,
    progress: Callable[[int], None] = lambda count: None,
) -> TextPerplexity:
    """The same figure of one model, with nothing beside it."""
    ids, half = _halves(token_ids, window)
    made = measure_perplexity(
        model=_in_turn(model, ids, half, start_ids), progress=progress, **_answers(ids, half, text)
    )
    return dataclasses.replace(made, **_protocol(half, text))


def _halves(token_ids: Ints, window: int) -> tuple[Ints, int]:
    return np.ascontiguousarray(token_ids, np.int64), max(1, window // 2)


def _answers(ids: Ints, half: int, text: str) -> dict[str, Any]:
    """Windows over the answers begin one token early: that token is given and not predicted."""
    return {"token_ids": ids[half - 1 :], "window": half + 1, "stride": half, "text": text}


def _protocol(half: int, text: str) -> dict[str, Any]:
    """What was done, in the text's own windows."""
    return {"window": 2 * half, "stride": half, "text": f"{text} ({PROTOCOL})"}


def _in_turn(model: AnswerLogits, ids: Ints, half: int, start_ids: Sequence[int]) -> Logits:
    """The logits of one window of answers after the other, each with the half window before it encoded."""
    begins = itertools.count(0, half)

    def logits(window_BS: Ints) -> Floats:
        begin = next(begins)
        answer = window_BS[0, 1:]
        assert np.array_equal(answer, ids[begin + half :][: len(answer)]), "windows come in order"
        decoder_BD = np.concatenate([np.array(start_ids, np.int64), answer])[None]
        return model(ids[None, begin : begin + half], decoder_BD)[:, len(start_ids) - 1 :]

    return logits
