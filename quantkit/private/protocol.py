"""The messages between a client and a host of a split model: a header of 32 bytes, then numbers.

Every length is in the header and checked before anything is read or computed. docs/protocol.md describes it
for other implementations.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
MAGIC, VERSION = b"QKPF", 1
HEADER = struct.Struct("<4sHHQIIHHI")
PATH = "/v1/"
PAIR_BYTES = 32
LONGEST_WORDS = 200  # of an error


class Kind(IntEnum):
    """What a message asks for; a reply repeats it."""

    OPEN = 1
    PREFILL = 2
    STEP = 3
    CLOSE = 4


class Status(IntEnum):
    """How it went."""

    OK = 0
    BAD_MESSAGE = 1
    UNAUTHORIZED = 2
    NO_SESSION = 3
    TOO_LARGE = 4
    OTHER_MODEL = 5
    NO_ROOM = 6
    CACHE_FULL = 7
    FAILED = 8


HTTP_CODES: dict[Status, int] = {
    Status.OK: 200,
    Status.BAD_MESSAGE: 400,
    Status.UNAUTHORIZED: 401,
    Status.NO_SESSION: 404,
    Status.TOO_LARGE: 413,
    Status.OTHER_MODEL: 409,
    Status.NO_ROOM: 503,
    Status.CACHE_FULL: 409,
    Status.FAILED: 500,
}
NO_NUMBERS = 0
NUMBER_TYPES: dict[int, Any] = {1: np.dtype("<f4"), 2: np.dtype("<f2")}
NAMED_TYPES: dict[str, int] = {"float32": 1, "float16": 2}
ROUTES: dict[str, Kind] = {f"{PATH}{kind.name.lower()}": kind for kind in Kind}


class ProtocolError(Exception):
    """A message that is refused, with a few words that name nothing of what it held."""

    def __init__(self, status: Status, words: str) -> None:
        """Status and words."""
        super().__init__(words)
        self.status = status
        self.words = words[:LONGEST_WORDS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What stands in front of every message."""

    kind: int
    session: int = 0
    tokens: int = 0  # rows of the payload; of OPEN how many the cache shall hold
    width: int = 0
    number_type: int = NO_NUMBERS
    status: int = Status.OK
    num_bytes: int = 0  # of the payload

    def pack(self) -> bytes:
        """As bytes."""
        return HEADER.pack(
            MAGIC, VERSION, self.kind, self.session, self.tokens, self.width,
            self.number_type, self.status, self.num_bytes,
        )  # fmt: skip


def read_header(data: bytes) -> Header:
    """A header, if these are one."""
    if len(data) != HEADER.size:
        raise ProtocolError(Status.BAD_MESSAGE, f"a header has {HEADER.size} bytes, and {len(data)} came")
    magic, version, kind, session, tokens, width, number_type, status, num_bytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(Status.BAD_MESSAGE, "not a message of this protocol")
    if version != VERSION:
        raise ProtocolError(Status.BAD_MESSAGE, f"version {version} of the protocol; this is {VERSION}")
    return Header(
        kind=kind,
        session=session,
        tokens=tokens,
        width=width,
        number_type=number_type,
        status=status,
        num_bytes=num_bytes,
    )


def features_message(kind: Kind, session: int, features_TI: Floats, number_type: int) -> bytes:
    """Rows of features with their header."""
    payload = np.ascontiguousarray(features_TI, NUMBER_TYPES[number_type]).tobytes()
    tokens, width = features_TI.shape
    header = Header(
        kind=kind,
        session=session,
        tokens=tokens,
        width=width,
        number_type=number_type,
        num_bytes=len(payload),
    )
    return header.pack() + payload


def check_features(header: Header, *, width: int, most_tokens: int) -> None:
    """Refuse a header whose numbers do not fit each other or this model, before its payload is read."""
    if header.number_type not in NUMBER_TYPES:
        raise ProtocolError(Status.BAD_MESSAGE, f"numbers of type {header.number_type}")
    if header.width != width:
        raise ProtocolError(Status.BAD_MESSAGE, f"features of width {header.width}; this model's are {width}")
    if not 1 <= header.tokens <= most_tokens:
        raise ProtocolError(Status.BAD_MESSAGE, f"{header.tokens} tokens; allowed are 1 to {most_tokens}")
    size = header.tokens * header.width * NUMBER_TYPES[header.number_type].itemsize
    if header.num_bytes != size:
        raise ProtocolError(Status.BAD_MESSAGE, f"{header.num_bytes} bytes of payload, where {size} belong")


def read_features(header: Header, payload: bytes) -> Floats:
    """Rows of a checked message; what is not a number is refused."""
    if len(payload) != header.num_bytes:
        raise ProtocolError(Status.BAD_MESSAGE, f"{len(payload)} of {header.num_bytes} bytes came")
    rows = np.frombuffer(payload, NUMBER_TYPES[header.number_type]).reshape(header.tokens, header.width)
    features_TI = rows.astype(np.float32)
    if not np.isfinite(features_TI).all():
        raise ProtocolError(Status.BAD_MESSAGE, "features that are not finite")
    return features_TI
