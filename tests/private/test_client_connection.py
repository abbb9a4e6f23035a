"""A client before hosts that lie: whatever comes back, one line says what is wrong, and in bounded time."""

from __future__ import annotations

import socket
import struct
import time

import numpy as np
import pytest
from serving import HEADER, Header, http_reply, impostor, read_request

from quantkit.errors import InputError
from quantkit.private.client.connection import connect, split_url
from quantkit.private.protocol import Kind, Status, features_message

pytestmark = pytest.mark.once
WIDTH = 16
OPENED = Header(kind=Kind.OPEN, session=5, tokens=9, width=WIDTH).pack()
RIGHT = features_message(Kind.STEP, 5, np.ones((1, WIDTH), np.float32), 1)


def opened(url, **options):
    given = {"token": "t" * 20, "pair": "00" * 32, "width": WIDTH, "capacity": 9, "reply_seconds": 1.0}
    return connect(url, **{**given, **options})


def sending(data):
    return lambda plain: plain.sendall(data)


def trickling(data):
    def answer(plain):
        for place in range(len(data)):
            plain.sendall(data[place : place + 1])
            time.sleep(0.1)

    return answer


def refusing(status, words, code=400):
    return http_reply(Header(kind=0, status=status, num_bytes=len(words)).pack() + words, code=code)


BAD_OPENINGS = {
    "nothing": (lambda plain: None, "not HTTP|connection failed"),
    "not HTTP": (sending(b"\x00\xff" * 300), "not HTTP"),
    "a page": (sending(http_reply(b"<html>" + b"x" * 100)), "not a message of this protocol"),
    "no length": (sending(b"HTTP/1.1 200 OK\r\n\r\n" + OPENED), "does not say how long"),
    "chunks": (
        sending(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n" + OPENED + b"\r\n0\r\n\r\n"),
        "does not say how long",
    ),
    "too long": (sending(http_reply(OPENED, length=1 << 40)), "too long"),
    "much too long": (sending(http_reply(OPENED, length="9" * 5000)), "too long"),
    "a negative length": (sending(http_reply(OPENED, length=-1)), "does not say how long"),
    "cut off": (sending(http_reply(OPENED[:20], length=32)), "cut off"),
    "a short header": (sending(http_reply(OPENED[:20])), "a header has 32 bytes"),
    "another version": (sending(http_reply(OPENED[:4] + b"\x07\x00" + OPENED[6:])), "version 7"),
    "endless headers": (sending(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000), "not HTTP|connection failed"),
    "a long header": (
        sending(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200000 + b"\r\n\r\n"),
        "not HTTP|connection failed",
    ),
    "silence": (lambda plain: time.sleep(1.5), "no reply in time"),
    "a trickle": (trickling(http_reply(OPENED)), "no reply in time"),
    "a session of no number": (sending(http_reply(Header(kind=1, width=WIDTH).pack())), "opens no session"),
    "another width": (sending(http_reply(Header(kind=1, session=5, width=8).pack())), "opens no session"),
    "another answer": (sending(http_reply(RIGHT)), "answers something else"),
    "a refusal": (
        sending(refusing(Status.OTHER_MODEL, b"this host belongs to another client")),
        "another client",
    ),
    "a refusal with a trap": (sending(refusing(Status.FAILED, b"\x1b[2J\nboo" + b"x" * 150)), r"\?\[2J\?boo"),
    "an unknown refusal": (sending(refusing(77, b"whatever")), "HTTP 400"),
    "an error without words": (sending(http_reply(OPENED, code=500)), "HTTP 500"),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_wrong_answer_to_opening_is_one_line(name):
    answer, reason = BAD_OPENINGS[name]
    begin = time.monotonic()
    with impostor(answer) as url, pytest.raises(InputError, match=reason) as raised:
        opened(url)
    line = str(raised.value)
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 400
    assert url in line
    assert "t" * 20 not in line, "the token is not told"
    assert time.monotonic() - begin < 4


def answering(reply):
    """Opens a session rightly, and answers whatever follows with this."""

    def answer(plain: socket.socket):
        plain.sendall(http_reply(OPENED))
        read_request(plain)
        plain.sendall(reply)
        time.sleep(0.05)

    return answer


def step_header(**changes):
    given = {"kind": Kind.STEP, "session": 5, "tokens": 1, "width": WIDTH, "number_type": 1}
    return Header(**{**given, "num_bytes": 4 * WIDTH, **changes}).pack()


NAN = struct.pack("<16f", *([1.0] * 15), float("nan"))
BAD_STEPS = {
    "no numbers": (http_reply(step_header(num_bytes=0, number_type=0)), "numbers of type 0"),
    "too many tokens": (http_reply(step_header(tokens=2) + bytes(64)), "2 tokens"),
    "another width": (http_reply(step_header(width=15) + bytes(64)), "features of width 15"),
    "too few bytes": (http_reply(step_header() + bytes(60)), "do not agree"),
    "too many bytes": (
        http_reply(step_header(num_bytes=800) + bytes(800)),
        "features of width|where 64 belong",
    ),
    "far too many bytes": (http_reply(step_header(num_bytes=9000) + bytes(9000)), "too long"),
    "cut off": (http_reply(step_header() + bytes(10), length=96), "cut off"),
    "no number": (http_reply(step_header() + NAN), "not finite"),
    "another session's": (http_reply(step_header(session=6) + bytes(64)), "answers something else"),
    "another kind": (http_reply(step_header(kind=Kind.PREFILL) + bytes(64)), "answers something else"),
    "a full cache": (
        refusing(Status.CACHE_FULL, b"the cache holds 9 tokens", 409),
        "holds 9 tokens.*shorten",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_wrong_answer_to_a_step_is_one_line(name):
    reply, reason = BAD_STEPS[name]
    with impostor(answering(reply)) as url:
        session = opened(url)
        with pytest.raises(InputError, match=reason):
            session.advance(np.ones((1, WIDTH), np.float32))
        session.close()


def test_a_right_answer_is_read():
    with impostor(answering(http_reply(RIGHT))) as url:
        session = opened(url)
        assert (session.advance(np.zeros((1, WIDTH), np.float32)) == 1).all()
        assert session.bytes_received == 2 * HEADER.size + 4 * WIDTH
        session.close()


def test_a_host_that_is_gone_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(InputError, match=r"connection failed \(Connection refused\).*serve-host"):
        opened(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "url",
    ["", "x", "127.0.0.1:80", "https://a:1", "ftp://a:1", "http://a", "http://a:x", "http://a:99999", "http://:1",
     "http://a:1/x", "http://a:1?x", "http://u:p@a:1", "http://[::1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InputError, match="http://MACHINE:PORT"):
        split_url(url)
    assert split_url("http://127.0.0.1:80/") == ("127.0.0.1", 80)
