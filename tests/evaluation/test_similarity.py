"""Similarity of encoder outputs against naive float64 sums."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.evaluation.similarity import measure_similarity, windows_of

pytestmark = pytest.mark.once
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.standard_normal((50, 7)).astype(np.float32)
NOISE = (0.1 * RANDOM.standard_normal((50, 7))).astype(np.float32)
IDS = RANDOM.integers(0, 50, 23).astype(np.int64)
WINDOW = 5


def original(ids):
    return TABLE[ids]


def changed(ids):
    return TABLE[ids] + NOISE[ids]


def measure(quantized, **changes):
    options = {"rows": windows_of(IDS, WINDOW, "numbers"), "text": "numbers"} | changes
    return measure_similarity(reference=original, quantized=quantized, **options)


def test_against_loops_in_float64():
    cosines, squares, errors, largest, worst = [], 0.0, 0.0, 0.0, 0.0
    for start in range(0, 20, WINDOW):
        wanted = [[float(value) for value in TABLE[token]] for token in IDS[start : start + WINDOW]]
        made = [
            [float(value) for value in TABLE[token] + NOISE[token]] for token in IDS[start : start + WINDOW]
        ]
        pooled = [sum(column) / WINDOW for column in zip(*wanted, strict=True)]
        pooled_made = [sum(column) / WINDOW for column in zip(*made, strict=True)]
        dot = sum(a * b for a, b in zip(pooled, pooled_made, strict=True))
        lengths = [sum(a * a for a in vector) ** 0.5 for vector in (pooled, pooled_made)]
        cosines.append(dot / lengths[0] / lengths[1])
        for row, row_made in zip(wanted, made, strict=True):
            for a, b in zip(row, row_made, strict=True):
                squares, errors = squares + a * a, errors + (a - b) ** 2
                largest, worst = max(largest, abs(a)), max(worst, abs(a - b))
    made = measure(changed)
    assert made.num_windows == 4, "the last three tokens fill no window"
    assert made.mean_cosine == pytest.approx(sum(cosines) / 4, rel=1e-12)
    assert made.lowest_cosine == pytest.approx(min(cosines), rel=1e-12)
    assert made.relative_rms_error == pytest.approx((errors / squares) ** 0.5, rel=1e-9)
    assert made.max_relative_error == pytest.approx(worst / largest, rel=1e-9)


def test_equal_models_differ_in_nothing():
    made = measure(original)
    assert made.mean_cosine == pytest.approx(1, abs=1e-12)
    assert made.relative_rms_error == made.max_relative_error == 0


def test_a_longer_vector_keeps_its_cosine_and_shows_as_an_error():
    made = measure(lambda ids: 2 * original(ids))
    assert made.mean_cosine == pytest.approx(1, abs=1e-12)
    assert made.relative_rms_error == pytest.approx(1)


def test_progress_adds_up_and_a_short_text_is_refused():
    counted = []
    measure(original, progress=counted.append)
    assert counted == [WINDOW] * 4
    with pytest.raises(InputError, match="24 tokens or more"):
        windows_of(IDS, 24, "numbers")


def test_one_answer_a_text_is_a_vector_already():
    """As a classifier gives it: no places to take a mean over."""
    made = measure_similarity(
        reference=lambda ids: TABLE[ids[:, 0]],
        quantized=lambda ids: TABLE[ids[:, 0]] + NOISE[ids[:, 0]],
        rows=windows_of(IDS, WINDOW, "numbers"),
        text="numbers",
    )
    pairs = [(TABLE[token].astype(np.float64), NOISE[token].astype(np.float64)) for token in IDS[:20:WINDOW]]
    cosines = [a @ (a + noise) / np.sqrt((a @ a) * ((a + noise) @ (a + noise))) for a, noise in pairs]
    assert made.mean_cosine == pytest.approx(np.mean(cosines), rel=1e-6)
    assert made.lowest_cosine == pytest.approx(min(cosines), rel=1e-6)
    worst = max(float(np.abs(noise).max()) for _, noise in pairs)
    assert made.max_relative_error == pytest.approx(worst / max(np.abs(a).max() for a, _ in pairs), rel=1e-5)


def test_embeddings_say_how_many_texts_keep_their_nearest():
    """Against loops; half of the vectors are turned far enough to lose theirs."""
    random = np.random.default_rng(3)
    expected = random.standard_normal((12, 6))
    actual = expected + np.where(np.arange(12)[:, None] % 2, 2.0, 1e-3) * random.standard_normal((12, 6))
    measured = measure_similarity(
        reference=lambda ids: expected[ids[:, 0]],
        quantized=lambda ids: actual[ids[:, 0]],
        rows=[np.array([number]) for number in range(12)],
        are_embeddings=True,
        text="numbers",
    )

    def best(vectors, row):
        others = [other for other in range(12) if other != row]
        cosines = [
            vectors[row] @ vectors[i] / np.linalg.norm(vectors[row]) / np.linalg.norm(vectors[i])
            for i in others
        ]
        return others[int(np.argmax(cosines))]

    kept = [best(expected, row) == best(actual, row) for row in range(12)]
    assert 0 < sum(kept) < 12
    assert measured.nearest_agreement == sum(kept) / 12
    assert measure(changed).nearest_agreement is None
