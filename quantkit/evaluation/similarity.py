"""How close the outputs of a quantized encoder stay to the original's.

An encoder predicts no next token, so what counts is whether its vectors still point where they did: the
cosine of pooled outputs, which searches and classifiers read, and the largest error, which a cosine hides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.measurements import Similarity

# Token ids [B, S] -> values [B, S, D]; or [B, D] where there is one answer a text, as from a classifier.
Outputs = Callable[[NDArray[np.int64]], NDArray[np.float32]]


def measure_similarity(
    *,
    reference: Outputs,
    quantized: Outputs,
    token_ids: NDArray[np.int64],
    window: int,
    text: str,
    is_meaningful: bool = True,
    progress: Callable[[int], None] = lambda count: None,
) -> Similarity:
    """Compare two encoders on the whole windows of a text, pooled by the mean over positions."""
    num_windows = len(token_ids) // window
    if num_windows < 1:
        raise InputError(
            f"the text has {len(token_ids)} tokens",
            where=text,
            allowed=f"{window} tokens or more",
            next_step="give a longer text",
        )
    cosines = np.empty(num_windows)
    largest_value = largest_error = squared_value = squared_error = 0.0
    for number in range(num_windows):
        ids = token_ids[None, number * window : (number + 1) * window]
        wanted, made = (each(ids)[0].astype(np.float64) for each in (reference, quantized))
        assert wanted.shape == made.shape, (wanted.shape, made.shape)
        pooled, pooled_made = (each.mean(axis=0) if each.ndim > 1 else each for each in (wanted, made))
        norms = np.linalg.norm(pooled) * np.linalg.norm(pooled_made)
        cosines[number] = pooled @ pooled_made / norms if norms else 1.0
        error = made - wanted
        largest_value = max(largest_value, float(np.abs(wanted).max()))
        largest_error = max(largest_error, float(np.abs(error).max()))
        squared_value += float((wanted**2).sum())
        squared_error += float((error**2).sum())
        progress(window)
    return Similarity(
        mean_cosine=float(cosines.mean()),
        lowest_cosine=float(cosines.min()),
        relative_rms_error=(squared_error / squared_value) ** 0.5 if squared_value else 0.0,
        max_relative_error=largest_error / largest_value if largest_value else 0.0,
        num_windows=num_windows,
        window=window,
        text=text,
        is_meaningful=is_meaningful,
    )
