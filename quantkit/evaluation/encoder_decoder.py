"""Accuracy of an encoder-decoder model on running text, in half windows.

The encoder reads the first half of a window. The decoder reads the true tokens of the second half and
predicts them one by one. The next window begins at that second half, so every token after the first half
window counts once. A model trained for translation has a high perplexity on such text; differences between
the original and the quantized model remain comparable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    reference: AnswerLogits | None,
    quantized: AnswerLogits,
    token_ids: Ints,
    window: int,
    start_ids: Sequence[int],
    text: str,
    is_meaningful: bool = True,
    progress: Callable[[int], None] = lambda count: None,
) -> Accuracy | TextPerplexity:
    """Compare two models on a text, or measure one without a reference; decoders begin with `start_ids`."""
    ids, half = np.ascontiguousarray(token_ids, np.int64), max(1, window // 2)

    def in_order(model: AnswerLogits) -> Logits:
        """Logits of consecutive windows; the encoder reads the half window before the decoder's."""
        begins = itertools.count(0, half)

        def logits(window_BS: Ints) -> Floats:
            begin = next(begins)
            answer = window_BS[0, 1:]
            assert np.array_equal(answer, ids[begin + half :][: len(answer)]), "windows come in order"
            decoder_BD = np.concatenate([np.array(start_ids, np.int64), answer])[None]
            return model(ids[None, begin : begin + half], decoder_BD)[:, len(start_ids) - 1 :]

        return logits

    # A window of half + 1 tokens predicts half of them: nothing predicts its first token.
    answers, length = ids[half - 1 :], half + 1
    result: Accuracy | TextPerplexity
    if reference is None:
        result = measure_perplexity(
            model=in_order(quantized),
            token_ids=answers,
            window=length,
            stride=half,
            text=text,
            progress=progress,
        )
    else:
        result = measure_accuracy(
            reference=in_order(reference),
            quantized=in_order(quantized),
            token_ids=answers,
            window=length,
            stride=half,
            text=text,
            is_meaningful=is_meaningful,
            progress=progress,
        )
    return replace(result, window=2 * half, text=f"{text} ({PROTOCOL})")
