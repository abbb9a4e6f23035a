"""Permutations from a key: HKDF, HMAC in counter mode, and Fisher and Yates' shuffle.

numpy's generators serve statistics: some hundred outputs reveal the rest. Here every space gets a key of its
own by HKDF-SHA256 (RFC 5869), bound to the model and to the space's name, so that a known order reveals no
other. HMAC-SHA256 in counter mode expands it into 32-bit words. The shuffle (Durstenfeld,
https://doi.org/10.1145/364520.364540) rejects words that would favour some positions.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]
DIGEST = "sha256"
WORD_BYTES = 4
PURPOSE = b"quantkit feature order, version 1"


def derive(key: bytes, *, salt: bytes, purpose: bytes, length: int = 32) -> bytes:
    """HKDF-SHA256."""
    extracted = hmac.digest(salt or bytes(hashlib.new(DIGEST).digest_size), key, DIGEST)
    expanded, block, counter = b"", b"", 0
    while len(expanded) < length:
        counter += 1
        block = hmac.digest(extracted, block + purpose + bytes([counter]), DIGEST)
        expanded += block
    return expanded[:length]


def words(key: bytes) -> Iterator[int]:
    """Endless 32-bit numbers."""
    counter = 0
    while True:
        block = hmac.digest(key, counter.to_bytes(8, "little"), DIGEST)
        for start in range(0, len(block), WORD_BYTES):
            yield int.from_bytes(block[start : start + WORD_BYTES], "little")
        counter += 1


def keyed_order(key: bytes, *, model: bytes, space: str, width: int) -> Order:
    """Permutation of a space of a model; without the key every permutation is equally likely."""
    purpose = b"\0".join([PURPOSE, space.encode(), str(width).encode()])
    random = words(derive(key, salt=model, purpose=purpose))
    order_I = np.arange(width, dtype=np.int64)
    for last in range(width - 1, 0, -1):
        choices = last + 1
        limit = (1 << 8 * WORD_BYTES) // choices * choices  # words from here on would favour some positions
        position = next(word for word in random if word < limit) % choices
        order_I[last], order_I[position] = order_I[position], order_I[last]
    return order_I
