"""Scores of continuations against a plain loop in torch; windows of long texts; where answers end."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from exporting import NOTHING, build_tiny, export
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.evaluation.lm_eval import scoring
from quantkit.evaluation.lm_eval.command import run, with_model
from quantkit.evaluation.lm_eval.scoring import last_logits, rolling_windows, score_continuations, until
from quantkit.model.families import FAMILIES
from quantkit.runtime.decoder import open_decoder

MAX_LENGTH = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(the model in torch, its float export, its INT8 export)."""
    folder = tmp_path_factory.mktemp("tiny")
    model = build_tiny("GPT2LMHeadModel", dict(FAMILIES["gpt2"].tiny))
    model.save_pretrained(folder / "source")
    export(folder / "source", folder / "float", min_dim=NOTHING)
    export(folder / "source", folder / "int8")
    return model, open_decoder(folder / "float", threads=1), open_decoder(folder / "int8", threads=1)


def pairs_of(vocab_size, seed=0):
    """Contexts and continuations of many lengths, some that share inputs, some that are too long."""
    random = np.random.default_rng(seed)
    lengths = [(1, 1), (5, 3), (5, 1), (17, 2), (22, 5), (40, 4), (3, MAX_LENGTH), (1, 20)]
    pairs = [tuple(random.integers(0, vocab_size, n).tolist() for n in each) for each in lengths]
    context, (*start, _) = pairs[1]
    return [*pairs, *((context, [*start, last]) for last in (1, 2)), ([*context, *start], [3])]


def naive(model, context, continuation):
    """(log-likelihood, greedy) from one run over what fits, in float64 softmax."""
    whole = (context + continuation)[-(MAX_LENGTH + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([whole[:-1]])).logits[0].double()
    wanted = torch.tensor(continuation)
    rows = torch.log_softmax(logits[-len(continuation) :], dim=-1)
    total = rows[torch.arange(len(wanted)), wanted].sum()
    return float(total), bool((rows.argmax(dim=-1) == wanted).all())


@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_scores_equal_a_plain_loop(tiny, batch_size):
    model, decoder, _ = tiny
    pairs = pairs_of(decoder.vocab_size)
    # One continuation is what the model itself would say, so that both verdicts occur.
    with torch.no_grad():
        likeliest = int(model(torch.tensor([pairs[1][0]])).logits[0, -1].argmax())
    pairs.append((pairs[1][0], [likeliest]))
    counts = []
    found = score_continuations(
        decoder, pairs, max_length=MAX_LENGTH, batch_size=batch_size, progress=counts.append
    )
    wanted = [naive(model, *pair) for pair in pairs]
    assert [each[1] for each in found] == [each[1] for each in wanted]
    assert {each[1] for each in found} == {True, False}
    assert [each[0] for each in found] == pytest.approx([each[0] for each in wanted], rel=1e-5, abs=1e-4)
    assert sum(counts) == len(pairs)


def test_a_score_does_not_depend_on_its_neighbours(tiny):
    decoder = tiny[2]
    pairs = pairs_of(decoder.vocab_size)
    together = score_continuations(decoder, pairs, max_length=MAX_LENGTH, batch_size=len(pairs))
    alone = [score_continuations(decoder, [pair], max_length=MAX_LENGTH, batch_size=1)[0] for pair in pairs]
    assert [each[0] for each in together] == pytest.approx([each[0] for each in alone], rel=1e-6)
    assert [each[1] for each in together] == [each[1] for each in alone]


def test_inputs_that_several_requests_share_are_read_once(tiny, monkeypatch):
    decoder, shapes = tiny[1], []

    def spy(decoder, ids, count):
        shapes.append((ids.shape, count))
        return last_logits(decoder, ids, count)

    monkeypatch.setattr(scoring, "last_logits", spy)
    pairs = [([1, 2, 3], [4]), ([1, 2, 3], [5]), ([1, 2], [3, 6]), ([1, 2, 3, 4, 5], [6])]
    score_continuations(decoder, pairs, max_length=MAX_LENGTH, batch_size=8)
    assert shapes == [((2, 5), 4)], "two inputs; logits from the first scored position, the second of five"


def test_an_automatic_batch_keeps_its_logits_small(tiny, monkeypatch):
    decoder, sizes = tiny[1], []

    def spy(decoder, ids, count):
        sizes.append(4 * len(ids) * count * decoder.vocab_size)
        return last_logits(decoder, ids, count)

    monkeypatch.setattr(scoring, "last_logits", spy)
    monkeypatch.setattr(scoring, "AUTO_BYTES", 4 * 6 * decoder.vocab_size)
    pairs = [([number, 1], [2, 3]) for number in range(10)]
    score_continuations(decoder, pairs, max_length=MAX_LENGTH, batch_size=None)
    assert len(sizes) == 4  # three rows of two scored positions each
    assert max(sizes) <= scoring.AUTO_BYTES


def test_the_last_logits_are_the_end_of_all(tiny):
    for decoder in tiny[1:]:
        ids = np.random.default_rng(1).integers(0, decoder.vocab_size, (2, 9))
        whole = decoder.logits(ids)
        np.testing.assert_allclose(last_logits(decoder, ids, 4), whole[:, -4:], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_scored_is_refused(tiny):
    decoder = tiny[1]
    for pair, words in (
        (([1], []), "no continuation"),
        (([], [1]), "no context"),
        (([1], [1] * (MAX_LENGTH + 1)), f"up to {MAX_LENGTH} tokens"),
    ):
        with pytest.raises(InputError, match=words):
            score_continuations(decoder, [pair], max_length=MAX_LENGTH, batch_size=1)


@given(st.integers(0, 100), st.integers(1, 20))
def test_windows_score_each_token_once_with_as_much_context_as_fits(num_tokens, max_length):
    tokens = list(range(num_tokens))
    whole, scored = [-1, *tokens], []
    for context, targets in rolling_windows(tokens, prefix=-1, max_length=max_length):
        end = len(scored) + 1 + len(targets)
        assert targets
        assert context + targets == whole[max(0, end - 1 - max_length) : end]
        assert len(context) >= 1
        assert len(context) + len(targets) - 1 <= max_length
        scored += targets
    assert scored == tokens


@pytest.mark.parametrize(
    ("made", "stops", "kept"),
    [
        ("one\ntwo\n", ["\n"], "one"),
        ("a. b! c", ["!", "."], "a"),
        ("all", ["?"], "all"),
        ("", ["x"], ""),
        ("x", [], "x"),
    ],
)
def test_an_answer_ends_before_the_first_stop_text(made, stops, kept):
    assert until(made, stops) == kept


def test_the_model_is_named_where_an_evaluation_names_none():
    assert with_model(["--tasks", "x"], "quantkit") == ["--tasks", "x", "--model", "quantkit"]
    assert with_model(["run", "--tasks", "x"], "quantkit")[-2:] == ["--model", "quantkit"]
    for kept in (["--model", "hf"], ["--model=hf"], ["-M", "hf"], ["ls", "tasks"], ["run", "--help"], []):
        assert with_model(kept, "quantkit") == kept


def test_a_missing_harness_is_one_line_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"lm_eval' is not installed; next: pip install 'quantkit-onnx\[lm-"):
        run(["--tasks", "x"])
