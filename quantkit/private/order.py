"""Orders of channels that only the holder of a key can name: from 32 secret bytes to permutations.

numpy's generators are made for statistics: some hundred outputs give away the rest. Here every space gets a
key of its own by HKDF (RFC 5869, with SHA-256), bound to the model and to the name of the space, so that an
order that has been found out says nothing about another. HMAC in counter mode turns that key into words,
and Fisher and Yates' shuffle (Durstenfeld's, https://doi.org/10.1145/364520.364540) draws with them,
throwing away the words by which one place would be likelier than another.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

import numpy as np

from quantkit.quantization.transforms.basis import Order

DIGEST = "sha256"
WORD_BYTES = 4
PURPOSE = b"quantkit feature order, version 1"


def derive(key: bytes, *, salt: bytes, purpose: bytes, length: int = 32) -> bytes:
    """HKDF: a key for one purpose, from which neither the first key nor another purpose's follows."""
    extracted = hmac.digest(salt or bytes(hashlib.new(DIGEST).digest_size), key, DIGEST)
    made, block = b"", b""
    for counter in range(1, 256):
        if len(made) >= length:
            break
        block = hmac.digest(extracted, block + purpose + bytes([counter]), DIGEST)
        made += block
    assert len(made) >= length, "HKDF gives no more than 255 blocks"
    return made[:length]


def words(key: bytes) -> Iterator[int]:
    """Numbers of 32 bits without end."""
    counter = 0
    while True:
        block = hmac.digest(key, counter.to_bytes(8, "little"), DIGEST)
        for start in range(0, len(block), WORD_BYTES):
            yield int.from_bytes(block[start : start + WORD_BYTES], "little")
        counter += 1


def keyed_order(key: bytes, *, model: bytes, space: str, width: int) -> Order:
    """The order of a space of a model; every order is equally likely to whoever does not have the key."""
    purpose = b"\0".join([PURPOSE, space.encode(), str(width).encode()])
    drawn = words(derive(key, salt=model, purpose=purpose))
    order_I = np.arange(width, dtype=np.int64)
    for last in range(width - 1, 0, -1):
        choices = last + 1
        fair = (1 << 8 * WORD_BYTES) // choices * choices  # words from here on would favour some places
        place = next(word for word in drawn if word < fair) % choices
        order_I[last], order_I[place] = order_I[place], order_I[last]
    return order_I
