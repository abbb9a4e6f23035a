"""WebSocket server of a host: authenticated, with limits on everything, and without logs.

One thread and one session per connection: the KV cache is freed when the connection ends, for whatever
reason. The token is checked before a WebSocket is opened. Refusals are a few words, never a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from quantkit.errors import InputError
from quantkit.private.host.model import Host, HostSession
from quantkit.private.protocol import (
    PATH,
    SILENT,
    VERSION,
    Message,
    ProtocolError,
    Status,
    features_message,
    features_of,
    fields_message,
    missing_library,
    read_message,
    refusal_message,
)

try:
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request, Response
    from websockets.sync.server import Server, ServerConnection
    from websockets.sync.server import serve as websocket_server
except ImportError as error:
    raise missing_library() from error

SPARE_CONNECTIONS = 8  # beyond one per client, so that a surplus client gets a refusal with a reason
MAX_STRANGERS = 64  # connections that have shown no token; the oldest of the busiest address gives way
CLOSE_SECONDS = 1.0  # for the peer's part of the closing handshake
OPENING_FIELDS = ("version", "pair", "width", "capacity")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    message_bytes: int = 64 << 20
    idle_seconds: float = 300.0  # from a reply to the end of the next message, and for sending a reply
    handshake_seconds: float = 10.0  # for the HTTP request with the token, and then for the opening


def listen(address: tuple[str, int], host: Host, token: str, limits: Limits) -> Server:
    """A bound server; an unavailable port is the caller's wrong input."""
    credentials = b"Bearer " + token.encode()
    max_connections = host.max_sessions + SPARE_CONNECTIONS
    strangers: list[socket.socket] = []  # without a token so far, the oldest first
    clients: list[socket.socket] = []
    lock = threading.Lock()

    def admit(peer: socket.socket, *arguments: Any, **options: Any) -> ServerConnection:
        with lock:
            strangers[:] = [other for other in strangers if other.fileno() >= 0]
            if len(strangers) >= MAX_STRANGERS:
                oldest = busiest(strangers)
                strangers.remove(oldest)
                with contextlib.suppress(OSError):  # it ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then closes it
            strangers.append(peer)
        peer.settimeout(limits.idle_seconds)  # for sending: a peer that reads nothing loses its connection
        return ServerConnection(peer, *arguments, **options)

    def authenticate(connection: ServerConnection, request: Request) -> Response | None:
        headers = request.headers.get_all("Authorization")
        given = headers[0].encode("utf-8", "surrogateescape") if len(headers) == 1 else b""
        if not hmac.compare_digest(given, credentials):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "wrong token")
        if request.path != PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, f"the only path is {PATH}")
        with lock:
            clients[:] = [other for other in clients if other.fileno() >= 0]
            if connection.socket not in strangers or len(clients) >= max_connections:
                return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
            strangers.remove(connection.socket)
            clients.append(connection.socket)
        return None

    try:
        return websocket_server(
            partial(converse, host=host, limits=limits),
            *address,
            process_request=authenticate,
            create_connection=admit,  # type: ignore[arg-type]
            compression=None,
            server_header="quantkit",
            open_timeout=limits.handshake_seconds,
            ping_interval=None,  # idle_seconds bounds a silent peer, whether it lives or not
            close_timeout=CLOSE_SECONDS,
            max_size=limits.message_bytes,
            max_queue=1,
            logger=SILENT,
        )
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise InputError(
            "the port is taken" if taken else f"cannot listen there ({error})",
            where=f"{address[0]}:{address[1]}",
            allowed="a free port of this machine, or 0 for any",
            next_step="choose another --port",
        ) from error


def busiest(sockets: list[socket.socket]) -> socket.socket:
    """The first socket of the address that has the most."""
    counts = Counter(map(address_of, sockets))
    return max(sockets, key=lambda peer: counts[address_of(peer)])


def address_of(peer: socket.socket) -> str:
    try:
        return str(peer.getpeername()[0])
    except OSError:  # it has ended
        return ""


def converse(connection: ServerConnection, *, host: Host, limits: Limits) -> None:
    """Answers one client's messages until the connection ends or stays idle for too long."""
    session: HostSession | None = None
    try:
        while True:
            waits = limits.idle_seconds if session else min(limits.idle_seconds, limits.handshake_seconds)
            data = connection.recv(timeout=waits)
            try:
                message = read_message(data)
                if session is None:
                    session, reply = open_session(host, message)
                else:
                    features_TI = features_of(message, width=host.width, max_tokens=host.max_tokens)
                    reply = features_message(session.advance(features_TI), features_TI.dtype)
            except ProtocolError as error:
                reply = refusal_message(error)
            except Exception as error:  # of the runtime, whose words may show features
                print(f"quantkit: a request failed with {type(error).__name__}", file=sys.stderr)
                reply = refusal_message(ProtocolError(Status.FAILED, "the host failed"))
            connection.send(reply)
    except (TimeoutError, ConnectionClosed):
        pass
    finally:
        if session is not None:
            session.close()


def open_session(host: Host, message: Message) -> tuple[HostSession, bytes]:
    """(session, reply) for the first message of a connection."""
    fields = message.fields
    if set(fields) != set(OPENING_FIELDS) or message.tensors:
        raise ProtocolError(Status.BAD_MESSAGE, f"the opening has the fields {', '.join(OPENING_FIELDS)}")
    if fields["version"] != VERSION:
        raise ProtocolError(Status.BAD_MESSAGE, f"another version of the protocol; this is {VERSION}")
    if not hmac.compare_digest(fields["pair"].encode(), host.pair.encode()):
        raise ProtocolError(Status.OTHER_MODEL, "this host belongs to another client")
    if fields["width"] != str(host.width):
        raise ProtocolError(Status.OTHER_MODEL, "features of another width")
    capacity = fields["capacity"]
    if not (capacity.isascii() and capacity.isdigit() and len(capacity) < 20):
        raise ProtocolError(Status.BAD_MESSAGE, "a capacity that is no number")
    return host.open(int(capacity)), fields_message(fields)


def serve(server: Server, announce: Callable[[str, int], None]) -> None:
    """Serves until an exception (Ctrl-C, SIGTERM) ends it; connections are then closed."""
    with server:
        announce(*server.socket.getsockname()[:2])
        server.serve_forever()
