"""The blocks of a split model with a cache for each client: features in, features out.

One product at a time uses all threads, so clients take turns and none waits for more than the others' turns.
A cache is a client's own from `open` to `close`, and its memory is then given back.
"""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.private.files import HOST, MANIFEST, read_half
from quantkit.private.protocol import ProtocolError, Status
from quantkit.runtime.decoder import Decoder, State, decoder_of, positions_of, start
from quantkit.runtime.graph import MODEL_FILE, open_graph

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
FEATURES, NEW_FEATURES = "features", "new_features"
MOST_TOKENS = 4096  # of one client, where the context is longer and nobody asked for more


@dataclass(kw_only=True, slots=True)
class Host:
    """Open blocks and the caches of all clients."""

    decoder: Decoder
    width: int
    pair: bytes
    most_tokens: int
    most_sessions: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the table of sessions
    turn: threading.Lock = field(default_factory=threading.Lock)  # of the processor
    sessions: dict[int, State] = field(default_factory=dict)

    def open(self, capacity: int) -> int:
        """A new client's cache; its number says nothing and cannot be guessed."""
        if not 1 <= capacity <= self.most_tokens:
            raise ProtocolError(
                Status.CACHE_FULL, f"{capacity} tokens; a client may have up to {self.most_tokens}"
            )
        with self.lock:
            if len(self.sessions) >= self.most_sessions:
                raise ProtocolError(
                    Status.NO_ROOM, f"all {self.most_sessions} places are taken; try again later"
                )
            state = start(self.decoder, batch=1, capacity=capacity)
            number = secrets.randbits(63) | 1
            self.sessions[number] = state
        return number

    def close(self, number: int) -> None:
        """Free a client's cache; one that is free already stays so."""
        with self.lock:
            state = self.sessions.pop(number, None)
            del state
            self.decoder.spare.clear()  # memory of a decoder that serves one text after the other

    def advance(self, number: int, features_TI: Floats) -> Floats:
        """The next tokens' features through the blocks; the last one's come back, [1, width]."""
        with self.lock:
            state = self.sessions.get(number)
        if state is None:
            raise ProtocolError(Status.NO_SESSION, "no such session")
        with self.turn:
            if state.lengths[0] + len(features_TI) > state.capacity:
                raise ProtocolError(Status.CACHE_FULL, f"the cache holds {state.capacity} tokens")
            made: Floats = advance(state, features_TI)[0]
            return made


def open_host(
    folder: Path,
    *,
    threads: int | None = None,
    most_sessions: int = 16,
    most_tokens: int | None = None,
) -> Host:
    """Open a host's folder; nothing of it names a model."""
    half = read_half(folder, HOST)
    require_files(folder)
    decoder = decoder_of(open_graph(folder / MODEL_FILE, threads=threads))
    shapes = {each.name: each.shape for each in decoder.session.get_inputs()}
    if FEATURES not in shapes or shapes[FEATURES][-1] != half.width or not decoder.caches:
        raise InputError(
            "not the blocks of a split model",
            where=str(folder / MODEL_FILE),
            next_step="copy the folder again",
        )
    return Host(
        decoder=decoder,
        width=half.width,
        pair=bytes.fromhex(half.pair),
        most_tokens=min(decoder.context, most_tokens or MOST_TOKENS),
        most_sessions=most_sessions,
    )


def require_files(folder: Path) -> None:
    """Refuse a folder in which a file is missing or cut off."""
    listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("files", {})
    missing = [name for name in listed if not (folder / name).is_file()]
    if missing or not listed:
        raise InputError(
            f"{missing[0] if missing else MODEL_FILE} is missing",
            where=str(folder),
            next_step="copy the folder again with all of its files",
        )


def advance(state: State, features_TI: Floats) -> Floats:
    """Feed one row's next tokens; features of the last of them, [1, 1, width]."""
    count = len(features_TI)
    first, features_BTI = state.lengths[0], features_TI[None]
    shown = np.ones((1, count), np.int64)
    if first == 0 and count < state.capacity:
        features_BTI, shown = _with_even_count(features_BTI, shown)
    total = first + shown.shape[1]
    state.mask[:, first:total] = shown
    mask = np.ascontiguousarray(state.mask[:, :total])
    feeds: dict[str, Any] = {
        FEATURES: np.ascontiguousarray(features_BTI, np.float32),
        "attention_mask": mask,
        "position_ids": positions_of(mask, shown.shape[1]),
    }
    for name, values in feeds.items():
        state.binding.bind_cpu_input(name, values)
    state.binding.bind_output(NEW_FEATURES)
    state.decoder.session.run_with_iobinding(state.binding)
    state.lengths = [first + count]
    made: Floats = state.binding.get_outputs()[-1].numpy()
    return made


def whole_text(decoder: Decoder, features_BTI: Floats) -> tuple[Floats, list[Floats]]:
    """(features of every position, keys and values of every layer) of texts from their beginning."""
    length = features_BTI.shape[1]
    shown = np.ones((len(features_BTI), length), np.int64)
    if length < decoder.context:
        features_BTI, shown = _with_even_count(features_BTI, shown)
    feeds: dict[str, Any] = {
        FEATURES: np.ascontiguousarray(features_BTI, np.float32),
        "attention_mask": shown,
        "position_ids": positions_of(shown, shown.shape[1]),
        "num_features": np.array([length], np.int64),
    }
    for past, _, heads, width in decoder.caches:
        feeds[past] = np.zeros((len(shown), heads, 0, width), np.float32)
    names = [NEW_FEATURES, *(present for _, present, _, _ in decoder.caches)]
    values: list[Floats] = decoder.session.run(names, feeds)
    return values[0][:, :length], [each[:, :, :length] for each in values[1:]]


def _with_even_count(features_BTI: Floats, shown: Ints) -> tuple[Floats, Ints]:
    """Padded on the right where tokens are an odd number, for the reason that runtime/decoder.py gives."""
    if shown.size % 2 == 0:
        return features_BTI, shown
    return np.pad(features_BTI, ((0, 0), (0, 1), (0, 0))), np.pad(shown, ((0, 0), (0, 1)))
