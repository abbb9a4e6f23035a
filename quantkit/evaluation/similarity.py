"""Similarity of the outputs of a quantized encoder and its original.

An encoder predicts no next token, so it has no perplexity. Search and classification read pooled outputs:
their cosine is measured, and the largest error, which a cosine hides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Ints, Logits
from quantkit.evaluation.measurements import Similarity


def measure_similarity(
    *,
    reference: Logits,
    quantized: Logits,
    token_ids: Ints,
    window: int,
    text: str,
    is_meaningful: bool = True,
    progress: Callable[[int], None] = lambda count: None,
) -> Similarity:
    """Compare two encoders on the whole windows of a text.

    Outputs are [1, S, D]; a classifier's are [1, D].
    """
    num_windows = len(token_ids) // window
    if num_windows < 1:
        raise InputError(
            f"the text has {len(token_ids)} tokens",
            where=text,
            allowed=f"{window} tokens or more",
            next_step="give a longer text",
        )
    cosines, squared_values, squared_errors = np.empty((3, num_windows))
    largest_value = largest_error = 0.0
    for number in range(num_windows):
        ids = token_ids[None, number * window : (number + 1) * window]
        expected, actual = (model(ids)[0].astype(np.float64) for model in (reference, quantized))
        assert expected.shape == actual.shape, (expected.shape, actual.shape)
        cosines[number] = pooled_cosine(expected, actual)
        error = actual - expected
        largest_value = max(largest_value, float(np.abs(expected).max()))
        largest_error = max(largest_error, float(np.abs(error).max()))
        squared_values[number] = (expected**2).sum()
        squared_errors[number] = (error**2).sum()
        progress(window)
    rms_error, standard_error = relative_rms(squared_errors, squared_values)
    return Similarity(
        mean_cosine=float(cosines.mean()),
        lowest_cosine=float(cosines.min()),
        relative_rms_error=rms_error,
        max_relative_error=largest_error / largest_value if largest_value else 0.0,
        num_windows=num_windows,
        window=window,
        text=text,
        is_meaningful=is_meaningful,
        error_standard_error=standard_error,
    )


def relative_rms(
    squared_errors_W: NDArray[np.float64], squared_values_W: NDArray[np.float64]
) -> tuple[float, float | None]:
    """(RMS of all errors over RMS of all values, its standard error from leaving out each window)."""
    if not squared_values_W.sum():
        return 0.0, None
    whole = float(np.sqrt(squared_errors_W.sum() / squared_values_W.sum()))
    count = len(squared_values_W)
    if count < 2:
        return whole, None
    left_values_W = squared_values_W.sum() - squared_values_W
    left_W = np.sqrt(
        (squared_errors_W.sum() - squared_errors_W).clip(0) / np.where(left_values_W, left_values_W, 1)
    )
    return whole, float(np.sqrt((count - 1) * left_W.var()))


def pooled_cosine(expected: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Cosine of outputs [S, D] pooled by the mean over positions, or of vectors [D]."""
    pooled, pooled_actual = (
        values.mean(axis=0) if values.ndim > 1 else values for values in (expected, actual)
    )
    norms = np.linalg.norm(pooled) * np.linalg.norm(pooled_actual)
    return float(pooled @ pooled_actual / norms) if norms else 1.0
