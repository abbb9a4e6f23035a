"""Orders from a key: HKDF by its published vectors, and a shuffle that favours nothing."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.private.order import derive, keyed_order, words
from quantkit.quantization.transforms.permutation import checked_order

pytestmark = pytest.mark.once
KEYS = st.binary(min_size=32, max_size=32)


def test_hkdf_is_that_of_rfc_5869():
    made = derive(bytes([0x0B] * 22), salt=bytes(range(13)), purpose=bytes(range(0xF0, 0xFA)), length=42)
    assert made.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    without_salt = derive(bytes([0x0B] * 22), salt=b"", purpose=b"", length=42)
    assert without_salt.hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


def test_words_are_hmac_in_counter_mode():
    key = bytes(range(32))
    drawn = words(key)
    made = b"".join(next(drawn).to_bytes(4, "little") for _ in range(20))
    blocks = [hmac.new(key, number.to_bytes(8, "little"), hashlib.sha256).digest() for number in range(3)]
    assert made == b"".join(blocks)[:80]


@settings(max_examples=40)
@given(key=KEYS, width=st.integers(1, 300))
def test_every_order_names_each_place_once_and_comes_again(key, width):
    order = keyed_order(key, model=b"m", space="residual", width=width)
    assert (np.sort(order) == np.arange(width)).all()
    assert (order == keyed_order(key, model=b"m", space="residual", width=width)).all()


def test_key_model_space_and_width_each_make_another_order():
    given = {"key": bytes(32), "model": b"m", "space": "a", "width": 64}
    changes = [{"key": bytes(31) + b"\1"}, {"model": b"n"}, {"space": "b"}]
    orders = [keyed_order(**{**given, **change}) for change in ({}, *changes)]
    assert len({order.tobytes() for order in orders}) == 4
    wider = keyed_order(**{**given, "width": 65})
    assert (wider[wider < 64][:20] != orders[0][:20]).any()


def test_orders_are_equally_likely():
    """All 24 orders of four places over many keys: chi squared within its 99.99% quantile (23 degrees)."""
    count = 4800
    seen = Counter(
        tuple(keyed_order(number.to_bytes(32, "big"), model=b"m", space="s", width=4).tolist())
        for number in range(count)
    )
    assert len(seen) == 24
    expected = count / 24
    assert sum((found - expected) ** 2 / expected for found in seen.values()) < 56


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ([0, 1, 2], "an order of 3 places, and it has 4"),
        ([0, 1, 2, 3, 4], "an order of 5 places"),
        ([0, 1, 2, 2], "missing or named twice"),
        ([0, 1, 2, 4], "missing or named twice"),
        ([0.0, 1.0, 2.0, 3.0], "missing or named twice"),
    ],
)
def test_what_is_no_order_is_refused(order, reason):
    with pytest.raises(InputError, match=reason):
        checked_order(np.array(order), 4, "residual")
