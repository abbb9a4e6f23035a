"""Perplexity, KL and agreement against sums written out in plain Python, and the counting of tokens."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.evaluation import accuracy
from quantkit.evaluation.accuracy import measure_accuracy, measure_perplexity, score_tokens, windows

pytestmark = pytest.mark.once
VOCABULARY = 11


def model_of(seed: int, *, spread: float = 2.0, offset: float = 0.0, vocabulary: int = VOCABULARY):
    """Logits that depend on every token of the window so far: a window cut elsewhere predicts otherwise."""
    table = np.random.default_rng(seed).normal(offset, spread, (97, vocabulary)).astype(np.float32)

    def logits(ids_BS):
        return table[np.cumsum(ids_BS + 1, axis=1) % 97]

    return logits


def text_of(num_tokens: int, seed: int = 0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens)


def measure(reference, quantized, ids, *, window=8, stride=3, **keywords):
    return measure_accuracy(
        reference=reference,
        quantized=quantized,
        token_ids=ids,
        window=window,
        stride=stride,
        text="a text",
        **keywords,
    )


def naive(reference, quantized, ids, window, stride):
    """One token at a time in Python floats: (nll of each, nll of each, KL of each, agreement of each)."""
    rows = []
    for token in range(1, len(ids)):
        # The earliest window that reaches the token: the one whose end is beyond it.
        begin = 0
        while begin + window <= token:
            begin += stride
        end = min(begin + window, len(ids))
        ours, theirs = (
            [float(x) for x in f(ids[None, begin:end])[0, token - 1 - begin]] for f in (reference, quantized)
        )
        p, q = ([math.exp(x) / sum(map(math.exp, part)) for x in part] for part in (ours, theirs))
        target = int(ids[token])
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        rows.append((-math.log(p[target]), -math.log(q[target]), kl, p.index(max(p)) == q.index(max(q))))
    return [np.array(column, float) for column in zip(*rows, strict=True)]


def standard_error(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def window_error(values, num_tokens, window, stride):
    """Standard error of a ratio of sums over windows, as survey statistics define it for clusters."""
    counts = [span.num_targets for span in windows(num_tokens, window=window, stride=stride)]
    if len(counts) == 1:
        return standard_error(values)
    mean, squares, start = sum(values) / len(values), 0.0, 0
    for count in counts:
        squares += (sum(values[start : start + count]) - count * mean) ** 2
        start += count
    return math.sqrt(squares * len(counts) / (len(counts) - 1)) / len(values)


@given(st.integers(3, 200), st.integers(2, 40), st.data())
def test_every_token_but_the_first_is_counted_once(num_tokens, window, data):
    stride = data.draw(st.integers(1, window - 1))
    counted = []
    for each in windows(num_tokens, window=window, stride=stride):
        assert each.end - each.begin <= window
        assert each.begin < each.first_target < each.end, "a counted token needs at least one before it"
        counted.extend(range(each.first_target, each.end))
    assert counted == list(range(1, num_tokens))


@given(st.integers(3, 200), st.integers(2, 40))
def test_without_overlap_the_first_token_of_each_window_is_not_counted(num_tokens, window):
    spans = list(windows(num_tokens, window=window, stride=window))
    counted = [token for each in spans for token in range(each.first_target, each.end)]
    assert counted == [token for token in range(num_tokens) if token % window]
    assert all(each.begin % window == 0 for each in spans)


def test_the_windows_are_those_of_the_published_protocol():
    """begin advances by the stride, and what an earlier window has predicted is only context."""
    found = [(each.begin, each.end, each.first_target) for each in windows(10, window=4, stride=2)]
    assert found == [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]
    assert [(each.begin, each.end) for each in windows(5, window=8, stride=4)] == [(0, 5)]


@pytest.mark.parametrize(("num_tokens", "window", "stride"), [(40, 8, 3), (41, 8, 7), (9, 16, 1), (30, 2, 1)])
def test_figures_equal_plain_sums(num_tokens, window, stride):
    reference, quantized, ids = model_of(1), model_of(2), text_of(num_tokens)
    found = measure(reference, quantized, ids, window=window, stride=stride)
    nll, quantized_nll, kl, is_same = naive(reference, quantized, ids, window, stride)
    expected = {
        "kl_divergence": kl.mean(),
        "kl_standard_error": window_error(kl, num_tokens, window, stride),
        "kl_99th_percentile": np.sort(kl)[-1] * (f := (len(kl) - 1) * 0.99 % 1) + np.sort(kl)[-2] * (1 - f),
        "top1_agreement": is_same.mean(),
        "top1_standard_error": window_error(is_same, num_tokens, window, stride),
        "increase": math.exp(quantized_nll.mean() - nll.mean()) - 1,
        "increase_standard_error": math.exp(quantized_nll.mean() - nll.mean())
        * standard_error(quantized_nll - nll),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for record, values in ((found.reference, nll), (found.quantized, quantized_nll)):
        perplexity = math.exp(values.mean())
        assert record.value == pytest.approx(perplexity, rel=1e-12)
        assert record.standard_error == pytest.approx(perplexity * standard_error(values), rel=1e-9)
    assert (found.num_tokens, found.window, found.stride) == (num_tokens - 1, window, stride)
    assert found.is_meaningful


@pytest.mark.parametrize(("num_tokens", "window", "stride"), [(40, 8, 3), (41, 8, 8), (9, 16, 1)])
def test_a_model_alone_gets_the_figure_that_it_gets_beside_another(num_tokens, window, stride):
    ids = text_of(num_tokens)
    alone = measure_perplexity(model=model_of(2), token_ids=ids, window=window, stride=stride, text="a text")
    beside = measure(model_of(1), model_of(2), ids, window=window, stride=stride)
    assert alone.perplexity.value == pytest.approx(beside.quantized.value, rel=1e-12)
    assert alone.perplexity.standard_error == pytest.approx(beside.quantized.standard_error, rel=1e-9)
    assert (alone.num_tokens, alone.window, alone.stride) == (beside.num_tokens, window, stride)


def test_without_overlap_figures_equal_plain_sums():
    reference, quantized, ids = model_of(1), model_of(2), text_of(30)
    found = measure(reference, quantized, ids, window=7, stride=7)
    parts = [naive(reference, quantized, ids[begin : begin + 7], 7, 1) for begin in range(0, 28, 7)]
    parts.append(naive(reference, quantized, ids[28:], 7, 1))
    nll, quantized_nll, kl, is_same = (np.concatenate(column) for column in zip(*parts, strict=True))
    assert found.num_tokens == len(nll) == 25
    assert found.reference.value == pytest.approx(math.exp(nll.mean()), rel=1e-12)
    assert found.quantized.value == pytest.approx(math.exp(quantized_nll.mean()), rel=1e-12)
    assert found.kl_divergence == pytest.approx(kl.mean(), rel=1e-9)
    assert found.top1_agreement == is_same.mean()


def test_scores_of_single_tokens(monkeypatch):
    monkeypatch.setattr(accuracy, "CHUNK_VALUES", 3 * VOCABULARY)
    logits, targets = model_of(5)(text_of(20)[None])[0], text_of(20, seed=1)
    nll, is_top = score_tokens(logits, targets)
    for row, target, found, top in zip(logits.astype(float), targets, nll, is_top, strict=True):
        assert found == pytest.approx(math.log(sum(map(math.exp, row))) - row[target], rel=1e-12)
        assert top == (max(row) == row[target])
    with pytest.raises(InputError, match="logits for token 24 are"):
        score_tokens(np.where(np.arange(20)[:, None] == 17, np.nan, logits), targets, first_target=7)


def test_a_window_that_predicts_next_to_nothing_is_refused():
    with pytest.raises(InputError, match="window 2 with stride 2 predicts too few of the text's 3 tokens"):
        measure(model_of(1), model_of(1), text_of(3), window=2, stride=2)


def test_the_logit_error_is_the_greatest_difference_over_the_greatest_logit():
    ids = text_of(50)
    reference = model_of(3)
    noise = np.random.default_rng(4).normal(0, 0.1, (1, 50, VOCABULARY)).astype(np.float32)
    found = measure(
        reference, lambda ids: reference(ids) + noise[:, : ids.shape[1]], ids, window=50, stride=1
    )
    logits = reference(ids[None]).astype(float)[:, :-1]
    noisy = (reference(ids[None]) + noise).astype(float)[:, :-1]
    expected = abs(noisy - logits).max() / abs(logits).max()
    assert found.max_relative_logit_error == pytest.approx(expected, rel=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(3, 60), st.floats(0.01, 30), st.floats(0.0, 5.0))
def test_divergence_is_never_negative_and_equal_models_agree(seed, num_tokens, spread, noise):
    ids, reference = text_of(num_tokens, seed), model_of(seed, spread=spread)
    change = np.random.default_rng(seed).normal(0, noise, VOCABULARY).astype(np.float32)
    found = measure(reference, lambda ids: reference(ids) + change, ids)
    assert found.kl_divergence >= 0
    assert 0 <= found.top1_agreement <= 1
    assert found.reference.value >= 1
    same = measure(reference, reference, ids)
    assert (same.kl_divergence, same.kl_99th_percentile, same.kl_standard_error) == (0, 0, 0)
    assert (same.top1_agreement, same.increase, same.max_relative_logit_error) == (1, 0, 0)
    assert same.reference == same.quantized


def test_the_cut_into_chunks_changes_nothing(monkeypatch):
    arguments = (model_of(1), model_of(2), text_of(60))
    whole = measure(*arguments, window=30, stride=10)
    monkeypatch.setattr(accuracy, "CHUNK_VALUES", 4 * VOCABULARY)
    cut = measure(*arguments, window=30, stride=10)
    assert cut.kl_divergence == pytest.approx(whole.kl_divergence, rel=1e-12)
    assert cut.quantized.value == pytest.approx(whole.quantized.value, rel=1e-12)
    assert cut.top1_agreement == whole.top1_agreement


def test_large_logits_neither_overflow_nor_lose_the_result():
    ids = text_of(40)
    plain = measure(model_of(1), model_of(2), ids)
    shifted = measure(
        lambda ids: model_of(1)(ids) + np.float32(4096), lambda ids: model_of(2)(ids) - np.float32(4096), ids
    )
    assert shifted.reference.value == pytest.approx(plain.reference.value, rel=1e-3)  # float32 at 4096
    assert shifted.kl_divergence == pytest.approx(plain.kl_divergence, rel=1e-3, abs=1e-3)


def test_a_large_vocabulary_takes_little_memory_beside_its_logits():
    vocabulary, num_tokens = 262_144, 16
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 1, (1, num_tokens, vocabulary)).astype(np.float32)
    ids = generator.integers(0, vocabulary, num_tokens)
    tracemalloc.start()
    measure(lambda _: logits, lambda _: logits, ids, window=num_tokens, stride=1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16e6  # the logits of this one window are 16.8 MB


def test_progress_adds_up():
    counts = []
    measure(model_of(1), model_of(2), text_of(50), progress=counts.append)
    assert sum(counts) == 49
    assert len(counts) > 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["reference", "quantized"])
def test_logits_that_are_no_numbers_are_refused_with_their_place(bad, which):
    def broken(ids_BS):
        logits = model_of(1)(ids_BS)
        if ids_BS.shape[1] > 5:
            logits[0, 4, 2] = bad
        return logits

    models = {"reference": model_of(1), "quantized": model_of(1)} | {which: broken}
    with pytest.raises(InputError, match=f"{which} model's logits for token 5 "):
        measure(models["reference"], models["quantized"], text_of(20), window=12, stride=6)


def test_a_model_that_predicts_nothing_is_refused_rather_than_infinite():
    with pytest.raises(InputError, match="quantized model gives the text"):
        measure(model_of(1), model_of(2, spread=3000), text_of(60))


def test_wrong_input_is_named():
    ids = text_of(20)
    with pytest.raises(InputError, match="11 tokens in the reference, 12 in the quantized"):
        measure(model_of(1), model_of(1, vocabulary=12), ids)
    with pytest.raises(InputError, match=r"2 tokens.*3 tokens or more"):
        measure(model_of(1), model_of(1), ids[:2])
    for window, stride in ((8, 9), (8, 0), (1, 1), (8, -1)):
        with pytest.raises(InputError, match=f"window {window} with stride {stride}"):
            measure(model_of(1), model_of(1), ids, window=window, stride=stride)
