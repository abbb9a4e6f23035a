"""Generation: one loop for every kind of session, and the sampling of the next token.

Rows of a batch are padded on the right and continue at their own lengths, so that each gives the tokens that
it gives alone; padding on the left, as other clients do it, sums in another order and can turn a close
choice. Sampling is greedy, or by temperature, restricted to the top k tokens or to the fewest whose
probabilities reach p (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import reading
from quantkit.runtime.graph import Floats, Ints

NOT_RUNNING = "its graph does not run"


class Batch(Protocol):
    """A batch of prompts and their KV caches, with room for the new tokens; rows may end one by one."""

    def read(self) -> Floats:
        """Read the prompts; logits of the first new token, [batch, vocabulary]."""

    def step(self, tokens: Ints, open_rows: Sequence[int], /) -> Floats:
        """Append a token to every row; logits of the next, which count for the open rows alone."""


class Generating(Protocol):
    """A model that `generate` can run."""

    @property
    def vocab_size(self) -> int | None: ...

    def begin(self, prompts: Sequence[Sequence[int]], num_new: int, /) -> Batch:
        """Caches for some prompts and `num_new` tokens after each; InputError where that is too long."""


class Row(Protocol):
    """One prompt and its KV cache; logits are [1, vocabulary]."""

    def read(self) -> Floats: ...
    def step(self, token: int, /) -> Floats: ...


@dataclass(kw_only=True, slots=True)
class RowByRow:
    """A batch whose rows run one by one."""

    rows: Sequence[Row]
    logits: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def read(self) -> Floats:
        self.logits = np.concatenate([row.read() for row in self.rows])
        return self.logits

    def step(self, tokens: Ints, open_rows: Sequence[int]) -> Floats:
        for row in open_rows:
            self.logits[row] = self.rows[row].step(int(tokens[row]))
        return self.logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    temperature: float = 0.0  # 0: always the most likely
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    seed: int | None = None


def check_sampling(sampling: Sampling) -> None:
    for name, value, is_right, allowed in (
        ("--temperature", sampling.temperature, sampling.temperature >= 0, "0 (greedy) or more"),
        ("--top-k", sampling.top_k, sampling.top_k >= 0, "0 (no limit) or more"),
        ("--top-p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0, up to 1"),
    ):
        if not is_right:
            raise InputError(f"{value}", where=name, allowed=allowed)


def probabilities(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that tokens are drawn from, [batch, vocabulary]."""
    scores = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[1]:
        kth = np.partition(scores, -sampling.top_k, axis=1)[:, -sampling.top_k, None]
        scores = np.where(scores < kth, -np.inf, scores)
    weights: NDArray[np.float64] = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    if sampling.top_p < 1:
        order = np.argsort(-scores, axis=1, kind="stable")  # scores differ where exp rounds to equal values
        ranked = np.take_along_axis(weights, order, axis=1)
        # A token stays while those before it have not reached p, so the most likely one always does.
        stays = np.cumsum(ranked, axis=1) - ranked < sampling.top_p
        kept = np.zeros_like(stays)
        np.put_along_axis(kept, order, stays, axis=1)
        weights = np.where(kept, weights, 0)
        weights /= weights.sum(axis=1, keepdims=True)
    return weights


def choose_tokens(
    logits: NDArray[np.float32], sampling: Sampling, random: np.random.Generator
) -> NDArray[np.int64]:
    if sampling.temperature == 0:
        return np.asarray(logits.argmax(axis=1), np.int64)
    cumulative = np.cumsum(probabilities(logits, sampling), axis=1)
    draws = random.random(len(logits))[:, None] * cumulative[:, -1:]
    chosen = (cumulative <= draws).sum(axis=1).clip(max=logits.shape[1] - 1)
    return np.asarray(chosen, np.int64)


def generate(
    model: Generating,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[list[int | None]]:
    """The next token of every row, step by step; None for a row that has ended."""
    sampling = sampling or Sampling()
    check_sampling(sampling)
    check_prompts(prompts, model.vocab_size)
    random = np.random.default_rng(sampling.seed)
    with reading("the model", NOT_RUNNING):
        batch = model.begin(prompts, max_new_tokens)
        logits, open_rows = batch.read(), list(range(len(prompts)))
    for count in range(max_new_tokens):
        tokens_B = choose_tokens(logits, sampling, random)
        tokens: list[int] = tokens_B.tolist()
        yield [token if row in open_rows else None for row, token in enumerate(tokens)]
        open_rows = [row for row in open_rows if tokens[row] not in stop_ids]
        if not open_rows or count + 1 == max_new_tokens:
            return
        with reading("the model", NOT_RUNNING):
            logits = batch.step(tokens_B, open_rows)


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int | None) -> None:
    if not prompts or any(not prompt for prompt in prompts):
        raise InputError("an empty prompt gives the model nothing to go on from", where="prompt")
    largest = max(max(prompt) for prompt in prompts)
    if vocab_size is not None and largest >= vocab_size:
        raise InputError(
            f"the tokenizer made id {largest}, and the model has {vocab_size} tokens",
            where="prompt",
            next_step="the tokenizer belongs to another model; copy the one that the checkpoint came with",
        )
