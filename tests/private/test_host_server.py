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
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from serving import (
    TOKEN,
    code_of,
    frame,
    is_free,
    join,
    opening_of,
    plain_client,
    prompt_of,
    raw,
    read_head,
    replies,
    request,
    reset,
    served,
    tiny_pair,
    wait_until,
)
from websockets.sync.client import connect as websocket_connect

from quantkit.errors import InputError
from quantkit.private.client.model import generate_split, open_client
from quantkit.private.host.model import open_host
from quantkit.private.host.server import MAX_STRANGERS, Limits, busiest, listen
from quantkit.private.protocol import (
    Message,
    ProtocolError,
    Status,
    features_message,
    features_of,
    fields_message,
    read_message,
)

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
    host = open_host(pair.host, threads=1, max_sessions=1)
    known = {}

    def of(number, steps=6):
        if (number, steps) not in known:
            session = host.open(40)
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
        step, prompt = (len(features_message(np.ones((rows, WIDTH)), np.float32)) for rows in (1, 4))
        opening = len(fields_message(opening_of(client, capacity="40")))
        assert session.bytes_sent == opening + prompt + 6 * step
        assert session.bytes_received == opening + 7 * step
        assert step <= 4 * WIDTH + 100, "a token costs little more than its numbers"


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
        assert abs(half.bytes_sent - plain.bytes_sent + 2 * WIDTH * len(ids)) <= 8
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
        for authorization in (None, "", f"Basic {TOKEN}", f"Bearer {TOKEN}\r\nAuthorization: Bearer x"):
            reply = raw(server, request(Authorization=authorization))
            assert code_of(reply) == 401
            assert TOKEN.encode() not in reply
        # The token is checked first: whoever lacks it learns nothing of paths or protocols.
        assert code_of(raw(server, request("/x", Authorization="Bearer x"))) == 401
        assert code_of(raw(server, request(Authorization="Bearer x", Upgrade=None))) == 401
        assert is_free(server.host)
        assert_serves(server, client, wanted)


def bad_openings(client):
    """(message, status) of first messages that must be refused."""
    right = opening_of(client)
    return [
        ("text", Status.BAD_MESSAGE),
        (b"", Status.BAD_MESSAGE),
        (np.random.default_rng(0).bytes(500), Status.BAD_MESSAGE),
        (features_message(np.ones((2, WIDTH)), np.float32), Status.BAD_MESSAGE),
        (fields_message({}), Status.BAD_MESSAGE),
        (fields_message(opening_of(client, width=None)), Status.BAD_MESSAGE),
        (fields_message({**right, "more": "x"}), Status.BAD_MESSAGE),
        (save({"features": np.ones((1, WIDTH), np.float32)}, metadata=right), Status.BAD_MESSAGE),
        (fields_message({**right, "version": "1"}), Status.BAD_MESSAGE),
        (fields_message({**right, "capacity": "-1"}), Status.BAD_MESSAGE),
        (fields_message({**right, "capacity": "1e3"}), Status.BAD_MESSAGE),
        (fields_message({**right, "capacity": "9" * 400}), Status.BAD_MESSAGE),
        (fields_message({**right, "capacity": "²"}), Status.BAD_MESSAGE),
        (fields_message({**right, "capacity": "0"}), Status.CACHE_FULL),
        (fields_message({**right, "capacity": str(1 << 31)}), Status.CACHE_FULL),
        (fields_message({**right, "pair": "00" * 32}), Status.OTHER_MODEL),
        (fields_message({**right, "pair": "ä"}), Status.OTHER_MODEL),
        (fields_message({**right, "width": "127"}), Status.OTHER_MODEL),
    ]


