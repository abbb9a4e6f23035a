"""Accuracy by category of text: which tokens are read, and figures against sums by hand."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from quantkit.evaluation.categories import (
    CATEGORIES,
    accuracy_by_category,
    category_windows,
)
from quantkit.recipe import Measure
from quantkit.runtime.tokenizer import open_text

pytestmark = pytest.mark.once
DEMO = Path(str(resources.files("quantkit") / "assets" / "demo"))
VOCAB = 11


def windows(max_tokens=16384, context=4096, vocab_size=None):
    return category_windows(Measure(max_tokens=max_tokens), DEMO, context=context, vocab_size=vocab_size)


def test_a_category_is_read_in_windows_from_its_first_token_to_its_last():
    found = windows()
    assert list(found) == list(CATEGORIES)
    assert {name: rows.shape for name, rows in found.items()} == {
        "prose": (3, 256),
        "code": (3, 256),
        "other scripts": (3, 256),
        "long context": (1, 2048),
    }
    text = resources.files("quantkit").joinpath("assets/categories/code.txt").read_text(encoding="utf-8")
    ids = open_text(DEMO).encode(text)
    assert found["code"][0].tolist() == ids[:256]
    assert found["code"][-1].tolist() == ids[-256:]


@pytest.mark.parametrize("max_tokens", [1024, 4096, 16384])
def test_categories_take_a_small_part_of_the_main_text(max_tokens):
    # Windows of the main text overlap by half, so each of its tokens is read twice.
    assert sum(rows.size for rows in windows(max_tokens).values()) <= 0.15 * 2 * max_tokens


def test_windows_keep_to_the_context_and_ids_to_the_vocabulary():
    assert max(rows.shape[1] for rows in windows(context=100).values()) == 100
    assert windows(vocab_size=10) == {}


def table(seed):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_a_decoder_against_sums_by_hand():
    expected, actual = table(0), table(0) + 0.3 * table(1)
    ids_NT = np.random.default_rng(2).integers(0, VOCAB, (3, 20))
    (result,) = accuracy_by_category(
        lambda ids: expected[ids], lambda ids: actual[ids], {"code": ids_NT}, lambda count: None
    )
    read = ids_NT[:, :-1].reshape(-1)
    first, second = (log_softmax(logits.astype(np.float64))[read] for logits in (expected, actual))
    assert result.name == "code"
    assert result.num_tokens == len(read) == 57
    assert result.kl_divergence == pytest.approx((np.exp(first) * (first - second)).sum(1).mean(), rel=1e-6)
    assert result.flip_rate == pytest.approx((first.argmax(1) != second.argmax(1)).mean())
    assert 0 < result.flip_rate < 1
