"""A host under clients that err, lie, dawdle and vanish: bounded, quiet, and right for all the others.

Real sockets and real threads. That a reply is right means: bit for bit what the same blocks give in this
process without a connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import numpy as np
import pytest
from serving import (
    HEADER,
    TOKEN,
    Header,
    is_free,
    join,
    open_client,
    post,
    prompt_of,
    raw,
    replies,
    reset,
    served,
    tiny_pair,
    wait_until,
)  # fmt: skip

from quantkit.errors import InputError
from quantkit.private.client.model import generate_split, local
from quantkit.private.host.model import open_host
from quantkit.private.host.server import HostServer, Limits
from quantkit.private.protocol import Kind, Status, features_message

pytestmark = pytest.mark.once
WIDTH = 128


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def client(pair):
    return open_client(pair.client, threads=1)


@pytest.fixture(scope="module")
def wanted(pair, client):
    """Replies to a prompt, without a connection."""
    host = open_host(pair.host, threads=1, most_sessions=1)
    known = {}

    def of(number, steps=6):
        if (number, steps) not in known:
            session = local(host)(pair=client.half.pair, width=WIDTH, capacity=40)
            known[number, steps] = replies(client, session, prompt_of(number), steps)
            session.close()
        return known[number, steps]

    return of


def assert_serves(server, client, wanted):
    session = join(server, client)
    assert replies(client, session, prompt_of(1)) == wanted(1)
    session.close()


def test_a_reply_is_what_the_blocks_give(pair, client, wanted):
    with served(pair.host) as server:
        session = join(server, client)
        assert replies(client, session, prompt_of(1)) == wanted(1)
        assert len(server.host.sessions) == 1
        session.close()
        wait_until(lambda: is_free(server.host))
        # 6 steps of 32 + 512 bytes each way, a prompt of 4 tokens, and opening and closing
        assert session.bytes_sent == 6 * (32 + 4 * WIDTH) + 32 + 4 * 4 * WIDTH + 64 + 32
        assert session.bytes_received == 7 * (32 + 4 * WIDTH) + 64


def test_a_later_chunk_of_a_prompt_continues_the_earlier_one(pair, client):
    ids = prompt_of(8)
    with served(pair.host) as server:
        whole, parts = join(server, client), join(server, client)
        made = whole.advance(client.embed(ids, 0))
        parts.advance(client.embed(ids[:4], 0))
        again = parts.advance(client.embed(ids[4:], 4))
        assert np.abs(made - again).max() < 1e-4 * np.abs(made).max()
        whole.close()
        parts.close()


def test_halved_features_cost_little(pair, client):
    ids = prompt_of(8)
    with served(pair.host) as server:
        plain, half = join(server, client), join(server, client, features="float16")
        made, rounded = (each.advance(client.embed(ids, 0)) for each in (plain, half))
        assert 0 < np.abs(made - rounded).max() < 0.05 * np.abs(made).max()
        assert half.bytes_sent - plain.bytes_sent == -2 * WIDTH * len(ids)
        with pytest.raises(InputError, match="allowed: float32, float16"):
            join(server, client, features="int3")
        plain.close()
        half.close()


def test_a_wrong_token_opens_nothing(pair, client, wanted):
    with served(pair.host) as server:
        for token in ("", "x", TOKEN[:-1], TOKEN + "x", "ä" * 20):
            with pytest.raises(InputError, match=r"wrong token|connection failed") as raised:
                join(server, client, token=token)
            assert TOKEN not in str(raised.value).replace(token, "")
        assert post(server, "/v1/open", b"x" * 64, Authorization=None)[0] == 401
        assert post(server, "/v1/open", b"x" * 64, Authorization=f"Basic {TOKEN}")[0] == 401
        # Refused before its length matters: nothing of it is read.
        assert (
            post(server, "/v1/prefill", b"", **{"Content-Length": str(1 << 60), "Authorization": "Bearer x"})[
                0
            ]
            == 401
        )
        assert is_free(server.host)
        assert_serves(server, client, wanted)


def open_message(client, capacity=20, pair=None):
    payload = bytes.fromhex(client.half.pair) if pair is None else pair
    return Header(kind=Kind.OPEN, tokens=capacity, width=WIDTH, num_bytes=len(payload)).pack() + payload


def bad_messages(client):
    """(path, body, headers, HTTP code) of what must be refused."""
    features = np.ones((2, WIDTH), np.float32)
    right = features_message(Kind.PREFILL, 7, features, 1)

    def prefill(**changes):
        given = {"kind": Kind.PREFILL, "session": 7, "tokens": 2, "width": WIDTH, "number_type": 1}
        return Header(**{**given, "num_bytes": 8 * WIDTH, **changes}).pack() + right[HEADER.size :]

    return [
        ("/", right, {}, 400),
        ("/v1/other", right, {}, 400),
        ("/v1/prefill/../open", right, {}, 400),
        ("/v1/prefill", b"", {}, 400),
        ("/v1/prefill", right[:31], {}, 400),
        ("/v1/prefill", np.random.default_rng(0).bytes(len(right)), {}, 400),
        ("/v1/prefill", b"QKPF\x02\x00" + right[6:], {}, 400),
        ("/v1/step", right, {}, 400),  # a prefill's header in the wrong place
        ("/v1/prefill", right + b"x", {}, 400),
        ("/v1/prefill", prefill(tokens=0), {}, 400),
        ("/v1/prefill", prefill(tokens=3), {}, 400),
        ("/v1/prefill", prefill(tokens=(1 << 32) - 1), {}, 400),
        ("/v1/prefill", prefill(width=WIDTH - 1), {}, 400),
        ("/v1/prefill", prefill(number_type=9), {}, 400),
        ("/v1/prefill", prefill(number_type=2), {}, 400),
        ("/v1/prefill", prefill(status=3), {}, 400),
        ("/v1/prefill", prefill(num_bytes=(1 << 32) - 1), {}, 400),
        ("/v1/prefill", right, {}, 404),  # all is right but the session
        ("/v1/close", Header(kind=Kind.CLOSE, session=7).pack(), {}, 404),
        ("/v1/open", open_message(client, capacity=0), {}, 409),
        ("/v1/open", open_message(client, capacity=1 << 31), {}, 409),
        ("/v1/open", open_message(client, pair=bytes(32)), {}, 409),
        ("/v1/open", open_message(client, pair=bytes(31)), {}, 400),
        ("/v1/prefill", right, {"Content-Length": str(1 << 50)}, 413),
        ("/v1/prefill", right, {"Content-Length": "9" * 400}, 400),
        ("/v1/prefill", right, {"Content-Length": "-5"}, 400),
        ("/v1/prefill", right, {"Content-Length": "0x20"}, 400),
        ("/v1/prefill", right, {"Content-Length": None}, 400),
        ("/v1/prefill", right, {"Content-Length": None, "Transfer-Encoding": "chunked"}, 400),
    ]


def test_what_is_no_message_is_refused_in_a_few_words(pair, client, wanted, capfd):
    with served(pair.host) as server:
        for path, body, headers, code in bad_messages(client):
            given, reply = post(server, path, body, **headers)
            assert given == code, (path, headers, given, reply)
            assert HEADER.size < len(reply) < HEADER.size + 200
            assert b"Traceback" not in reply
        for data in (
            b"\x00" * 100,
            b"\xff" * 70000,
            b"GET / HTTP/1.1\r\n\r\n",
            b"POST\r\n\r\n",
            f"POST /v1/open HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
            + b"Content-Length: 64\r\nContent-Length: 65\r\n\r\n"
            + bytes(65),
            b"POST /v1/open HTTP/9.9\r\n\r\n",
            b"POST /v1/open HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
            b"POST /v1/open HTTP/1.1\r\nA: " + b"b" * 70000 + b"\r\n\r\n",
            np.random.default_rng(1).bytes(5000),
        ):
            made = raw(server, data + b"\r\n\r\n")
            assert b"Traceback" not in made
            assert b"<html" not in made.lower()
            assert len(made) < 1000
        wait_until(lambda: is_free(server.host))
        assert_serves(server, client, wanted)
    assert capfd.readouterr() == ("", ""), "nothing of it is written anywhere"


def test_numbers_that_are_none_are_refused_and_the_session_goes_on(pair, client, wanted):
    with served(pair.host) as server:
        session = join(server, client)
        for value in (np.nan, np.inf):
            broken = client.embed(prompt_of(1), 0)
            broken[1, 5] = value
            with pytest.raises(InputError, match="not finite"):
                session.advance(broken)
        assert replies(client, session, prompt_of(1)) == wanted(1)
        session.close()


def test_a_session_belongs_to_its_connection(pair, client):
    with served(pair.host) as server:
        one, other = join(server, client), join(server, client)
        mine, other.session = other.session, one.session
        with pytest.raises(InputError, match="no such session"):
            other.advance(client.embed(prompt_of(1), 0))
        other.session = mine
        other.advance(client.embed(prompt_of(1), 0))
        one.close()
        other.close()


def test_a_cache_holds_what_was_asked_for_and_no_more(pair, client):
    with served(pair.host, most_tokens=30) as server:
        with pytest.raises(InputError, match=r"31 tokens; a client may have up to 30.*--max-tokens"):
            join(server, client, capacity=31)
        session = join(server, client, capacity=5)
        session.advance(client.embed(prompt_of(1)[:4], 0))
        session.advance(client.embed(prompt_of(1)[:1], 4))
        with pytest.raises(InputError, match="the cache holds 5 tokens"):
            session.advance(client.embed(prompt_of(1)[:1], 5))
        with pytest.raises(InputError, match="this host belongs to another client"):
            join(server, client, pair="00" * 32)
        session.close()


def head_of(message):
    lines = ("POST /v1/prefill HTTP/1.1", f"Authorization: Bearer {TOKEN}", f"Content-Length: {len(message)}")
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("how", ["close", "reset", "in the middle of a message", "after a prompt"])
def test_who_vanishes_leaves_no_cache_behind(how, pair, client, wanted):
    with served(pair.host) as server:
        session = join(server, client)
        assert len(server.host.sessions) == 1
        plain = session.sock
        if how == "in the middle of a message":
            message = features_message(Kind.PREFILL, session.session, client.embed(prompt_of(1), 0), 1)
            plain.sendall(head_of(message) + message[:100])
        elif how == "after a prompt":
            session.advance(client.embed(prompt_of(1), 0))
        if how == "reset":
            reset(plain)
        else:
            plain.shutdown(socket.SHUT_RDWR)
            plain.close()
        wait_until(lambda: is_free(server.host))
        assert_serves(server, client, wanted)


def test_who_is_silent_is_let_go(pair, client):
    with served(pair.host, limits=Limits(idle_seconds=0.3)) as server:
        session = join(server, client)
        session.advance(client.embed(prompt_of(1), 0))
        wait_until(lambda: is_free(server.host))
        with pytest.raises(InputError, match=r"connection failed|cut off|not HTTP"):
            session.advance(client.embed(prompt_of(1)[:1], 4))


def test_who_dawdles_is_let_go_whatever_is_dawdled(pair, client, wanted):
    message = features_message(Kind.PREFILL, 1, np.ones((1, WIDTH), np.float32), 1)
    head = head_of(message)
    limits = Limits(message_seconds=0.4, idle_seconds=0.4)
    with served(pair.host, limits=limits) as server:
        for quick, slow in (
            (b"", head),
            (head, message),
            (head + message[:40], b""),
        ):
            begin = time.monotonic()
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as plain:
                plain.sendall(quick)
                with contextlib.suppress(OSError):
                    for place in range(100):
                        plain.sendall(slow[place : place + 1])
                        time.sleep(0.02)
                        if time.monotonic() - begin > 1.5:
                            break
                plain.settimeout(1)
                with contextlib.suppress(ConnectionResetError):
                    assert plain.recv(100) == b"", "it ends"
            assert time.monotonic() - begin < 3
        assert_serves(server, client, wanted)


def rounds(server, client, wanted, *, num_clients, seconds):
    """Every client's replies checked, over and over; how many were right."""
    right, wrong = [0] * num_clients, []
    end = time.monotonic() + seconds

    def work(number):
        count = 0
        try:
            while count == 0 or time.monotonic() < end:
                session = join(server, client)
                if replies(client, session, prompt_of(number)) != wanted(number):
                    wrong.append(number)
                session.close()
                count += 1
        except Exception as error:
            wrong.append(error)
        right[number] = count

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert min(right) >= 1
    return sum(right)


