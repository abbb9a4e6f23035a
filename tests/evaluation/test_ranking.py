"""nDCG@10 and first passages against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.evaluation.ranking import compare_rankings
from quantkit.evaluation.text import bundled_questions
from quantkit.quantization.calibration.tokens import read_text

pytestmark = pytest.mark.once
RANDOM = np.random.default_rng(0)
EXPECTED = list(RANDOM.standard_normal((9, 30)))
ACTUAL = [scores + 0.3 * RANDOM.standard_normal(30) for scores in EXPECTED]


def ranked(scores) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def naive_ndcg(expected, actual) -> float:
    depth = min(10, len(expected))
    gains = {index: depth - place for place, index in enumerate(ranked(expected)[:depth])}
    found = sum(
        gains.get(index, 0) / math.log2(place + 2) for place, index in enumerate(ranked(actual)[:depth])
    )
    return found / sum((depth - place) / math.log2(place + 2) for place in range(depth))


def test_against_loops():
    ranking = compare_rankings(EXPECTED, ACTUAL)
    values = [naive_ndcg(*pair) for pair in zip(EXPECTED, ACTUAL, strict=True)]
    others = [ranked(a)[0] != ranked(b)[0] for a, b in zip(EXPECTED, ACTUAL, strict=True)]
    assert 0 < sum(others) < 9
    assert min(values) < 0.99
    assert ranking.ndcg10 == pytest.approx(np.mean(values), rel=1e-12)
    assert ranking.lowest_ndcg10 == pytest.approx(min(values), rel=1e-12)
    assert ranking.other_first == sum(others) / 9
    assert ranking.ndcg10_standard_error == pytest.approx(np.std(values, ddof=1) / 3, rel=1e-12)
    assert (ranking.num_queries, ranking.num_passages) == (9, 30)


def test_the_scale_of_scores_does_not_matter_and_their_order_does():
    same = compare_rankings(EXPECTED, [5 * scores - 11 for scores in EXPECTED])
    assert (same.ndcg10, same.other_first) == (1.0, 0.0)
    turned = compare_rankings(EXPECTED, [-scores for scores in EXPECTED])
    assert (turned.ndcg10, turned.other_first) == (0.0, 1.0)


def test_fewer_passages_than_ten_and_one_query():
    short = compare_rankings([EXPECTED[0][:3]], [ACTUAL[0][:3]])
    assert short.ndcg10 == pytest.approx(naive_ndcg(EXPECTED[0][:3], ACTUAL[0][:3]))
    assert short.ndcg10_standard_error is None


def test_the_bundled_questions_are_whole_and_not_calibrated_on():
    passages, questions = bundled_questions()
    assert len(set(passages)) == len(passages) >= 200
    assert len(questions) >= 30
    for _, candidates in questions:
        assert len(set(candidates)) == len(candidates) == 12
        assert set(candidates) <= set(range(len(passages)))
    calibration = read_text(None, bundled="calibration/calibration.txt", flag="")
    joined = " ".join(calibration.split())
    assert not [text for text in (*passages, *(text for text, _ in questions)) if text in joined]
