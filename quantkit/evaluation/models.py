"""Sessions under measurement: how they are opened and timed, and the bytes that a token reads."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from quantkit.errors import InputError
from quantkit.evaluation.latency import Runs
from quantkit.export.static.shared_weights import with_all_logits
from quantkit.export.traffic import Traffic
from quantkit.runtime.generate import Batch
from quantkit.runtime.graph import NotTextError
from quantkit.runtime.session import Session, open_session

SETTLING_SECONDS = 0.05
SMALLEST_VOCABULARY = 28  # ids that every encoder has


def open_measured(folder: Path, *, threads: int | None = None, provider: str | None = None) -> Session:
    """An artifact of which the logits of every position can be had, of static graphs too."""
    return open_session(folder, threads=threads, provider=provider, with_all_logits=with_all_logits)


def why_not_measured(folder: Path) -> str | None:
    """Why no text can be run through an artifact, or None; a tracer may write graphs of other inputs."""
    try:  # a file that cannot be loaded raises another error, which ends the run
        session = open_session(folder)
    except NotTextError as error:
        return str(error)
    if not session.generates:
        try:
            session.logits(np.ones((1, 2), np.int64))
        except InputError as error:
            return str(error)
    return None


def fitting(session: Session, prompt: int, decode: int) -> tuple[int, int]:
    """Lengths to time: a graph of fixed sizes computes all of its places whatever stands in them."""
    prompt = session.fixed_length or prompt
    if session.kind == "static" and session.context:
        decode = min(decode, session.context - prompt)
    return prompt, decode


def bytes_per_token(session: Session, traffic: Traffic, lengths: tuple[int, int]) -> float:
    """Bytes that a decoded token reads, on the average of those after a prompt."""
    prompt, decode = lengths
    if session.kind == "static" and session.context:  # all places of its cache, whatever stands in them
        return traffic.bytes_at(session.context, session.cache_number_bytes)
    return traffic.bytes_at(prompt + (decode + 1) / 2, session.cache_number_bytes)


def settle() -> None:
    """Wait until the spinning threads of the other session sleep."""
    time.sleep(SETTLING_SECONDS)


def runs_of(session: Session, prompt: int, decode: int) -> Runs:
    """The phases of a session; caches are made before each prompt, untimed."""
    vocab_size = session.vocab_size or SMALLEST_VOCABULARY
    ids = np.random.default_rng(0).integers(0, vocab_size, (1, prompt)).astype(np.int64)
    if not session.generates:
        return Runs(prefill=lambda: session.logits(ids), prepare=settle)
    batches: list[Batch] = []

    def prepare() -> None:
        settle()
        batches[:] = [session.begin(ids.tolist(), decode)]

    return Runs(
        prefill=lambda: batches[0].read(),  # noqa: PLW0108 (a new batch in every run)
        step=lambda: batches[0].step(ids[0, :1], (0,)),
        prepare=prepare,
    )
