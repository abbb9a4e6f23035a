"""What tests of a serving host share: one tiny model, served in this process, and hosts that misbehave."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from exporting import build_tiny
from protecting import Pair, split
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as websocket_server

from quantkit.model.families import FAMILIES
from quantkit.private.client.connection import RemoteHost, connect
from quantkit.private.client.model import Client
from quantkit.private.host.model import Host, open_host
from quantkit.private.host.server import Limits, listen
from quantkit.private.protocol import PATH, SILENT

TOKEN = "a-token-of-some-length"
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 97}
UPGRADE = {
    "Host": "test",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
}


@dataclass(frozen=True)
class Served:
    host: Host
    port: int


def tiny_pair(folder: Path) -> Pair:
    build_tiny("LlamaForCausalLM", {**FAMILIES["llama"].tiny, **SIZES}).save_pretrained(folder / "model")
    return split(folder / "model", folder)


@contextlib.contextmanager
def running(server) -> Iterator[int]:
    """Serves in a thread of this process; its port."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.socket.getsockname()[1]
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def served(folder: Path, *, limits: Limits | None = None, **options) -> Iterator[Served]:
    host = open_host(folder, threads=1, **options)
    with running(listen(("127.0.0.1", 0), host, TOKEN, limits or Limits())) as port:
        yield Served(host=host, port=port)


def join(server: Served, client: Client, *, token=TOKEN, capacity=40, **options) -> RemoteHost:
    return connect(
        f"http://127.0.0.1:{server.port}",
        token=token,
        pair=options.pop("pair", client.manifest.pair),
        width=client.manifest.width,
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
    """Every reply to a prompt and to its greedy continuation, bit for bit."""
    features, position = [session.advance(client.embed(ids, 0))], len(ids)
    for _ in range(steps):
        token = client.logits(features[-1][None])[0, -1:].argmax(-1)
        features.append(session.advance(client.embed(token, position)))
        position += 1
    return [reply.tobytes() for reply in features]


def opening_of(client: Client, **changes) -> dict[str, str]:
    manifest = client.manifest
    fields = {"version": "2", "pair": manifest.pair, "width": str(manifest.width), "capacity": "20"}
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def request(path: str = PATH, **headers: str | None) -> bytes:
    """An HTTP request that opens a WebSocket, with any headers changed."""
    lines = {**UPGRADE, "Authorization": f"Bearer {TOKEN}", **headers}
    head = [
        f"GET {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in lines.items() if value is not None),
    ]
    return "\r\n".join([*head, "", ""]).encode()


def frame(message: bytes, *, length: int | None = None) -> bytes:
    """A client's frame with a mask of zeros, which changes nothing."""
    return struct.pack(">BBQI", 0x82, 0xFF, len(message) if length is None else length, 0) + message


@contextlib.contextmanager
def plain_client(server: Served) -> Iterator[socket.socket]:
    """A socket on which a WebSocket was opened; whatever follows is the caller's."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
        plain.sendall(request())
        assert read_head(plain).startswith(b"HTTP/1.1 101 ")
        yield plain


def read_head(plain: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head and (part := plain.recv(1 << 12)):
        head += part
    return head


def raw(server: Served, data: bytes, *, seconds: float = 5.0) -> bytes:
    """Sends bytes as they are; all that comes back until the connection ends."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as plain:
        with contextlib.suppress(OSError):
            plain.sendall(data)
        reply = b""
        with contextlib.suppress(ConnectionResetError):
            while part := plain.recv(4096):
                reply += part
        return reply


def code_of(reply: bytes) -> int:
    match = re.match(rb"HTTP/1.1 (\d+) ", reply)
    return int(match[1]) if match else 0


@contextlib.contextmanager
def impostor(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A listener that answers a client's HTTP request as it likes; its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(10)
    done = threading.Event()

    def serve():
        with contextlib.suppress(OSError):
            while not done.is_set():
                plain, _ = listening.accept()
                with plain, contextlib.suppress(OSError):
                    plain.settimeout(10)
                    read_head(plain)
                    answer(plain)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        done.set()
        listening.close()


@contextlib.contextmanager
def lying_host(*answers: Callable[[ServerConnection], None]) -> Iterator[str]:
    """A WebSocket server that answers a connection's messages one after the other by these; its address."""

    def handler(connection: ServerConnection) -> None:
        for answer in answers:
            connection.recv()
            answer(connection)

    server = websocket_server(
        handler, "127.0.0.1", 0, compression=None, max_size=None, close_timeout=0.2, logger=SILENT
    )
    with running(server) as port:
        yield f"http://127.0.0.1:{port}"


def http_reply(body: bytes, *, length: object = None, code: int = 200, more: str = "") -> bytes:
    head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(body) if length is None else length}\r\n{more}\r\n"
    return head.encode() + body


def reset(plain: socket.socket) -> None:
    """Ends a connection as a machine that loses its power does: without a word."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    plain.close()
