"""Requests of lm-evaluation-harness on token ids: log-likelihoods of continuations, and generation.

Log-likelihoods come from one pass over context and continuation. Rows of a batch are padded on the right,
which no scored token attends to, so that a row's figures do not depend on its neighbours. Rows of similar
length form a batch, and the head runs only from the first position that any of them scores. Inputs that
differ in their last token alone, as the answers of a multiple choice often do, are read once. Texts longer
than the context are cut off on the left.

This module does not import the harness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import score_tokens
from quantkit.runtime.decoder import Decoder, last_logits
from quantkit.runtime.generate import Sampling, generate
from quantkit.runtime.tokenizer import Text

AUTO_BYTES = 256 << 20  # of logits that a batch of automatic size may make
LARGEST_AUTO_BATCH = 32  # a CPU gains nothing from larger ones
Tokens = Sequence[int]
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One input that is run once, and all requests that it answers."""

    inputs: tuple[int, ...]
    requests: tuple[tuple[int, tuple[int, ...]], ...]  # number of the request, tokens that it scores

    @property
    def first_scored(self) -> int:
        return len(self.inputs) - max(len(targets) for _, targets in self.requests)


def score_continuations(
    decoder: Decoder,
    pairs: Sequence[tuple[Tokens, Tokens]],
    *,
    max_length: int,
    batch_size: int | None,
    progress: Advance = lambda count: None,
) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy decoding would make it) of each continuation after its context.

    `batch_size` None takes as many rows as `AUTO_BYTES` allow.
    """
    rows = _rows(pairs, max_length)
    answers: list[tuple[float, bool] | None] = [None] * len(pairs)
    for batch in _batches(rows, decoder.vocab_size, batch_size):
        longest, first = len(batch[0].inputs), min(row.first_scored for row in batch)
        ids = np.zeros((len(batch), longest), np.int64)
        for number, row in enumerate(batch):
            ids[number, : len(row.inputs)] = row.inputs
        logits_BSV = last_logits(decoder, ids, longest - first)
        for number, row in enumerate(batch):
            end = len(row.inputs) - first
            for request, targets in row.requests:
                nll_S, is_top_S = score_tokens(
                    logits_BSV[number, end - len(targets) : end], np.array(targets, np.int64)
                )
                answers[request] = -float(nll_S.sum()), bool(is_top_S.all())
            progress(len(row.requests))
    assert all(answer is not None for answer in answers)
    return [answer for answer in answers if answer is not None]


def _rows(pairs: Sequence[tuple[Tokens, Tokens]], max_length: int) -> list[Row]:
    """Distinct inputs, longest first: the first batch needs the most memory."""
    grouped: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for number, (context, continuation) in enumerate(pairs):
        if not continuation or not context:
            raise InputError(
                f"request {number} has no {'context' if continuation else 'continuation'} to score",
                where="harness",
                next_step="every document needs a text of at least one token",
            )
        if len(continuation) > max_length:
            raise InputError(
                f"a continuation of {len(continuation)} tokens is longer than the context",
                where="harness",
                allowed=f"up to {max_length} tokens",
                next_step="shorten the answers of the task",
            )
        # The last token is scored and never read.
        inputs = tuple((*context, *continuation)[-(max_length + 1) : -1])
        grouped.setdefault(inputs, []).append((number, tuple(continuation)))
    rows = [Row(inputs=inputs, requests=tuple(requests)) for inputs, requests in grouped.items()]
    return sorted(rows, key=lambda row: (-len(row.inputs), row.inputs))


def _batches(rows: Sequence[Row], vocab_size: int, batch_size: int | None) -> Iterator[Sequence[Row]]:
    begin = 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and end - begin < (batch_size or LARGEST_AUTO_BATCH):
            batch = rows[begin : end + 1]
            scored = len(batch[0].inputs) - min(row.first_scored for row in batch)
            if batch_size is None and 4 * len(batch) * scored * vocab_size > AUTO_BYTES:
                break
            end += 1
        yield rows[begin:end]
        begin = end


def rolling_windows(tokens: Tokens, *, prefix: int, max_length: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, tokens to score) pieces of a whole text: each token once, with as much context as fits.

    The first piece starts after `prefix`; of the last one only what no earlier piece scored is scored.
    """
    whole = [prefix, *tokens]
    done = 1
    while done < len(whole):
        end = min(done + max_length, len(whole))
        begin = max(0, end - 1 - max_length)  # the input is all of them but the last, max_length at most
        yield whole[begin:done], whole[done:end]
        done = end


def continue_prompts(
    decoder: Decoder,
    text: Text,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_texts: Sequence[str],
    stop_ids: frozenset[int],
) -> list[str]:
    """The continuation of each prompt of one batch, up to the first of the stop texts."""
    answers: list[list[int]] = [[] for _ in prompts]
    is_open = [True] * len(prompts)
    steps = generate(decoder, prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids)
    for tokens in steps:
        for number, token in enumerate(tokens):
            if not is_open[number]:
                continue
            if token is None or token in stop_ids:
                is_open[number] = False
                continue
            answers[number].append(token)
            # A stop text may lie across several tokens, so the whole answer is searched.
            if stop_texts and any(stop in text.decode(answers[number]) for stop in stop_texts):
                is_open[number] = False
        if not any(is_open):
            break
    return [until(text.decode(row), stop_texts) for row in answers]


def until(answer: str, stop_texts: Sequence[str]) -> str:
    """A text up to the first stop text."""
    places = (place for stop in stop_texts if (place := answer.find(stop)) >= 0)
    return answer[: min(places, default=len(answer))]
