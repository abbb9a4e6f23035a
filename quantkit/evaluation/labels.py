"""Labels of a quantized classifier beside those of its original.

Labels that differ are counted. KL(original || quantized) covers the probabilities, which thresholds read.
Labels that do not exclude each other are as many distributions of two values; their divergences add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantkit.evaluation.accuracy import Doubles, error_over_windows
from quantkit.evaluation.agreement import log_softmax
from quantkit.evaluation.measurements import Labels


def compare_labels(
    expected: Sequence[Doubles], actual: Sequence[Doubles], *, are_independent: bool, of_tokens: bool
) -> Labels:
    """Compare logits of texts, [labels] of a text or [tokens, labels]."""
    counts = [len(logits_TL) for logits_TL in map(np.atleast_2d, expected)]
    expected_TL, actual_TL = (np.concatenate([*map(np.atleast_2d, logits)]) for logits in (expected, actual))
    if are_independent:
        is_other_T = ((expected_TL > 0) != (actual_TL > 0)).any(axis=1)
        kl_T = _divergence(*(np.stack([x, np.zeros_like(x)], -1) for x in (expected_TL, actual_TL))).sum(-1)
    else:
        is_other_T = expected_TL.argmax(axis=1) != actual_TL.argmax(axis=1)
        kl_T = _divergence(expected_TL, actual_TL)
    flips_T, has_spread = is_other_T.astype(np.float64), len(counts) > 1
    return Labels(
        flips=float(flips_T.mean()),
        flips_standard_error=error_over_windows(flips_T, counts) if has_spread else None,
        kl_divergence=float(kl_T.mean()),
        kl_standard_error=error_over_windows(kl_T, counts) if has_spread else None,
        num_labels=expected_TL.shape[1],
        num_compared=len(kl_T),
        of_tokens=of_tokens,
    )


def _divergence(expected_L: Doubles, actual_L: Doubles) -> Doubles:
    """KL(expected || actual) over the last axis, in nats."""
    expected_log_L, actual_log_L = log_softmax(expected_L), log_softmax(actual_L)
    kl: Doubles = (np.exp(expected_log_L) * (expected_log_L - actual_log_L)).sum(axis=-1)
    return np.maximum(kl, 0.0)  # rounding can leave -1e-16
