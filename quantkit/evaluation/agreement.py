"""How close the logits of one execution provider are to a reference's, at the positions that it gave.

Few texts have to do here, since an emulator takes seconds for each, so perplexity is told as a ratio on the
same tokens and KL divergence stands beside it. An encoder's states predict nothing: their direction counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quantkit.evaluation.accuracy import score_tokens
from quantkit.evaluation.measurements import ProviderAccuracy

# Letters: W texts, P positions compared, S tokens of a text, V vocabulary or width.
Floats = NDArray[np.float32]


def agreement(
    made_WPV: Floats,
    reference_WPV: Floats,
    *,
    ids_WS: NDArray[np.int64],
    positions: Sequence[int],
    reference: str,
    predicts_tokens: bool,
) -> ProviderAccuracy:
    """Of logits that predict the next token everything; of states the errors and the least cosine."""
    difference = made_WPV.astype(np.float64) - reference_WPV
    largest = float(np.abs(reference_WPV).max())
    error = float(np.abs(difference).max()) / largest if largest else 0.0
    common = {
        "reference": reference,
        "max_relative_logit_error": error,
        "num_tokens": made_WPV.shape[0] * made_WPV.shape[1],
    }
    is_same_WP = made_WPV.argmax(axis=-1) == reference_WPV.argmax(axis=-1)
    top1 = float(is_same_WP.mean())
    if not predicts_tokens:
        return ProviderAccuracy(
            **common, top1_agreement=top1, lowest_cosine=_lowest_cosine(made_WPV, reference_WPV)
        )
    kl = float(np.mean([_divergence(*pair) for pair in zip(reference_WPV, made_WPV, strict=True)]))
    return ProviderAccuracy(
        **common,
        top1_agreement=top1,
        kl_divergence=kl,
        perplexity_ratio=_perplexity_ratio(made_WPV, reference_WPV, ids_WS, positions),
    )


def _perplexity_ratio(
    made_WPV: Floats, reference_WPV: Floats, ids_WS: NDArray[np.int64], positions: Sequence[int]
) -> float | None:
    """Over the positions that have a token behind them; None where there is none."""
    places = [number for number, place in enumerate(positions) if place + 1 < ids_WS.shape[1]]
    if not places:
        return None
    targets_WP = ids_WS[:, [positions[number] + 1 for number in places]]
    means = [
        np.mean([score_tokens(one_PV[places], row)[0] for one_PV, row in zip(each, targets_WP, strict=True)])
        for each in (made_WPV, reference_WPV)
    ]
    return math.exp(float(means[0] - means[1]))


def _divergence(reference_PV: Floats, made_PV: Floats) -> float:
    """Mean KL(reference || made) in nats."""
    reference, made = (_log_softmax(each) for each in (reference_PV, made_PV))
    return float((np.exp(reference) * (reference - made)).sum(axis=-1).mean())


def _log_softmax(logits_PV: Floats) -> NDArray[np.float64]:
    shifted = logits_PV - logits_PV.max(axis=-1, keepdims=True).astype(np.float64)
    log: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log


def _lowest_cosine(made_WPV: Floats, reference_WPV: Floats) -> float:
    """Of the texts' states, pooled by the mean over positions."""
    made, wanted = (each.astype(np.float64).mean(axis=1) for each in (made_WPV, reference_WPV))
    norms = np.linalg.norm(made, axis=-1) * np.linalg.norm(wanted, axis=-1)
    dots = (made * wanted).sum(axis=-1)
    return float(np.divide(dots, norms, out=np.ones_like(dots), where=norms > 0).min())
