"""Session: an open artifact of any kind, behind one protocol.

The kind is read first, from the files of the folder and from the metadata and the cache inputs of the graph,
which is opened once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import reading
from quantkit.runtime.decoder import decoder_of
from quantkit.runtime.encoder import Encoder, encoder_of
from quantkit.runtime.generate import Generating
from quantkit.runtime.graph import (
    ENCODER_FILE,
    MODEL_FILE,
    PAST,
    Floats,
    Ints,
    Kind,
    holds_static,
    metadata_of,
    open_graph,
)
from quantkit.runtime.providers.status import require_usable
from quantkit.runtime.static_decoder import open_static_decoder, stdout_to_stderr
from quantkit.runtime.traced import open_encoder_decoder, traced_decoder


class Session(Generating, Protocol):
    """An open artifact; `begin` and `vocab_size` are those of `Generating`."""

    @property
    def kind(self) -> Kind: ...
    @property
    def folder(self) -> Path: ...
    @property
    def threads(self) -> int: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and answer together; None where the graph has no limit."""

    @property
    def fixed_length(self) -> int | None:
        """Tokens that a graph of fixed shapes reads at once; None where any number can be read."""

    @property
    def generates(self) -> bool:
        """Whether it predicts the next token and can be continued with `begin`."""

    @property
    def reads_and_answers(self) -> bool:
        """Whether an encoder reads the prompt and a decoder answers."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """Tokens that the decoder behind an encoder begins with; else empty."""

    @property
    def cache_number_bytes(self) -> int:
        """Bytes of one number of the KV cache."""

    def logits(self, ids: Any, /) -> Floats:
        """Next-token logits at all positions, [batch, sequence, vocabulary]; an encoder's first output.

        `ids` are token ids, [batch, sequence]; of an encoder that reads pictures their pixels.
        """

    def answer_logits(self, encoder_ids: Ints, ids: Ints, /) -> Floats:
        """Logits of the decoder's tokens `ids` after its encoder has read `encoder_ids`."""


def open_session(
    folder: Path,
    *,
    threads: int | None = None,
    provider: str | None = None,
    with_all_logits: Callable[[Path], bytes] | None = None,
) -> Session:
    """Open an artifact of any kind.

    Only static graphs run on other providers than the CPU. A static prompt graph gives the logits of one
    position; `with_all_logits` rewrites it where `Session.logits` is needed.
    """
    if provider not in (None, "cpu"):
        with stdout_to_stderr():
            require_usable(provider)
    if holds_static(folder):
        return open_static_decoder(
            folder, threads=threads, provider=provider or "cpu", with_all_logits=with_all_logits
        )
    if provider not in (None, "cpu"):
        raise InputError(
            f"provider '{provider}'",
            where="--provider",
            allowed="cpu, or for graphs of fixed shapes (--target npu) any that runs all of them",
            next_step="'quantkit bench --provider' times any artifact on any provider",
        )
    if not (folder / MODEL_FILE).exists() and (folder / ENCODER_FILE).exists():
        return open_encoder_decoder(folder, threads=threads)
    session = open_graph(folder / MODEL_FILE, threads=threads)
    with reading(folder / MODEL_FILE, "not a graph of text"):
        return OPENERS[kind_of(session)](session, folder)


def example_of(session: Session, ids: Ints) -> NDArray[Any]:
    """The token ids, or a random picture where the session reads pictures."""
    if isinstance(session, Encoder) and session.reads_pictures:
        return np.random.default_rng(0).standard_normal((1, *session.picture_shape), np.float32)
    return ids


def kind_of(session: onnxruntime.InferenceSession) -> Kind:
    """The kind of an artifact of one file; a graph traced without a cache runs as an encoder."""
    has_cache = any(value.name.startswith(PAST) for value in session.get_inputs())
    kind = metadata_of(session).get("kind") or ("decoder" if has_cache else "encoder")
    if kind == "traced":
        return "traced" if has_cache else "encoder"
    return "decoder" if kind == "decoder" else "encoder"


OPENERS: Mapping[Kind, Callable[[onnxruntime.InferenceSession, Path], Session]] = {
    "decoder": decoder_of,
    "encoder": encoder_of,
    "traced": traced_decoder,
}
