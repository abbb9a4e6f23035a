"""Messages between the client and the host of a split model: safetensors documents over a WebSocket.

A message holds fields (the opening, its reply, a refusal) or one tensor, `features` [tokens, width] in
float32 or float16, and nothing else. The connection is the session: one text and one KV cache, freed when the
connection ends. WebSocket (RFC 6455) is chosen over one HTTP request per token: the server notices the end of
a connection between two tokens, and a token costs a tenth of the time (docs/decisions/002-dependencies.md).
docs/protocol.md is the specification for other implementations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from quantkit.errors import InputError
from quantkit.files import parse_json

VERSION = "2"
PATH = f"/v{VERSION}"
FEATURES = "features"
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
MAX_WORDS = 200  # characters of a refusal
SILENT = logging.Logger("quantkit.private", level=logging.CRITICAL + 1)  # tracebacks could show features


class Status(StrEnum):
    """Reason of a refusal."""

    BAD_MESSAGE = "bad_message"
    OTHER_MODEL = "other_model"
    NO_ROOM = "no_room"
    CACHE_FULL = "cache_full"
    FAILED = "failed"


class ProtocolError(Exception):
    """A refused message; its words repeat nothing of the message's content."""

    def __init__(self, status: Status, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words[:MAX_WORDS]


def fields_message(fields: Mapping[str, str]) -> bytes:
    return save({}, dict(fields))


def refusal_message(error: ProtocolError) -> bytes:
    return fields_message({"status": error.status, "words": error.words})


def features_message(features_TI: NDArray[np.floating[Any]], dtype: Any) -> bytes:
    return save({FEATURES: np.ascontiguousarray(features_TI, dtype)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    fields: dict[str, str]
    tensors: dict[str, NDArray[Any]]


def read_message(message: bytes | str) -> Message:
    """A well-formed message; any other is refused."""
    if isinstance(message, str):
        raise ProtocolError(Status.BAD_MESSAGE, "a text message, where a safetensors document belongs")
    try:
        tensors = load(message)  # checks names, types, shapes and offsets against the length
        header = parse_json(message[8 : 8 + int.from_bytes(message[:8], "little")], where="message")
    except Exception as error:  # safetensors' own shares no base class with numpy's
        raise ProtocolError(Status.BAD_MESSAGE, "not a safetensors document") from error
    return Message(fields=header.get("__metadata__") or {}, tensors=tensors)


def features_of(message: Message, *, width: int, max_tokens: int) -> NDArray[np.floating[Any]]:
    """The features [tokens, width] of a message that holds nothing else, in the type they were sent in."""
    if message.fields or set(message.tensors) != {FEATURES}:
        raise ProtocolError(Status.BAD_MESSAGE, f"a message without exactly one tensor '{FEATURES}'")
    features = message.tensors[FEATURES]
    if features.dtype not in (np.float32, np.float16):
        raise ProtocolError(Status.BAD_MESSAGE, f"features in {features.dtype}; allowed: {', '.join(DTYPES)}")
    if features.ndim != 2 or features.shape[1] != width:
        raise ProtocolError(Status.BAD_MESSAGE, f"features of shape {features.shape}; their width is {width}")
    if not 1 <= len(features) <= max_tokens:
        raise ProtocolError(Status.BAD_MESSAGE, f"{len(features)} tokens; allowed: 1 to {max_tokens}")
    if not np.isfinite(features).all():
        raise ProtocolError(Status.BAD_MESSAGE, "features that are not finite")
    return features


def missing_library() -> InputError:
    return InputError(
        "the package 'websockets' is missing",
        where="the connection between client and host",
        next_step="pip install 'quantkit-onnx[private]'",
    )
