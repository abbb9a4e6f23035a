"""Similarity of the outputs of a quantized encoder and its original.

An encoder predicts no next token, so it has no perplexity. Search and classification read pooled outputs:
their cosine is measured, and the largest error, which a cosine hides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Doubles, Ints, Logits
from quantkit.evaluation.measurements import Similarity


def measure_similarity(
    *,
    reference: Logits,
    quantized: Logits,
    rows: Sequence[NDArray[Any]],
    text: str,
    are_embeddings: bool = False,
    is_meaningful: bool = True,
    outputs: tuple[list[Doubles], list[Doubles]] | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Similarity:
    """Compare two encoders on the token ids of several texts, or on the pixels of several pictures.

    Outputs are [1, S, D]; those of a classifier and sentence embeddings are [1, D]. `outputs` receives those
    of both models.
    """
    num_windows = len(rows)
    keeps, outputs = are_embeddings or outputs is not None, outputs or ([], [])
    cosines, squared_values, squared_errors = np.empty((3, num_windows))
    largest_value = largest_error = 0.0
    for number, ids in enumerate(rows):
        expected, actual = (model(ids[None])[0].astype(np.float64) for model in (reference, quantized))
        assert expected.shape == actual.shape, (expected.shape, actual.shape)
        require_finite(expected, actual)
        cosines[number] = pooled_cosine(expected, actual)
        error = actual - expected
        largest_value = max(largest_value, float(np.abs(expected).max()))
        largest_error = max(largest_error, float(np.abs(error).max()))
        squared_values[number] = (expected**2).sum()
        squared_errors[number] = (error**2).sum()
        if keeps:
            outputs[0].append(expected)
            outputs[1].append(actual)
        progress(ids.shape[-1])
    rms_error, standard_error = relative_rms(squared_errors, squared_values)
    return Similarity(
        mean_cosine=float(cosines.mean()),
        lowest_cosine=float(cosines.min()),
        relative_rms_error=rms_error,
        max_relative_error=largest_error / largest_value if largest_value else 0.0,
        num_windows=num_windows,
        window=max(ids.shape[-1] for ids in rows),
        text=text,
        is_meaningful=is_meaningful,
        error_standard_error=standard_error,
        nearest_agreement=nearest_agreement(*outputs) if are_embeddings and num_windows > 2 else None,
    )


def windows_of(token_ids: Ints, window: int, text: str) -> list[Ints]:
    """The whole windows of a text."""
    if len(token_ids) < window:
        raise InputError(
            f"the text has {len(token_ids)} tokens",
            where=text,
            allowed=f"{window} tokens or more",
            next_step="give a longer text",
        )
    count = len(token_ids) // window
    return list(token_ids[: count * window].reshape(count, window))


def nearest(vectors: Sequence[Doubles]) -> NDArray[np.int64]:
    """The index of the nearest other vector by cosine, for each."""
    unit_ND = unit(np.stack(vectors))
    cosine_NN = unit_ND @ unit_ND.T
    np.fill_diagonal(cosine_NN, -np.inf)
    indices: NDArray[np.int64] = cosine_NN.argmax(axis=1)
    return indices


def unit(vectors_ND: Doubles) -> Doubles:
    """Vectors of length 1; those of zeros stay zeros."""
    scaled: Doubles = vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True).clip(1e-30)
    return scaled


def require_finite(expected: Doubles, actual: Doubles) -> None:
    """Refuse outputs that are not numbers, whose distance would be below every limit."""
    for name, values in (("original", expected), ("quantized", actual)):
        if not np.isfinite(values).all():
            raise InputError(
                f"outputs of the {name} model are not finite",
                where="accuracy",
                next_step="half precision overflowed, or weights are damaged; take an intact checkpoint",
            )


def nearest_agreement(expected: Sequence[Doubles], actual: Sequence[Doubles]) -> float:
    """Share of texts whose nearest other text both models name."""
    return float((nearest(expected) == nearest(actual)).mean())


def relative_rms(squared_errors_W: Doubles, squared_values_W: Doubles) -> tuple[float, float | None]:
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


def pooled_cosine(expected: Doubles, actual: Doubles) -> float:
    """Cosine of outputs [S, D] pooled by the mean over positions, or of vectors [D]."""
    pooled, pooled_actual = (
        values.mean(axis=0) if values.ndim > 1 else values for values in (expected, actual)
    )
    norms = np.linalg.norm(pooled) * np.linalg.norm(pooled_actual)
    return float(pooled @ pooled_actual / norms) if norms else 1.0
