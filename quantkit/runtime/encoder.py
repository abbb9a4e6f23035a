"""Graphs that read a whole text at once: encoders, and traced decoders from the beginning of a text.

What the graph declares is what it is fed: token types are zeros, positions follow the padding and caches
start empty unless the caller says otherwise. A graph of one fixed length reads one text at a time, which
stands at the beginning of its places; of what it gives for the places behind the text nothing is handed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.runtime.providers.placement import TYPES
from quantkit.runtime.session import MODEL_FILE, Floats, Ints, open_session

ENDS = ("start_logits", "end_logits")  # one number a token; other outputs of tokens have three dimensions


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """An open graph."""

    session: onnxruntime.InferenceSession
    inputs: Mapping[str, tuple[int | str, ...]]  # name -> shape; a name stands for a free size
    outputs: tuple[str, ...]
    length: int | None = None  # places of a graph of fixed sizes

    @property
    def types(self) -> Mapping[str, Any]:
        """What each input is given as."""
        return {each.name: TYPES.get(each.type, np.int64) for each in self.session.get_inputs()}


def open_encoder(folder: Path, *, threads: int | None = None) -> Encoder:
    """Open an artifact, or one file of it."""
    path = folder / MODEL_FILE if folder.is_dir() else folder
    session = open_session(path, threads=threads)
    if "input_ids" not in {each.name for each in session.get_inputs()}:
        raise InputError(
            "not a model that reads tokens (no input_ids)",
            where=str(path),
            allowed="an encoder, or a decoder from the beginning of a text",
        )
    return encoder_of(session)


def encoder_of(session: onnxruntime.InferenceSession) -> Encoder:
    """A session on any provider."""
    # An input with a default, such as how many positions get logits, is an initializer to onnxruntime.
    declared = (*session.get_inputs(), *session.get_overridable_initializers())
    inputs = {each.name: tuple(each.shape) for each in declared}
    size = inputs["input_ids"][-1]
    return Encoder(
        session=session,
        inputs=inputs,
        outputs=tuple(each.name for each in session.get_outputs()),
        length=size if isinstance(size, int) else None,
    )


def encode(
    encoder: Encoder,
    ids: Ints,
    mask: Ints | None = None,
    *,
    token_types: Ints | None = None,
    others: Mapping[str, NDArray[Any]] | None = None,
) -> dict[str, Floats]:
    """Every output for a batch of texts, [batch, sequence]; `others` are further inputs by name."""
    shown = np.ones_like(ids) if mask is None else mask
    if encoder.length is not None:
        kinds = np.zeros_like(ids) if token_types is None else token_types
        return _encode_fixed(encoder, {"input_ids": ids, "attention_mask": shown, "token_type_ids": kinds})
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": ids,
        "attention_mask": shown,
        "token_type_ids": np.zeros_like(ids) if token_types is None else token_types,
        "position_ids": np.maximum(np.cumsum(shown, axis=1) - 1, 0),
        "num_logits": np.array([ids.shape[1]], np.int64),
        **(others or {}),
    }
    for name, shape in encoder.inputs.items():
        if name.startswith("past_key_values") and name not in feeds:
            sizes = [size if isinstance(size, int) else 0 for size in shape[1:]]
            feeds[name] = np.zeros((len(ids), *sizes), np.float32)
    missing = [name for name in encoder.inputs if name not in feeds]
    if missing:
        raise InputError(
            f"the graph also wants {', '.join(missing)}", where="inputs", next_step="pass them by name"
        )
    wanted = {name: np.ascontiguousarray(feeds[name]) for name in encoder.inputs}
    return dict(zip(encoder.outputs, encoder.session.run(None, wanted), strict=True))


def _encode_fixed(encoder: Encoder, batch: Mapping[str, Ints]) -> dict[str, Floats]:
    """Text by text, each filled up to the graph's length behind its end."""
    count, length = batch["input_ids"].shape[1], encoder.length or 0
    if count > length:
        raise InputError(
            f"a text of {count} tokens",
            where="input_ids",
            allowed=f"1 to {length} tokens: the graph reads that many at once",
            next_step="shorten the text, or quantize again with a longer static.prompt",
        )
    if (np.diff(batch["attention_mask"], axis=1) > 0).any():
        raise InputError(
            "padding in front of a text or inside of it",
            where="attention_mask",
            allowed="texts that begin at the first place, with their padding behind them",
        )
    types = encoder.types
    padded = {
        name: np.pad(batch[name], ((0, 0), (0, length - count))).astype(types[name])
        for name in encoder.inputs
    }
    runs = [
        encoder.session.run(None, {name: values[row : row + 1] for name, values in padded.items()})
        for row in range(len(batch["input_ids"]))
    ]
    return {
        name: np.concatenate([values[:, :count] if _has_tokens(name, values) else values for values in found])
        for name, found in zip(encoder.outputs, zip(*runs, strict=True), strict=True)
    }


def _has_tokens(name: str, values: Floats) -> bool:
    return name in ENDS or values.ndim == 3