def bad_features():
    """Messages of an open session that must be refused."""
    right = np.ones((2, WIDTH), np.float32)
    whole = features_message(right, np.float32)
    header = 8 + int.from_bytes(whole[:8], "little")
    return [
        "text",
        b"",
        whole[:7],
        whole[: header - 1],
        whole[:header],
        whole[:-1],
        whole + b"x",
        b"\xff" * 8 + whole[8:],
        whole[8:],
        np.random.default_rng(0).bytes(len(whole)),
        whole.replace(b"F32", b"F16"),
        whole.replace(b"F32", b"F99"),
        whole.replace(b"F32", b"BF16"[:3]),
        whole.replace(b"[2,128]", b"[3,128]"),
        whole.replace(b"[2,128]", b"[2,-28]"),
        whole.replace(b"[0,1024]", b"[8,1024]"),
        fields_message({"a": "b"}),
        fields_message({}),
        save({"features": right}, metadata={"version": "2"}),
        save({"features": right, "more": right}),
        save({"other": right}),
        *(save({"features": right.astype(dtype)}) for dtype in (np.int8, np.int32, np.float64, bool)),
        save({"features": right[:0]}),
        save({"features": right[:, 1:].copy()}),
        save({"features": right[0]}),
        save({"features": right[None]}),
    ]


@contextlib.contextmanager
def websocket(server):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with websocket_connect(
        f"ws://127.0.0.1:{server.port}/v2", additional_headers=headers, compression=None, proxy=None
    ) as connection:
        yield connection


def refusal_of(connection, message):
    connection.send(message)
    reply = read_message(connection.recv(timeout=5))
    assert set(reply.fields) == {"status", "words"}
    assert not reply.tensors
    assert 0 < len(reply.fields["words"]) <= 200
    return reply.fields["status"]


def test_what_is_no_message_is_refused_in_a_few_words_and_the_session_goes_on(pair, client, wanted, capfd):
    with served(pair.host) as server:
        with websocket(server) as connection:
            for message, status in bad_openings(client):
                assert refusal_of(connection, message) == status, message
            assert is_free(server.host)
            connection.send(fields_message(opening_of(client)))
            assert read_message(connection.recv(timeout=5)).fields == opening_of(client)
            for message in [*bad_features(), fields_message(opening_of(client))]:
                assert refusal_of(connection, message) == Status.BAD_MESSAGE, message
            connection.send(features_message(client.embed(prompt_of(1), 0), np.float32))
            assert connection.recv(timeout=5)[-4 * WIDTH :] == wanted(1)[0]
        wait_until(lambda: is_free(server.host))
    assert capfd.readouterr() == ("", ""), "nothing of it is written anywhere"


def test_what_is_no_handshake_ends_the_connection(pair, client, wanted, capfd):
    with served(pair.host) as server:
        for data, code in (
            (request("/"), 404),
            (request("/v1/step"), 404),
            (request("/v2/../v2"), 404),
            (request(Upgrade=None), 426),
            (request(**{"Sec-WebSocket-Key": "short"}), 400),
            (b"\x00" * 100, 0),
            (b"\xff" * 70000, 0),
            (b"GET / HTTP/1.1\r\n\r\n", 401),
            (b"POST", 0),
            (b"POST /v2 HTTP/1.1\r\nContent-Length: 99999999999999\r\n", 0),
            (b"GET /v2 HTTP/9.9", 0),
            (b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 300, 0),
            (b"GET /v2 HTTP/1.1\r\nA: " + b"b" * 70000, 0),
            (np.random.default_rng(1).bytes(5000), 0),
        ):
            reply = raw(server, data if code else data + b"\r\n\r\n")
            assert code_of(reply) in ([code] if code else [0, 400, 414, 431]), (data[:60], reply)
            assert b"Traceback" not in reply
            assert b"<html" not in reply.lower()
            assert len(reply) < 1000
        wait_until(lambda: is_free(server.host))
        assert_serves(server, client, wanted)
    assert capfd.readouterr() == ("", ""), "nothing of it is written anywhere"


