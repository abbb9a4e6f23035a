"""quantkit's artifact in quantkit's session, in the environment that runs `scripts/bench_peers.py`.

It is made by the command that a user types, straight from `scripts/bench_peers.py`, so that its time and
memory are that command's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import timing

from quantkit.evaluation.latency import bytes_per_token
from quantkit.export.traffic import from_metadata
from quantkit.runtime.decoder import State, start, step
from quantkit.runtime.decoder import open_decoder as open_artifact
from quantkit.runtime.encoder import encode
from quantkit.runtime.encoder import open_encoder as open_artifact_encoder


def open_decoder(variant: str, folder: Path) -> tuple[Callable[[], None], timing.Feed]:
    """Fresh caches for each prompt."""
    decoder = open_artifact(folder, threads=timing.NUM_THREADS)
    states: list[State] = []

    def clear() -> None:
        states[:] = [start(decoder, batch=1, capacity=timing.NUM_PROMPT_TOKENS + timing.NUM_NEW_TOKENS)]

    return clear, lambda ids: step(states[0], np.array([ids], np.int64))


def describe(folder: Path) -> dict[str, float]:
    """Bytes of weights, and of keys and values, that one of the timed tokens reads on the average."""
    decoder = open_artifact(folder)
    traffic = from_metadata(decoder.metadata)
    assert traffic is not None, "every artifact says what a token reads"
    lengths = (timing.NUM_PROMPT_TOKENS, timing.NUM_NEW_TOKENS)
    return {"bytes_per_token": bytes_per_token(decoder, traffic, lengths)}


def open_encoder(variant: str, folder: Path) -> timing.Feed:
    """One sentence without padding."""
    encoder = open_artifact_encoder(folder, threads=timing.NUM_THREADS)
    return lambda ids: encode(encoder, np.array([ids], np.int64))


if __name__ == "__main__":
    timing.main(open_decoder=open_decoder, open_encoder=open_encoder, describe=describe)
