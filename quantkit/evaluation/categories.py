"""Accuracy of a decoder by category of text: prose, code, other scripts, and a long context.

The texts are bundled, and nothing is calibrated on them. Windows are few and spread over each text, so that
all categories together read about an eighth of the tokens that the main text takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from quantkit.evaluation.accuracy import Ints, Logits, measure_accuracy
from quantkit.evaluation.measurements import CategoryAccuracy
from quantkit.quantization.calibration.tokens import read_text
from quantkit.recipe import Measure
from quantkit.runtime.tokenizer import open_text

CATEGORIES = {  # name -> (windows, share of the recipe's tokens that a window takes)
    "prose": (3, 1 / 64),
    "code": (3, 1 / 64),
    "other scripts": (3, 1 / 64),
    "long context": (1, 1 / 8),
}
MIN_WINDOW = 8


def category_windows(
    measure: Measure, folder: Path, *, context: int, vocab_size: int | None
) -> dict[str, Ints]:
    """Windows [N, T] of each category; one that the tokenizer cannot spell is left out."""
    tokenizer, windows = open_text(folder), {}
    for name, (count, share) in CATEGORIES.items():
        text = read_text(None, bundled=f"categories/{name.replace(' ', '-')}.txt", flag="")
        ids = np.array(tokenizer.encode(text), np.int64)
        length = min(max(MIN_WINDOW, int(measure.max_tokens * share)), context, len(ids))
        if length < MIN_WINDOW or (vocab_size and ids.max() >= vocab_size):
            continue
        starts = np.linspace(0, len(ids) - length, count).astype(int)
        windows[name] = np.stack([ids[start : start + length] for start in starts])
    return windows


def accuracy_by_category(
    reference: Logits, quantized: Logits, windows: Mapping[str, Ints], progress: Callable[[int], None]
) -> tuple[CategoryAccuracy, ...]:
    """The windows of a category are read one by one, without overlap."""
    results = []
    for name, windows_NT in windows.items():
        length = windows_NT.shape[1]
        accuracy = measure_accuracy(
            reference=reference,
            quantized=quantized,
            token_ids=windows_NT.reshape(-1),
            window=length,
            stride=length,
            text=name,
            progress=progress,
        )
        results.append(
            CategoryAccuracy(
                name=name,
                kl_divergence=accuracy.kl_divergence,
                kl_standard_error=accuracy.kl_standard_error,
                flip_rate=1 - accuracy.top1_agreement,
                num_tokens=accuracy.num_tokens,
                window=length,
            )
        )
    return tuple(results)
