"""Client of split inference: embedding and head run here, the blocks on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.private.files import CLIENT, EMBEDDING_FILE, HEAD_FILE, SideManifest, read_side
from quantkit.private.host.model import FEATURES, NEW_FEATURES
from quantkit.runtime.generate import Sampling, generate
from quantkit.runtime.graph import open_graph


class HostedText(Protocol):
    """One text's session with a host, in this process or another."""

    def advance(self, features_TI: NDArray[np.float32]) -> NDArray[np.float32]:
        """Runs the blocks on the next tokens' features; features of the last token, [1, width]."""

    def close(self) -> None: ...


class Opener(Protocol):
    def __call__(self, *, pair: str, width: int, capacity: int) -> HostedText:
        """A session with room for `capacity` tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Open embedding and head."""

    embedding: Any
    head: Any
    manifest: SideManifest
    vocab_size: int
    has_positions: bool

    def embed(self, ids_T: NDArray[np.int64], first: int) -> NDArray[np.float32]:
        """Features [tokens, width] of tokens from position `first` on."""
        feeds = {"input_ids": np.ascontiguousarray(ids_T[None], np.int64)}
        if self.has_positions:
            feeds["position_ids"] = np.arange(first, first + len(ids_T), dtype=np.int64)[None]
        features_TI: NDArray[np.float32] = self.embedding.run([FEATURES], feeds)[0][0]
        return features_TI

    def logits(self, features_BTI: NDArray[np.float32]) -> NDArray[np.float32]:
        logits_BTV: NDArray[np.float32] = self.head.run(
            ["logits"], {NEW_FEATURES: np.ascontiguousarray(features_BTI)}
        )[0]
        return logits_BTV


def open_client(folder: Path, *, threads: int | None = None) -> Client:
    manifest = read_side(folder, CLIENT)
    embedding = open_graph(folder / EMBEDDING_FILE, threads=1)  # a few rows of a table
    head = open_graph(folder / HEAD_FILE, threads=threads, spins=False)  # the host's turn comes next
    return Client(
        embedding=embedding,
        head=head,
        manifest=manifest,
        vocab_size=int(head.get_outputs()[0].shape[-1]),
        has_positions="position_ids" in {value.name for value in embedding.get_inputs()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectedClient:
    """A client with its host; the sessions close with `stack`."""

    client: Client
    opener: Opener
    stack: ExitStack

    @property
    def vocab_size(self) -> int:
        return self.client.vocab_size

    def begin(self, prompts: Sequence[Sequence[int]], num_new: int) -> ClientBatch:
        manifest = self.client.manifest
        longest = max(len(prompt) for prompt in prompts) + num_new
        if longest > manifest.context:
            raise InputError(
                f"{longest} tokens of prompt and answer are more than the model's context",
                where="length",
                allowed=f"up to {manifest.context} tokens together",
                next_step="shorten the prompt or ask for fewer new tokens",
            )
        sessions = []
        for prompt in prompts:
            session = self.opener(pair=manifest.pair, width=manifest.width, capacity=len(prompt) + num_new)
            self.stack.callback(session.close)
            sessions.append(session)
        return ClientBatch(client=self.client, prompts=prompts, sessions=sessions)


@dataclass(kw_only=True, slots=True)
class ClientBatch:
    """Prompts, each with its session, its length and the features of its last token."""

    client: Client
    prompts: Sequence[Sequence[int]]
    sessions: Sequence[HostedText]
    lengths: list[int] = field(default_factory=list)
    features: list[NDArray[np.float32]] = field(default_factory=list)

    def read(self) -> NDArray[np.float32]:
        self.lengths = [len(prompt) for prompt in self.prompts]
        self.features = [
            session.advance(self.client.embed(np.asarray(prompt, np.int64), 0))
            for session, prompt in zip(self.sessions, self.prompts, strict=True)
        ]
        return self._logits()

    def step(self, tokens: NDArray[np.int64], open_rows: Sequence[int]) -> NDArray[np.float32]:
        for row in open_rows:
            features_TI = self.client.embed(tokens[row : row + 1], self.lengths[row])
            self.features[row] = self.sessions[row].advance(features_TI)
            self.lengths[row] += 1
        return self._logits()

    def _logits(self) -> NDArray[np.float32]:
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
    with ExitStack() as stack:
        connected = ConnectedClient(client=client, opener=opener, stack=stack)
        yield from generate(
            connected, prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids
        )
