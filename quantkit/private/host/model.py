"""Blocks of a split model with one KV cache per client: features in, features out.

One run at a time uses all threads, so clients take turns. A cache belongs to one session, from its opening to
its end, and its memory is then given back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.private.files import HOST, read_side
from quantkit.private.protocol import ProtocolError, Status
from quantkit.runtime.decoder import Decoder, State, decoder_of, positions_of, start
from quantkit.runtime.graph import MODEL_FILE, open_graph
from quantkit.runtime.manifest import require_whole

FEATURES, NEW_FEATURES = "features", "new_features"
PLACE_SECONDS = 2  # to wait for a place
MAX_TOKENS = 4096  # of one client, where the context is longer and --max-tokens is not given


@dataclass(kw_only=True, slots=True)
class Host:
    """Open blocks and the sessions of all clients."""

    decoder: Decoder
    width: int
    pair: str
    max_tokens: int
    max_sessions: int
    places: threading.Condition = field(default_factory=threading.Condition)  # of the sessions
    turn: threading.Lock = field(default_factory=threading.Lock)  # of the processor
    sessions: list[HostSession] = field(default_factory=list)

    def open(self, capacity: int) -> HostSession:
        if not 1 <= capacity <= self.max_tokens:
            raise ProtocolError(
                Status.CACHE_FULL, f"{capacity} tokens; a client may have up to {self.max_tokens}"
            )
        with self.places:
            # Who has just closed a session and opens the next may come before the first has ended here.
            if not self.places.wait_for(lambda: len(self.sessions) < self.max_sessions, PLACE_SECONDS):
                raise ProtocolError(
                    Status.NO_ROOM, f"all {self.max_sessions} places are taken; try again later"
                )
            session = HostSession(host=self, state=start(self.decoder, batch=1, capacity=capacity))
            self.sessions.append(session)
        return session


@dataclass(kw_only=True, slots=True, eq=False)
class HostSession:
    """One text and its cache."""

    host: Host
    state: State | None

    def advance(self, features_TI: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Runs the blocks on the next tokens' features; features of the last token, [1, width]."""
        state = self.state
        assert state is not None, "a closed session"
        with self.host.turn:
            if state.lengths[0] + len(features_TI) > state.capacity:
                raise ProtocolError(Status.CACHE_FULL, f"the cache holds {state.capacity} tokens")
            return _run(state, features_TI)

    def close(self) -> None:
        """Frees the cache; closing twice is allowed."""
        with self.host.places:
            if self.state is not None:
                self.host.sessions.remove(self)
                self.state = None
                self.host.places.notify()
            self.host.decoder.spare.clear()  # memory kept for the next text of a single-user decoder


def open_host(
    folder: Path,
    *,
    threads: int | None = None,
    max_sessions: int = 16,
    max_tokens: int | None = None,
    check: str = "quick",
) -> Host:
    side = read_side(folder, HOST)
    require_whole(folder, check)
    decoder = decoder_of(open_graph(folder / MODEL_FILE, threads=threads))
    shapes = {value.name: value.shape for value in decoder.session.get_inputs()}
    if FEATURES not in shapes or shapes[FEATURES][-1] != side.width or not decoder.caches:
        raise InputError(
            "not the blocks of a split model",
            where=str(folder / MODEL_FILE),
            next_step="copy the folder again",
        )
    return Host(
        decoder=decoder,
        width=side.width,
        pair=side.pair,
        max_tokens=min(decoder.context, max_tokens or MAX_TOKENS),
        max_sessions=max_sessions,
    )


def _run(state: State, features_TI: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    count, first = len(features_TI), state.lengths[0]
    is_padded = first == 0 and count < state.capacity and count % 2 == 1  # see runtime/decoder.py
    padded_TI = np.pad(features_TI, ((0, 1), (0, 0))) if is_padded else features_TI
    state.mask[:, first : first + count] = 1
    mask = np.ascontiguousarray(state.mask[:, : first + len(padded_TI)])
    feeds: dict[str, Any] = {
        FEATURES: np.ascontiguousarray(padded_TI[None], np.float32),
        "attention_mask": mask,
        "position_ids": positions_of(mask, len(padded_TI)),
    }
    for name, values in feeds.items():
        state.binding.bind_cpu_input(name, values)
    state.binding.bind_output(NEW_FEATURES)
    state.decoder.session.run_with_iobinding(state.binding)
    state.lengths = [first + count]
    new_features_1I: NDArray[np.float32] = state.binding.get_outputs()[-1].numpy()[0]
    return new_features_1I
