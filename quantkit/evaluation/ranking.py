"""Rankings of passages by a quantized model beside those of its original.

The first ten passages of the original are the relevant ones, with gains of 10, 9 ... 1. nDCG@10 (Järvelin and
Kekäläinen 2002, https://doi.org/10.1145/582415.582418) of the quantized model is 1 where it names the same
ten in the same order, whatever the scale of its scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quantkit.evaluation.accuracy import Doubles, Ints
from quantkit.evaluation.measurements import Ranking

DEPTH = 10


def compare_rankings(
    expected: Sequence[Doubles], actual: Sequence[Doubles], *, of_pairs: bool = False
) -> Ranking:
    """Compare the scores of the passages of each query."""
    orders = [(_order(first), _order(second)) for first, second in zip(expected, actual, strict=True)]
    ndcg_Q = np.array([ndcg(*order) for order in orders])
    is_other_Q = np.array([first[0] != second[0] for first, second in orders], np.float64)
    return Ranking(
        ndcg10=float(ndcg_Q.mean()),
        ndcg10_standard_error=_standard_error(ndcg_Q),
        lowest_ndcg10=float(ndcg_Q.min()),
        other_first=float(is_other_Q.mean()),
        other_first_standard_error=_standard_error(is_other_Q),
        num_queries=len(orders),
        num_passages=max(map(len, expected)),
        of_pairs=of_pairs,
    )


def ndcg(expected_P: Ints, actual_P: Ints) -> float:
    """nDCG@10 of an order of passages, the best first, beside the original's."""
    depth = min(DEPTH, len(expected_P))
    gains_P = np.zeros(len(expected_P))
    gains_P[expected_P[:depth]] = np.arange(depth, 0, -1)
    discounts = np.log2(np.arange(2, depth + 2))
    ideal = (gains_P[expected_P[:depth]] / discounts).sum()
    return float((gains_P[actual_P[:depth]] / discounts).sum() / ideal)


def _order(scores_P: Doubles) -> Ints:
    return np.argsort(-scores_P, kind="stable").astype(np.int64)


def _standard_error(values_Q: Doubles) -> float | None:
    return float(values_Q.std(ddof=1) / math.sqrt(len(values_Q))) if len(values_Q) > 1 else None
