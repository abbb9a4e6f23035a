"""The client of a split model: words to features, features to the next word, and a host for all between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.private.files import CLIENT, EMBEDDING_FILE, HEAD_FILE, Half, read_half
from quantkit.private.host.model import FEATURES, NEW_FEATURES, Host
from quantkit.runtime.generate import Sampling, generate
from quantkit.runtime.graph import open_graph

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
    embedding = open_graph(folder / EMBEDDING_FILE, threads=1)  # a few rows of a table
    head = open_graph(folder / HEAD_FILE, threads=threads, spins=False)  # the host's turn comes next
    return Client(
        embedding=embedding,
        head=head,
        half=half,
        vocab_size=int(head.get_outputs()[0].shape[-1]),
        has_positions="position_ids" in {each.name for each in embedding.get_inputs()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectedClient:
    """A client, and the way to its host; what it opened there is closed with `opened`."""

    client: Client
    opener: Opener
    opened: ExitStack

    @property
    def vocab_size(self) -> int:
        return self.client.vocab_size

    def begin(self, prompts: Sequence[Sequence[int]], num_new: int) -> ClientBatch:
        """A session at the host for every prompt."""
        longest = max(len(prompt) for prompt in prompts) + num_new
        half = self.client.half
        if longest > half.context:
            raise InputError(
                f"{longest} tokens of prompt and answer are more than the model's context",
                where="length",
                allowed=f"up to {half.context} tokens together",
                next_step="shorten the prompt or ask for fewer new tokens",
            )
        sessions = []
        for prompt in prompts:
            session = self.opener(pair=half.pair, width=half.width, capacity=len(prompt) + num_new)
            self.opened.callback(session.close)
            sessions.append(session)
        return ClientBatch(client=self.client, prompts=prompts, sessions=sessions)


@dataclass(kw_only=True, slots=True)
class ClientBatch:
    """Prompts, each with its session at the host and the features of its last token."""

    client: Client
    prompts: Sequence[Sequence[int]]
    sessions: Sequence[Session]
    features: list[Floats] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def read(self) -> Floats:
        self.features = [
            session.advance(self.client.embed(np.asarray(prompt, np.int64), 0))
            for session, prompt in zip(self.sessions, self.prompts, strict=True)
        ]
        self.lengths = [len(prompt) for prompt in self.prompts]
        return self._logits()

    def step(self, tokens: Ints, open_rows: Sequence[int]) -> Floats:
        for row in open_rows:
            features_TI = self.client.embed(tokens[row : row + 1], self.lengths[row])
            self.features[row] = self.sessions[row].advance(features_TI)
            self.lengths[row] += 1
        return self._logits()

    def _logits(self) -> Floats:
        return self.client.logits(np.stack(self.features))[:, -1]


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
    with ExitStack() as opened:
        connected = ConnectedClient(client=client, opener=opener, opened=opened)
        yield from generate(
            connected, prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids
        )
