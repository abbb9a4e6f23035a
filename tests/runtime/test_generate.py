"""Sampling against a plain loop, and generation with the real runtime on the embedded model's artifact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from quantkit.errors import InputError
from quantkit.pipeline.quantize import quantize
from quantkit.recipe import Recipe
from quantkit.runtime.decoder import open_decoder
from quantkit.runtime.generate import Sampling, check_sampling, choose_tokens, generate, probabilities
from quantkit.runtime.tokenizer import open_text

pytestmark = pytest.mark.once

LOGITS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 12)), elements=st.floats(-30, 30, width=32)
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1),
)
fast = settings(max_examples=80)


def naive_probabilities(row, sampling):
    """One row, one token after the other; None where rounding decides what reaches p."""
    scores = [float(logit) / sampling.temperature for logit in row]
    if sampling.top_k:
        kth = sorted(scores, reverse=True)[: sampling.top_k][-1]
        scores = [score if score >= kth else -math.inf for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    weights = [weight / sum(weights) for weight in weights]
    if sampling.top_p < 1:
        reached, kept = 0.0, set()
        for index in sorted(range(len(weights)), key=lambda index: -scores[index]):
            if abs(reached - sampling.top_p) < 1e-9:
                return None
            if reached >= sampling.top_p:
                break
            kept.add(index)
            reached += weights[index]
        weights = [weight if index in kept else 0.0 for index, weight in enumerate(weights)]
        weights = [weight / sum(weights) for weight in weights]
    return weights


@fast
@given(logits=LOGITS, sampling=SAMPLINGS)
def test_the_distribution_is_that_of_a_plain_loop(logits, sampling):
    wanted = [naive_probabilities(row, sampling) for row in logits]
    assume(None not in wanted)
    made = probabilities(logits, sampling)
    assert np.abs(made - np.array(wanted)).max() < 1e-9


@fast
@given(logits=LOGITS, sampling=SAMPLINGS)
def test_the_most_likely_token_is_never_dropped(logits, sampling):
    made = probabilities(logits, sampling)
    assert np.abs(made.sum(axis=1) - 1).max() < 1e-9
    assert (made[np.arange(len(logits)), logits.argmax(axis=1)] > 0).all()
    if 0 < sampling.top_k < logits.shape[1]:
        kth = np.sort(logits, axis=1)[:, -sampling.top_k]
        assert (made[logits < kth[:, None]] == 0).all()


@fast
@given(logits=LOGITS, seed=st.integers(0, 1 << 32))
def test_greedy_is_argmax_whatever_else_is_set(logits, seed):
    sampling = Sampling(temperature=0, top_k=3, top_p=0.5, seed=seed)
    made = choose_tokens(logits, sampling, np.random.default_rng(seed))
    assert made.dtype == np.int64
    assert (made == [max(range(len(row)), key=row.__getitem__) for row in logits.tolist()]).all()


def test_a_small_p_and_one_candidate_are_greedy():
    logits = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
    for sampling in (Sampling(temperature=1, top_p=1e-9), Sampling(temperature=1, top_k=1)):
        made = choose_tokens(logits, sampling, np.random.default_rng(0))
        assert (made == logits.argmax(axis=1)).all()


def test_draws_follow_the_distribution():
    """20,000 draws: the counts stay within five standard deviations of what the probabilities say."""
    num_draws = 20_000
    logits = np.array([[2.0, 0.0, 1.0, -1.0, 1.5, -8.0]], np.float32)
    for sampling in (
        Sampling(temperature=0.7),
        Sampling(temperature=1, top_k=3),
        Sampling(temperature=1, top_p=0.8),
    ):
        wanted = np.array(naive_probabilities(logits[0], sampling))
        drawn = choose_tokens(np.repeat(logits, num_draws, axis=0), sampling, np.random.default_rng(1))
        counts = np.bincount(drawn, minlength=6)
        allowed = 5 * np.sqrt(num_draws * wanted * (1 - wanted))
        assert (np.abs(counts - num_draws * wanted) <= allowed + 1e-9).all()
        assert counts[wanted == 0].sum() == 0


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.01}, "--top-p"),
        ({"top_p": float("nan")}, "--top-p"),
    ],
    ids=str,
)
def test_what_no_distribution_has_is_refused(wrong, flag):
    with pytest.raises(InputError) as caught:
        check_sampling(Sampling(**wrong))
    assert str(caught.value).startswith(flag)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """(decoder, tokenizer) of the embedded model, quantized once."""
    off = dict.fromkeys(("accuracy", "latency", "memory"), False)
    folder = tmp_path_factory.mktemp("generate") / "demo"
    quantize(recipe=Recipe(model="demo", measure=off), output=folder)
    return open_decoder(folder, threads=1), open_text(folder)


TEXTS = ("The river was", "In the morning the children went to the", "A")


def prompts_of(text):
    return [text.encode(each) for each in TEXTS]


def answers(decoder, prompts, *, count=12, **options):
    steps = list(generate(decoder, prompts, max_new_tokens=count, **options))
    return [list(row) for row in zip(*steps, strict=True)]


def test_greedy_is_the_most_likely_token_of_every_prefix(demo):
    decoder, text = demo
    for prompt in prompts_of(text):
        (made,) = answers(decoder, [prompt])
        ids = list(prompt)
        for token in made:
            logits = decoder.logits(np.array([ids], np.int64))[0, -1]
            assert token == logits.argmax()
            ids.append(token)
    assert len(set(made)) > 2, "the model says something"


def test_a_row_is_the_same_alone_and_padded_in_a_batch(demo):
    decoder, text = demo
    prompts = prompts_of(text)
    assert len({len(prompt) for prompt in prompts}) == 3
    together = answers(decoder, prompts, count=24)
    for prompt, row in zip(prompts, together, strict=True):
        assert answers(decoder, [prompt], count=24) == [row]
    assert len({tuple(row) for row in together}) == 3


def test_prompts_of_a_batch_have_the_logits_that_they_have_alone(demo):
    """To the last bit: no padding, and no number of rows, changes the order in which a row is summed."""
    decoder, text = demo
    prompts = prompts_of(text)
    longest = max(len(prompt) for prompt in prompts)
    ids = np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    mask = np.array([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts])
    together = decoder.logits(ids, mask)
    for prompt, made in zip(prompts, together, strict=True):
        assert (made[: len(prompt)] == decoder.logits(np.array([prompt]))[0]).all()


def test_seeds_reproduce(demo):
    decoder, text = demo
    prompts = prompts_of(text)

    def drawn(seed):
        return answers(decoder, prompts, sampling=Sampling(temperature=1.0, top_k=50, seed=seed))

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_a_stop_token_ends_its_row_while_others_go_on(demo):
    decoder, text = demo
    prompts = prompts_of(text)[:2]
    free = answers(decoder, prompts)
    stop = next(token for token in free[0][1:] if token not in free[1])
    place = free[0].index(stop)
    first, second = answers(decoder, prompts, stop_ids=frozenset({stop}))
    assert first == free[0][: place + 1] + [None] * (len(first) - place - 1)
    assert second == free[1]
    assert answers(decoder, prompts[:1], stop_ids=frozenset({stop})) == [free[0][: place + 1]], (
        "and ends the run"
    )


def test_the_context_is_the_limit(demo):
    decoder, text = demo
    prompt = (prompts_of(text)[1] * decoder.context)[: decoder.context - 2]
    assert len(answers(decoder, [prompt], count=2)[0]) == 2, "up to the last position"
    with pytest.raises(InputError) as caught:
        next(generate(decoder, [prompt], max_new_tokens=3))
    assert f"up to {decoder.context} tokens" in str(caught.value)


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]], ids=str)
def test_an_empty_prompt(demo, prompts):
    with pytest.raises(InputError, match="empty prompt"):
        next(generate(demo[0], prompts, max_new_tokens=1))


def test_ids_of_a_foreign_tokenizer(demo):
    decoder, _ = demo
    with pytest.raises(InputError) as caught:
        next(generate(decoder, [[1], [decoder.vocab_size]], max_new_tokens=1))
    assert f"id {decoder.vocab_size}" in str(caught.value)
    assert "tokenizer" in str(caught.value)
    assert len(answers(decoder, [[decoder.vocab_size - 1]], count=1)) == 1