RIGHT = features_message(np.ones((2, 3), np.float32), np.float32)


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.integers(0, len(RIGHT) - 1), st.integers(0, 255)).map(
            lambda change: RIGHT[: change[0]] + bytes([change[1]]) + RIGHT[change[0] + 1 :]
        ),
        st.tuples(st.integers(0, 99), st.integers(0, 99), st.text(max_size=20)).map(
            lambda header: save({"features": np.ones(header[:2], np.float16)}, metadata={header[2]: ""})
        ),
    )
)
def test_any_bytes_are_features_or_refused(data):
    try:
        message = read_message(data)
        features = features_of(message, width=3, max_tokens=2)
    except ProtocolError as error:
        assert error.status is Status.BAD_MESSAGE
        assert len(error.words) <= 200
    else:
        assert isinstance(message, Message)
        assert features.shape in ((1, 3), (2, 3))
        assert np.isfinite(features).all()


def test_a_message_too_large_is_named_and_ends_the_session(pair, client, wanted):
    with served(pair.host, limits=Limits(message_bytes=4 * 10 * WIDTH)) as server:
        session = join(server, client)
        with pytest.raises(InputError, match=r"too large for the host.*--max-message-mb"):
            session.advance(np.ones((20, WIDTH), np.float32))
        wait_until(lambda: is_free(server.host))
        with plain_client(server) as plain:  # its length alone is enough, whatever follows it
            plain.sendall(frame(b"x", length=1 << 40))
            assert plain.recv(100)[2:4] == (1009).to_bytes(2, "big")
        assert_serves(server, client, wanted)


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


def test_sessions_on_two_connections_do_not_touch(pair, client, wanted):
    with served(pair.host) as server:
        one, other = join(server, client), join(server, client)
        first = one.advance(client.embed(prompt_of(1), 0))
        other.advance(client.embed(prompt_of(2), 0))
        assert first.tobytes() == wanted(1)[0]
        token = client.logits(first[None])[0, -1:].argmax(-1)
        again = one.advance(client.embed(token, len(prompt_of(1))))
        assert again.tobytes() == wanted(1)[1]
        one.close()
        other.advance(client.embed(token, len(prompt_of(2))))
        other.close()


def test_a_cache_holds_what_was_asked_for_and_no_more(pair, client):
    with served(pair.host, max_tokens=30) as server:
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


@pytest.mark.parametrize("how", ["close", "reset", "in the middle of a message", "after a prompt"])
def test_who_vanishes_leaves_no_cache_behind(how, pair, client, wanted):
    prompt = frame(features_message(client.embed(prompt_of(1), 0), np.float32))
    with served(pair.host) as server:
        with plain_client(server) as plain:
            plain.sendall(frame(fields_message(opening_of(client))))
            assert plain.recv(4096)
            assert len(server.host.sessions) == 1
            if how == "in the middle of a message":
                plain.sendall(prompt[:100])
            elif how == "after a prompt":
                plain.sendall(prompt)
                assert plain.recv(4096)
            if how == "reset":
                reset(plain)
            else:
                plain.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: is_free(server.host))
        assert_serves(server, client, wanted)


def test_who_is_silent_is_let_go(pair, client):
    with served(pair.host, limits=Limits(idle_seconds=0.3)) as server:
        session = join(server, client)
        session.advance(client.embed(prompt_of(1), 0))
        wait_until(lambda: is_free(server.host))
        with pytest.raises(InputError, match="the host closed it"):
            session.advance(client.embed(prompt_of(1)[:1], 4))


def test_who_dawdles_is_let_go_whatever_is_dawdled(pair, client, wanted):
    opening = frame(fields_message(opening_of(client)))
    prompt = frame(features_message(np.ones((1, WIDTH)), np.float32))
    limits = Limits(handshake_seconds=0.4, idle_seconds=0.4)
    with served(pair.host, limits=limits) as server:
        for handshake, quick, slow in (
            (False, b"", b""),
            (False, b"", request()),
            (True, b"", b""),
            (True, b"", opening),
            (True, opening, prompt),
            (True, opening + prompt[:40], b""),
        ):
            begin = time.monotonic()
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
                if handshake:
                    plain.sendall(request())
                    read_head(plain)
                plain.sendall(quick)
                with contextlib.suppress(OSError):
                    for place in range(100):
                        plain.sendall(slow[place : place + 1])
                        time.sleep(0.02)
                        if time.monotonic() - begin > 1:
                            break
                plain.settimeout(2)
                with contextlib.suppress(ConnectionResetError):
                    while plain.recv(4096):
                        pass
            assert time.monotonic() - begin < 3, "it ends"
            wait_until(lambda: is_free(server.host))
        assert_serves(server, client, wanted)


