"""The client of a split model: words to features, features to the next word, and a host for all between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.private.files import CLIENT, EMBEDDING_FILE, HEAD_FILE, Half, read_half
from quantkit.private.host.model import FEATURES, NEW_FEATURES, Host
from quantkit.runtime.generate import Sampling, checked, continue_rows
from quantkit.runtime.session import open_session

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Session(Protocol):
    """One text's place at a host, wherever that is."""

    def advance(self, features_TI: Floats) -> Floats:
        """The next tokens' features; the last one's come back, [1, width]."""

    def close(self) -> None:
        """Free the place."""


class Opener(Protocol):
    """How a client comes by sessions."""

    def __call__(self, *, pair: str, width: int, capacity: int) -> Session:
        """A place for so many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Open tables and head."""

    embedding: Any
    head: Any
    half: Half
    vocab_size: int
    has_positions: bool

    def embed(self, ids_T: Ints, first: int) -> Floats:
        """Features of tokens that stand at `first` and after it."""
        feeds = {"input_ids": np.ascontiguousarray(ids_T[None], np.int64)}
        if self.has_positions:
            feeds["position_ids"] = np.arange(first, first + len(ids_T), dtype=np.int64)[None]
        features_TI: Floats = self.embedding.run([FEATURES], feeds)[0][0]
        return features_TI

    def logits(self, features_BTI: Floats) -> Floats:
        """Scores of every token after each of these features."""
        made: Floats = self.head.run(["logits"], {NEW_FEATURES: np.ascontiguousarray(features_BTI)})[0]
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSession:
    """A place at a host in this process."""

    host: Host
    number: int

    def advance(self, features_TI: Floats) -> Floats:
        """Without a connection."""
        return self.host.advance(self.number, features_TI)

    def close(self) -> None:
        """Free the place."""
        self.host.close(self.number)


def local(host: Host) -> Opener:
    """Sessions with a host in this process."""

    def opener(*, pair: str, width: int, capacity: int) -> Session:
        assert bytes.fromhex(pair) == host.pair, "a client of another model"
        assert width == host.width, (width, host.width)
        return LocalSession(host=host, number=host.open(capacity))

    return opener


def open_client(folder: Path, *, threads: int | None = None) -> Client:
    """Open a client's folder."""
    half = read_half(folder, CLIENT)
    embedding = open_session(folder / EMBEDDING_FILE, threads=1)  # a few rows of a table
    head = open_session(folder / HEAD_FILE, threads=threads, spins=False)  # the host's turn comes next
    return Client(
        embedding=embedding,
        head=head,
        half=half,
        vocab_size=int(head.get_outputs()[0].shape[-1]),
        has_positions="position_ids" in {each.name for each in embedding.get_inputs()},
    )


def generate_split(
    client: Client,
    opener: Opener,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[list[int | None]]:
    """The next token of every row, step by step; each row has a session of its own."""
    sampling = checked(sampling, prompts, client.vocab_size)
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    if longest > client.half.context:
        raise InputError(
            f"{longest} tokens of prompt and answer are more than the model's context",
            where="length",
            allowed=f"up to {client.half.context} tokens together",
            next_step="shorten the prompt or ask for fewer new tokens",
        )
    sessions: list[Session] = []
    try:
        for prompt in prompts:
            capacity = len(prompt) + max_new_tokens
            sessions.append(opener(pair=client.half.pair, width=client.half.width, capacity=capacity))
        features = [
            session.advance(client.embed(np.asarray(prompt, np.int64), 0))
            for session, prompt in zip(sessions, prompts, strict=True)
        ]
        places = [len(prompt) for prompt in prompts]

        def advance(tokens_B: Ints, open_rows: list[int]) -> Floats:
            for row in open_rows:
                features[row] = sessions[row].advance(client.embed(tokens_B[row : row + 1], places[row]))
                places[row] += 1
            return client.logits(np.stack(features))[:, -1]

        yield from continue_rows(
            client.logits(np.stack(features))[:, -1],
            advance,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
        )
    finally:
        for session in sessions:
            session.close()
