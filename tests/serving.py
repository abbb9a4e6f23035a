"""What tests of a serving host share: one tiny model, served in this process, and hosts that misbehave."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from exporting import build_tiny
from protecting import Pair, split

from quantkit.model.families import FAMILIES
from quantkit.private.client.connection import RemoteHost, connect
from quantkit.private.client.model import Client, open_client
from quantkit.private.host.model import Host, open_host
from quantkit.private.host.server import HostServer, Limits
from quantkit.private.protocol import HEADER, Header

TOKEN = "a-token-of-some-length"
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 97}


def tiny_pair(folder: Path) -> Pair:
    build_tiny("LlamaForCausalLM", {**FAMILIES["llama"].tiny, **SIZES}).save_pretrained(folder / "model")
    return split(folder / "model", folder)


@contextlib.contextmanager
def served(folder: Path, *, limits: Limits | None = None, **options) -> Iterator[HostServer]:
    """A host in a thread of this process, on any free port."""
    host = open_host(folder, threads=1, **options)
    server = HostServer(("127.0.0.1", 0), host, TOKEN, limits or Limits())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def url_of(server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def join(server, client: Client, *, token=TOKEN, capacity=40, **options) -> RemoteHost:
    half = client.half
    return connect(
        url_of(server),
        token=token,
        pair=options.pop("pair", half.pair),
        width=half.width,
        capacity=capacity,
        **options,
    )


def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def is_free(host: Host) -> bool:
    """Whether no cache is left, nor the memory of one."""
    return not host.sessions and not host.decoder.spare


def prompt_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(1, 97, 3 + number % 9)


def replies(client: Client, session, ids, steps: int = 6) -> list[bytes]:
    """Every reply to a prompt and to what greedily follows it, bit for bit."""
    made, place = [session.advance(client.embed(ids, 0))], len(ids)
    for _ in range(steps):
        token = client.logits(made[-1][None])[0, -1:].argmax(-1)
        made.append(session.advance(client.embed(token, place)))
        place += 1
    return [each.tobytes() for each in made]


def post(server, path: str, body: bytes, **headers) -> tuple[int, bytes]:
    """A request with any headers at all; (code, reply)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.putrequest("POST", path, skip_accept_encoding=True)
        given = {"Authorization": f"Bearer {TOKEN}", "Content-Length": str(len(body)), **headers}
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(body)
        response = connection.getresponse()
        return response.status, response.read(4096)
    finally:
        connection.close()


def raw(server, data: bytes, *, seconds: float = 5.0) -> bytes:
    """Bytes as they are; all that comes back until the connection ends."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=seconds) as plain:
        with contextlib.suppress(OSError):
            plain.sendall(data)
        made = b""
        with contextlib.suppress(ConnectionResetError):
            while part := plain.recv(4096):
                made += part
        return made


def read_request(plain: socket.socket) -> None:
    """All of a request: what is left unread at the end makes the system take back what was sent."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += plain.recv(1 << 16) or b"\r\n\r\n"
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"Content-Length: (\d+)", head)
    left = int(found[1]) - len(body) if found else 0
    while left > 0 and (part := plain.recv(left)):
        left -= len(part)


@contextlib.contextmanager
def impostor(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens and answers every request as it likes; its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(10)
    done = threading.Event()

    def serve():
        with contextlib.suppress(OSError):
            while not done.is_set():
                plain, _ = listening.accept()
                with plain, contextlib.suppress(OSError):
                    plain.settimeout(10)
                    read_request(plain)
                    answer(plain)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        done.set()
        listening.close()


def http_reply(body: bytes, *, length: object = None, code: int = 200, more: str = "") -> bytes:
    head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(body) if length is None else length}\r\n{more}\r\n"
    return head.encode() + body


def reset(plain: socket.socket) -> None:
    """End a connection as a machine that loses its power does: without a word."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    plain.close()


__all__ = [
    "HEADER", "SIZES", "TOKEN", "Header", "http_reply", "impostor", "is_free", "join", "open_client", "post",
    "prompt_of", "raw", "read_request", "replies", "reset", "served", "tiny_pair", "url_of", "wait_until",
]  # fmt: skip
