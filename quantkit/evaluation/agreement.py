"""Agreement of the outputs of an execution provider with those of a reference.

Only a few texts are compared, because an emulator takes seconds for each. Perplexity is therefore a ratio on
equal tokens, with KL divergence beside it. The outputs of an encoder predict no token: their cosine counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quantkit.evaluation.accuracy import Floats, Ints, score_tokens
from quantkit.evaluation.measurements import ProviderAccuracy
from quantkit.evaluation.similarity import pooled_cosine, relative_rms


def agreement(
    outputs_WPV: Floats,
    reference_WPV: Floats,
    *,
    ids_WS: Ints,
    positions: Sequence[int],
    reference: str,
    predicts_tokens: bool,
) -> ProviderAccuracy:
    """Compare outputs at `positions` of W texts: logits of a decoder (V tokens), states of an encoder."""
    largest = float(np.abs(reference_WPV).max())
    error = float(np.abs(outputs_WPV.astype(np.float64) - reference_WPV).max())
    pairs = list(zip(reference_WPV, outputs_WPV, strict=True))
    kl = perplexity_ratio = lowest_cosine = rms_error = standard_error = None
    is_same_WP = outputs_WPV.argmax(axis=-1) == reference_WPV.argmax(axis=-1)
    if predicts_tokens:
        kl_W = [_divergence(*pair) for pair in pairs]
        kl, standard_error = float(np.mean(kl_W)), _error_over_texts(kl_W)
        perplexity_ratio = _perplexity_ratio(outputs_WPV, reference_WPV, ids_WS, positions)
    else:
        cosines = [pooled_cosine(*(states.astype(np.float64) for states in pair)) for pair in pairs]
        lowest_cosine = float(np.min(cosines))
        rms_error, standard_error = relative_rms(
            np.array([(np.subtract(*pair, dtype=np.float64) ** 2).sum() for pair in pairs]),
            np.array([(states.astype(np.float64) ** 2).sum() for states in reference_WPV]),
        )
    return ProviderAccuracy(
        reference=reference,
        max_relative_logit_error=error / largest if largest else 0.0,
        num_tokens=outputs_WPV.shape[0] * outputs_WPV.shape[1],
        top1_agreement=float(is_same_WP.mean()),
        top1_standard_error=_error_over_texts(is_same_WP.mean(axis=1)),
        standard_error=standard_error,
        kl_divergence=kl,
        perplexity_ratio=perplexity_ratio,
        lowest_cosine=lowest_cosine,
        relative_rms_error=rms_error,
    )


def _error_over_texts(values_W: ArrayLike) -> float | None:
    values = np.asarray(values_W, np.float64)
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def _perplexity_ratio(
    outputs_WPV: Floats, reference_WPV: Floats, ids_WS: Ints, positions: Sequence[int]
) -> float | None:
    """Ratio over the positions that precede a token; None if no position does."""
    rows = [row for row, position in enumerate(positions) if position + 1 < ids_WS.shape[1]]
    if not rows:
        return None
    targets_WP = ids_WS[:, [positions[row] + 1 for row in rows]]
    nll, reference_nll = (
        np.mean(
            [
                score_tokens(logits_PV[rows], targets_P)[0]
                for logits_PV, targets_P in zip(logits_WPV, targets_WP, strict=True)
            ]
        )
        for logits_WPV in (outputs_WPV, reference_WPV)
    )
    return math.exp(float(nll - reference_nll))


def _divergence(reference_PV: Floats, outputs_PV: Floats) -> float:
    """Mean KL(reference || outputs) in nats."""
    reference, outputs = (log_softmax(logits_PV) for logits_PV in (reference_PV, outputs_PV))
    return float((np.exp(reference) * (reference - outputs)).sum(axis=-1).mean())


def log_softmax(logits_PV: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted = logits_PV - logits_PV.max(axis=-1, keepdims=True).astype(np.float64)
    log: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log