def sixteen_at_once(pair, client, wanted, seconds):
    for number in range(16):
        wanted(number)
    with served(pair.host, most_sessions=16) as server:
        together = [join(server, client) for _ in range(16)]
        with pytest.raises(InputError, match=r"all 16 places are taken.*--max-clients"):
            join(server, client)
        for each in together:
            each.close()
        wait_until(lambda: is_free(server.host))
        count = rounds(server, client, wanted, num_clients=16, seconds=seconds)
        wait_until(lambda: is_free(server.host))
    return count


def test_sixteen_clients_at_once_get_their_own_replies(pair, client, wanted):
    assert sixteen_at_once(pair, client, wanted, seconds=1.5) >= 16


@pytest.mark.slow
def test_sixteen_clients_at_once_for_a_minute(pair, client, wanted):
    assert sixteen_at_once(pair, client, wanted, seconds=60) >= 160


def test_too_many_connections_are_closed_and_the_rest_served(pair, client, wanted):
    with served(pair.host, most_sessions=1) as server, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=5))
            for _ in range(8)
        ]
        assert_serves(server, client, wanted)
        silent += [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=5))
            for _ in range(4)
        ]
        # The client that left frees its place when its thread ends: before one of the four, or after them.
        wait_until(lambda: len(select.select(silent[-4:], [], [], 0)[0]) >= 3, seconds=30)
        closed = select.select(silent[-4:], [], [], 0)[0]
        assert all(each.recv(10) == b"" for each in closed), "there is no place for them"
        silent[0].close()
        time.sleep(0.1)
        assert_serves(server, client, wanted)


def test_a_port_in_use_is_one_line(pair):
    with served(pair.host) as server, pytest.raises(InputError, match=r"the port is taken.*--port"):
        HostServer(("127.0.0.1", server.server_port), server.host, TOKEN, Limits())


def test_rows_of_unequal_length_generate_as_alone(pair, client):
    host = open_host(pair.host, threads=1)
    prompts = [prompt_of(number).tolist() for number in (1, 5, 8)]
    together = list(generate_split(client, local(host), prompts, max_new_tokens=5))
    for row, prompt in enumerate(prompts):
        alone = list(generate_split(client, local(host), [prompt], max_new_tokens=5))
        assert [tokens[row] for tokens in together] == [tokens[0] for tokens in alone]
    assert is_free(host)
    with pytest.raises(InputError, match="context"):
        list(generate_split(client, local(host), prompts, max_new_tokens=1 << 20))
    assert Status.OK == 0
