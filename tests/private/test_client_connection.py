"""A client before hosts that lie: whatever comes back, one line says what is wrong, and in bounded time."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest
from safetensors.numpy import save
from serving import http_reply, impostor, lying_host

from quantkit.errors import InputError
from quantkit.private.client.connection import connect, split_url
from quantkit.private.protocol import ProtocolError, Status, features_message, fields_message, refusal_message

pytestmark = pytest.mark.once
WIDTH = 16
ONES = np.ones((1, WIDTH), np.float32)
OPENED = {"version": "2", "pair": "00" * 32, "width": str(WIDTH), "capacity": "9"}


def opened(url, **options):
    given = {"token": "t" * 20, "pair": "00" * 32, "width": WIDTH, "capacity": 9, "reply_seconds": 1.0}
    return connect(url, **{**given, **options})


def expect_one_line(reason, url, act):
    begin = time.monotonic()
    with pytest.raises(InputError, match=reason) as raised:
        act()
    line = str(raised.value)
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 400
    assert url in line
    assert "t" * 20 not in line, "the token is not told"
    assert time.monotonic() - begin < 4


def writing(data):
    return lambda plain: plain.sendall(data)


def trickle(plain, data):
    for place in range(len(data)):
        plain.sendall(data[place : place + 1])
        time.sleep(0.1)


NO_WEBSOCKET = "opens no WebSocket|connection failed"
BAD_HANDSHAKES = {
    "nothing": (lambda plain: None, NO_WEBSOCKET),
    "not HTTP": (writing(b"\x00\xff" * 300), NO_WEBSOCKET),
    "a page": (writing(http_reply(b"<html>" + b"x" * 100)), "HTTP 200"),
    "an error": (writing(http_reply(b"boo\x1b", code=500)), "HTTP 500"),
    "much too long": (writing(http_reply(b"", length="9" * 5000)), NO_WEBSOCKET),
    "cut off": (writing(http_reply(b"x", length=32)), NO_WEBSOCKET),
    "no key": (
        writing(b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
        NO_WEBSOCKET,
    ),
    "another place": (
        writing(http_reply(b"", code=302, more="Location: ws://127.0.0.1:1/\r\n")),
        f"HTTP 302|{NO_WEBSOCKET}",
    ),
    "a wrong token": (writing(http_reply(b"", code=401)), "wrong token; next: give the host's --token-file"),
    "endless headers": (writing(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000), NO_WEBSOCKET),
    "a long header": (writing(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200000 + b"\r\n\r\n"), NO_WEBSOCKET),
    "silence": (lambda plain: time.sleep(1.5), "no reply in time"),
    "a trickle": (lambda plain: trickle(plain, http_reply(b"")), "no reply in time"),
}


@pytest.mark.parametrize("name", BAD_HANDSHAKES)
def test_a_wrong_handshake_is_one_line(name):
    answer, reason = BAD_HANDSHAKES[name]
    with impostor(answer) as url:
        expect_one_line(reason, url, lambda: opened(url))


def sending(message):
    return lambda connection: connection.send(message)


def refusing(status, words):
    error = ProtocolError(Status.FAILED, words)
    error.status = status
    return sending(refusal_message(error))


def raw_frame(message, *, length=None):
    """The start of a frame and this much of its content."""
    return bytes([0x82, len(message) if length is None else length]) + message


WRONG = "its reply is wrong"
BAD_ANSWERS = {  # to an opening and to a step alike
    "a text": (sending("hello"), WRONG),
    "noise": (sending(b"\x00\xff" * 300), WRONG),
    "an empty message": (sending(b""), WRONG),
    "a promise of a long header": (sending(b"\xff" * 7 + b"\x0f" + bytes(20)), WRONG),
    "too long": (sending(bytes(1 << 20)), "its reply is too long"),
    "silence": (lambda connection: time.sleep(1.5), "no reply in time"),
    "a trickle": (lambda connection: trickle(connection.socket, raw_frame(bytes(100))), "no reply in time"),
    "cut off": (
        lambda connection: (
            connection.socket.sendall(raw_frame(b"xxx", length=100)),
            connection.socket.shutdown(socket.SHUT_RDWR),
        ),
        "the host closed it",
    ),
    "no frame": (lambda connection: connection.socket.sendall(b"\xff" * 50), "connection failed"),
    "an end": (lambda connection: connection.close(), "the host closed it"),
    "an end for size": (lambda connection: connection.close(1009), "too large.*--max-message-mb"),
    "a refusal": (refusing(Status.OTHER_MODEL, "this host belongs to another client"), "another client"),
    "a refusal with a trap": (refusing(Status.FAILED, "\x1b[2J\nboo" + "x" * 150), r"\?\[2J\?boo"),
    "an unknown refusal": (refusing("whatever", "because"), "because"),
    "a refusal without words": (sending(fields_message({"status": "failed"})), "without a reason"),
}
BAD_OPENINGS = {
    **BAD_ANSWERS,
    "features": (sending(features_message(ONES, np.float32)), "opens no session"),
    "no fields": (sending(fields_message({})), f"{WRONG}|opens no session"),
    "another version": (sending(fields_message({**OPENED, "version": "3"})), "opens no session"),
    "another width": (sending(fields_message({**OPENED, "width": "8"})), "opens no session"),
    "a tensor beside it": (sending(save({"features": ONES}, metadata=OPENED)), "opens no session"),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_wrong_answer_to_opening_is_one_line(name):
    answer, reason = BAD_OPENINGS[name]
    with lying_host(answer) as url:
        expect_one_line(reason, url, lambda: opened(url))


def with_value(value):
    features_TI = ONES.copy()
    features_TI[0, -1] = value
    return features_TI


BAD_STEPS = {
    **BAD_ANSWERS,
    "fields": (sending(fields_message(OPENED)), WRONG),
    "fields beside features": (sending(save({"features": ONES}, metadata={"a": "b"})), WRONG),
    "another name": (sending(save({"feature": ONES})), WRONG),
    "another tensor beside it": (sending(save({"features": ONES, "x": ONES})), WRONG),
    "integers": (sending(save({"features": ONES.astype(np.int32)})), "features in int32"),
    "doubles": (sending(save({"features": ONES.astype(np.float64)})), "features in float64"),
    "no tokens": (sending(save({"features": ONES[:0]})), "0 tokens"),
    "two tokens": (sending(save({"features": np.ones((2, WIDTH), np.float32)})), "2 tokens"),
    "another width": (sending(save({"features": ONES[:, 1:].copy()})), r"shape \(1, 15\)"),
    "one axis": (sending(save({"features": ONES[0]})), r"shape \(16,\)"),
    "truncated": (sending(features_message(ONES, np.float32)[:-4]), WRONG),
    "extended": (sending(features_message(ONES, np.float32) + bytes(4)), WRONG),
    "not a number": (sending(save({"features": with_value(np.nan)})), "not finite"),
    "infinite": (sending(save({"features": with_value(np.inf)})), "not finite"),
    "a full cache": (refusing(Status.CACHE_FULL, "the cache holds 9 tokens"), "holds 9 tokens.*shorten"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_wrong_answer_to_a_step_is_one_line(name):
    answer, reason = BAD_STEPS[name]
    with lying_host(sending(fields_message(OPENED)), answer) as url:
        session = opened(url)
        expect_one_line(reason, url, lambda: session.advance(ONES))
        session.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_right_answer_is_read(dtype):
    answers = sending(fields_message(OPENED)), sending(features_message(ONES, dtype))
    with lying_host(*answers) as url:
        session = opened(url)
        features_TI = session.advance(np.zeros((1, WIDTH), np.float32))
        assert features_TI.dtype == np.float32
        assert (features_TI == 1).all()
        sizes = len(fields_message(OPENED)), len(features_message(ONES, dtype))
        assert session.bytes_received == sum(sizes)
        session.close()


def test_a_host_that_reads_nothing_is_given_up():
    def deaf(connection):
        with connection.recv_flow_control:  # as long as this is held, nothing is read from the socket
            time.sleep(2.5)

    prompt_TI = np.ones((1 << 19, WIDTH), np.float32)  # 32 MB, more than any buffer between both
    with lying_host(sending(fields_message(OPENED)), deaf) as url:
        session = opened(url)
        expect_one_line("no reply in time|the host closed it", url, lambda: session.advance(prompt_TI))
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
