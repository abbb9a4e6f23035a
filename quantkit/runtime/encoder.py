"""Graphs that read a whole text at once: encoders, and traced decoders from the beginning of a text.

What the graph declares is what it is fed: token types are zeros, positions follow the padding and caches
start empty unless the caller says otherwise.
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
from quantkit.runtime.session import MODEL_FILE, Floats, Ints, open_session


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """An open graph."""

    session: onnxruntime.InferenceSession
    inputs: Mapping[str, tuple[int | str, ...]]  # name -> shape; a name stands for a free size
    outputs: tuple[str, ...]


def open_encoder(folder: Path, *, threads: int | None = None) -> Encoder:
    """Open an artifact, or one file of it."""
    path = folder / MODEL_FILE if folder.is_dir() else folder
    session = open_session(path, threads=threads)
    # An input with a default, such as how many positions get logits, is an initializer to onnxruntime.
    declared = (*session.get_inputs(), *session.get_overridable_initializers())
    inputs = {each.name: tuple(each.shape) for each in declared}
    if "input_ids" not in inputs:
        raise InputError(
            "not a model that reads tokens (no input_ids)",
            where=str(path),
            allowed="an encoder, or a decoder from the beginning of a text",
        )
    return Encoder(session=session, inputs=inputs, outputs=tuple(each.name for each in session.get_outputs()))


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
