"""Labels against plain loops: labels that differ, and KL divergence in nats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from classifiers import softmax

from quantkit.evaluation.labels import compare_labels

pytestmark = pytest.mark.once
RANDOM = np.random.default_rng(0)
EXPECTED = RANDOM.standard_normal((40, 4)) * 2
ACTUAL = EXPECTED + RANDOM.standard_normal((40, 4))


def divergence(expected, actual) -> float:
    pairs = zip(softmax(expected), softmax(actual), strict=True)
    return sum(first * math.log(first / second) for first, second in pairs)


def test_labels_of_texts():
    labels = compare_labels(list(EXPECTED), list(ACTUAL), are_independent=False, of_tokens=False)
    others = [max(range(4), key=row.__getitem__) for row in EXPECTED.tolist()]
    others = [
        best != max(range(4), key=row.__getitem__) for best, row in zip(others, ACTUAL.tolist(), strict=True)
    ]
    kls = [divergence(*pair) for pair in zip(EXPECTED.tolist(), ACTUAL.tolist(), strict=True)]
    assert 0 < sum(others) < 40
    assert labels.flips == sum(others) / 40
    assert labels.kl_divergence == pytest.approx(sum(kls) / 40, rel=1e-9)
    mean = sum(kls) / 40
    spread = math.sqrt(sum((kl - mean) ** 2 for kl in kls) / 39 / 40)
    assert labels.kl_standard_error == pytest.approx(spread, rel=1e-9)
    assert (labels.num_labels, labels.num_compared) == (4, 40)


def test_labels_of_tokens_count_each_token_and_spread_over_texts():
    texts = ([EXPECTED[:3], EXPECTED[3:40]], [ACTUAL[:3], ACTUAL[3:40]])
    by_tokens = compare_labels(*texts, are_independent=False, of_tokens=True)
    by_texts = compare_labels(list(EXPECTED), list(ACTUAL), are_independent=False, of_tokens=False)
    assert by_tokens.num_compared == 40
    assert (by_tokens.flips, by_tokens.kl_divergence) == (by_texts.flips, by_texts.kl_divergence)
    assert by_tokens.kl_standard_error != pytest.approx(by_texts.kl_standard_error, rel=1e-3)


def test_labels_that_do_not_exclude_each_other():
    labels = compare_labels(list(EXPECTED), list(ACTUAL), are_independent=True, of_tokens=False)
    kls = [
        sum(divergence((a, 0.0), (b, 0.0)) for a, b in zip(*pair, strict=True))
        for pair in zip(EXPECTED.tolist(), ACTUAL.tolist(), strict=True)
    ]
    others = [
        any((a > 0) != (b > 0) for a, b in zip(*pair, strict=True))
        for pair in zip(EXPECTED.tolist(), ACTUAL.tolist(), strict=True)
    ]
    assert labels.kl_divergence == pytest.approx(sum(kls) / 40, rel=1e-9)
    assert labels.flips == sum(others) / 40


def test_equal_logits_and_a_single_text():
    labels = compare_labels([EXPECTED[0]], [EXPECTED[0]], are_independent=False, of_tokens=False)
    assert (labels.flips, labels.kl_divergence) == (0.0, 0.0)
    assert labels.kl_standard_error is None
