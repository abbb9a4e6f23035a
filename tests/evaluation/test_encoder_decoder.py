"""Accuracy over half windows against sums written out token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.evaluation.encoder_decoder import measure_halves

pytestmark = pytest.mark.once
VOCABULARY = 11
START = (3,)


def model_of(seed):
    """Logits that depend on all that the encoder read, and on every decoder token so far."""
    table = np.random.default_rng(seed).normal(0, 2, (97, VOCABULARY)).astype(np.float32)

    def logits(encoder_ids_BE, ids_BD):
        heard = (encoder_ids_BE * np.arange(1, encoder_ids_BE.shape[1] + 1)).sum(axis=1)[:, None]
        return table[(heard + np.cumsum(ids_BD + 1, axis=1)) % 97]

    return logits


def naive(reference, quantized, ids, half, start_ids):
    """(log-likelihoods of both, KL) of each token after the first half window, one call for each token."""
    found = []
    for place in range(half, len(ids)):
        begin = place // half * half
        decoder = np.array([[*start_ids, *ids[begin:place]]])
        rows = [
            model(np.array([ids[begin - half : begin]]), decoder)[0, -1].astype(np.float64)
            for model in (reference, quantized)
        ]
        log = [row - math.log(sum(math.exp(value) for value in row)) for row in rows]
        kl = sum(math.exp(p) * (p - q) for p, q in zip(*log, strict=True))
        found.append((log[0][ids[place]], log[1][ids[place]], kl))
    return np.array(found)


@settings(max_examples=40)
@given(
    count=st.integers(8, 60),
    window=st.integers(2, 16),
    num_starts=st.integers(1, 2),
    seed=st.integers(0, 1 << 16),
)
def test_every_token_after_the_first_half_counts_once(count, window, num_starts, seed):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, count)
    window = min(window, count - 3)  # two predictions at least
    reference, quantized, start_ids = model_of(1), model_of(2), START * num_starts
    done = []
    made = measure_halves(
        reference=reference,
        quantized=quantized,
        token_ids=ids,
        window=window,
        start_ids=start_ids,
        text="words",
        progress=done.append,
    )
    wanted = naive(reference, quantized, ids.tolist(), window // 2, start_ids)
    assert made.num_tokens == sum(done) == len(wanted) == count - window // 2
    assert made.reference.value == pytest.approx(math.exp(-wanted[:, 0].mean()), rel=1e-6)
    assert made.quantized.value == pytest.approx(math.exp(-wanted[:, 1].mean()), rel=1e-6)
    assert made.kl_divergence == pytest.approx(wanted[:, 2].mean(), rel=1e-5)
    assert (made.window, made.stride) == (window // 2 * 2, window // 2)
    alone = measure_halves(
        reference=None, quantized=quantized, token_ids=ids, window=window, start_ids=start_ids, text="words"
    )
    assert alone.perplexity == made.quantized
    protocol = ("num_tokens", "window", "stride", "text")
    assert [getattr(alone, key) for key in protocol] == [getattr(made, key) for key in protocol]


def test_the_protocol_is_said_and_the_same_model_has_no_error():
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 30)
    model = model_of(1)
    made = measure_halves(
        reference=model, quantized=model, token_ids=ids, window=10, start_ids=START, text="words"
    )
    assert "the encoder reads the first half of each window" in made.text
    assert made.text.startswith("words")
    assert made.kl_divergence == made.increase == made.max_relative_logit_error == 0.0
    assert made.top1_agreement == 1.0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_short_a_text_is_refused(count):
    with pytest.raises(InputError, match="tokens or more"):
        measure_halves(
            reference=model_of(1),
            quantized=model_of(2),
            token_ids=np.arange(count),
            window=4,
            start_ids=START,
            text="words",
        )