def test_who_reads_no_reply_is_let_go(pair, client, wanted):
    """Replies that nobody takes fill all buffers; the thread that sends them must not wait for ever."""
    with served(pair.host, limits=Limits(idle_seconds=0.5)) as server:
        with plain_client(server) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            message = frame(b"no message, each of which is refused")
            plain.settimeout(1)
            begin = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - begin < 30:
                    plain.sendall(1000 * message)
            assert time.monotonic() - begin < 30
        assert_serves(server, client, wanted)


def test_a_host_that_stops_ends_all_connections_soon(pair, client):
    with served(pair.host, limits=Limits(handshake_seconds=1)) as server, contextlib.ExitStack() as stack:
        sessions = [join(server, client) for _ in range(3)]
        stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        begin = time.monotonic()
        sessions[0].advance(client.embed(prompt_of(1), 0))
    assert time.monotonic() - begin < 4
    assert is_free(server.host)
    with pytest.raises(InputError, match="the host closed it"):
        sessions[0].advance(client.embed(prompt_of(1)[:1], 4))


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
    with served(pair.host, max_sessions=16) as server:
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


def test_silent_connections_keep_no_client_out(pair, client, wanted):
    """The oldest of too many connections without a token are closed, and the clients stay.

    Each connection is admitted in a thread of its own, so neighbours may change places.
    """
    limits = Limits(handshake_seconds=120)
    with served(pair.host, limits=limits, max_sessions=1) as server, contextlib.ExitStack() as stack:
        early = join(server, client)
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            for _ in range(MAX_STRANGERS + 12)
        ]
        wait_until(lambda: len(select.select(silent, [], [], 0)[0]) == 12, seconds=30)
        closed = select.select(silent, [], [], 0)[0]
        assert all(each.recv(10) == b"" for each in closed)
        assert not {*closed} & {*silent[MAX_STRANGERS:]}, "the newest may still show a token"
        assert replies(client, early, prompt_of(1)) == wanted(1)
        early.close()
        wait_until(lambda: is_free(server.host))
        assert_serves(server, client, wanted)


def test_the_address_with_most_connections_gives_way_first():
    peers = [Mock(**{"getpeername.return_value": (address, 1)}) for address in "abbacb"]
    assert busiest(peers) is peers[1]
    peers[1].getpeername.side_effect = OSError
    assert busiest(peers) is peers[0]


def test_who_shows_a_token_and_opens_no_session_is_let_go(pair, client, wanted):
    with served(pair.host, limits=Limits(handshake_seconds=0.3, idle_seconds=60)) as server:
        with plain_client(server) as plain:
            plain.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while plain.recv(4096):
                    pass
        assert_serves(server, client, wanted)


def test_a_port_in_use_is_one_line(pair):
    with served(pair.host) as server:
        for port, reason in ((server.port, r"the port is taken.*--port"), (1 << 20, "cannot listen there")):
            with pytest.raises(InputError, match=reason):
                listen(("127.0.0.1", port), server.host, TOKEN, Limits())


def test_rows_of_unequal_length_generate_as_alone(pair, client):
    host = open_host(pair.host, threads=1)
    prompts = [prompt_of(number).tolist() for number in (1, 5, 8)]

    def in_process(*, capacity, **_):
        return host.open(capacity)

    together = list(generate_split(client, in_process, prompts, max_new_tokens=5))
    for row, prompt in enumerate(prompts):
        alone = list(generate_split(client, in_process, [prompt], max_new_tokens=5))
        assert [tokens[row] for tokens in together] == [tokens[0] for tokens in alone]
    assert is_free(host)
    with pytest.raises(InputError, match="context"):
        list(generate_split(client, in_process, prompts, max_new_tokens=1 << 20))
