"""A host's blocks over HTTP: authenticated, bounded in everything, and silent about what it is sent.

A session belongs to the connection that opened it: when that ends, however it ends, the cache is free.
Lengths are checked before anything is read, each message has one deadline, and a connection that neither
speaks nor ends is closed. What goes wrong is told in a few words and a number, never in a traceback.
"""

from __future__ import annotations

import errno
import hmac
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quantkit.errors import InputError
from quantkit.private.host.model import Host
from quantkit.private.protocol import (
    HEADER,
    HTTP_CODES,
    PAIR_BYTES,
    ROUTES,
    Header,
    Kind,
    ProtocolError,
    Status,
    check_features,
    features_message,
    read_features,
    read_header,
)
from quantkit.private.timed_socket import TimedSocket, timed

SPARE_CONNECTIONS = 8  # beyond one for each client, so that one too many is told so
DISCARDED_BYTES = 1 << 20  # of a message that is refused unread, so that its sender reads the reply
DISCARD_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a client may take."""

    message_bytes: int = 64 << 20
    message_seconds: float = 30.0  # from the first byte of a message to its last, and for a reply
    idle_seconds: float = 300.0  # between two messages


class HostServer(ThreadingHTTPServer):
    """One thread for each connection, and a bound on connections."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], host: Host, token: str, limits: Limits) -> None:
        """Bind; a port that is taken is the caller's wrong input."""
        self.host, self.token, self.limits = host, token.encode(), limits
        self.places = threading.BoundedSemaphore(host.most_sessions + SPARE_CONNECTIONS)
        try:
            super().__init__(address, _Handler)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise InputError(
                "the port is taken" if taken else f"cannot listen there ({error})",
                where=f"{address[0]}:{address[1]}",
                allowed="a free port of this machine, or 0 for any",
                next_step="choose another --port",
            ) from error

    def server_bind(self) -> None:
        """Bind without asking a name server who this is."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[TimedSocket, Any]:
        """A connection whose reads and writes have deadlines."""
        plain, address = super().get_request()
        return timed(plain), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for it, if there is a place; else it is closed."""
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it, and give the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The kind of a mistake and nothing else: a traceback could show what was sent."""
        print(f"quantkit: a connection ended with {type(sys.exception()).__name__}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "quantkit", ""
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: HostServer
    connection: TimedSocket

    def handle(self) -> None:
        self.sessions: set[int] = set()
        self.is_known = False  # whether it has shown the token
        try:
            super().handle()
        finally:
            for session in self.sessions:
                self.server.host.close(session)

    def handle_one_request(self) -> None:
        limits = self.server.limits
        self.close_connection = True  # unless a request says otherwise
        try:
            self.connection.allow(limits.idle_seconds if self.is_known else limits.message_seconds)
            if not self.rfile.peek(1):  # type: ignore[attr-defined]
                return
            self.connection.allow(limits.message_seconds)
            super().handle_one_request()
        except OSError:  # gone, or too slow: its caches are freed on the way out
            self.close_connection = True

    def do_POST(self) -> None:
        unread = _length_of(self.headers.get_all("Content-Length") or [])
        try:
            self.require_token()
            header, payload = self.read_message(unread)
            unread = 0
            reply = self.answer(header, payload)
        except ProtocolError as error:
            self.refuse(error, unread)
            return
        except OSError:
            raise
        except Exception as error:  # of the runtime; its words may show what was sent
            print(f"quantkit: {self.command} failed with {type(error).__name__}", file=sys.stderr)
            self.refuse(ProtocolError(Status.FAILED, "the host failed"), unread)
            return
        self.reply(200, reply)

    def require_token(self) -> None:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.token):
            raise ProtocolError(Status.UNAUTHORIZED, "wrong token")
        self.is_known = True

    def read_message(self, length: int) -> tuple[Header, bytes]:
        """The message, after its lengths were found right."""
        kind = ROUTES.get(self.path)
        if kind is None:
            raise ProtocolError(Status.BAD_MESSAGE, f"no such place; there are {', '.join(ROUTES)}")
        if length < HEADER.size or "Transfer-Encoding" in self.headers:
            raise ProtocolError(Status.BAD_MESSAGE, f"Content-Length must be given, {HEADER.size} or more")
        if length > self.server.limits.message_bytes:
            raise ProtocolError(
                Status.TOO_LARGE, f"{length} bytes; allowed are {self.server.limits.message_bytes}"
            )
        header = read_header(self.rfile.read(HEADER.size))
        if header.kind != kind or header.status != Status.OK:
            raise ProtocolError(Status.BAD_MESSAGE, "the header does not belong to this place")
        if header.num_bytes != length - HEADER.size:
            raise ProtocolError(Status.BAD_MESSAGE, "header and Content-Length do not agree")
        host = self.server.host
        if kind in (Kind.PREFILL, Kind.STEP):
            most = host.most_tokens if kind is Kind.PREFILL else 1
            check_features(header, width=host.width, most_tokens=most)
        elif header.num_bytes != (PAIR_BYTES if kind is Kind.OPEN else 0):
            raise ProtocolError(Status.BAD_MESSAGE, "a payload of the wrong size")
        payload = self.rfile.read(header.num_bytes)
        if len(payload) != header.num_bytes:
            raise ConnectionError("cut off")
        return header, payload

    def answer(self, header: Header, payload: bytes) -> bytes:
        host = self.server.host
        if header.kind == Kind.OPEN:
            if not hmac.compare_digest(payload, host.pair):
                raise ProtocolError(Status.OTHER_MODEL, "this host belongs to another client")
            if header.width != host.width:
                raise ProtocolError(Status.OTHER_MODEL, "features of another width")
            session = host.open(header.tokens)
            self.sessions.add(session)
            return Header(kind=Kind.OPEN, session=session, tokens=header.tokens, width=host.width).pack()
        if header.session not in self.sessions:  # another connection's number opens nothing here
            raise ProtocolError(Status.NO_SESSION, "no such session on this connection")
        if header.kind == Kind.CLOSE:
            self.sessions.discard(header.session)
            host.close(header.session)
            return Header(kind=Kind.CLOSE, session=header.session).pack()
        made_TI = host.advance(header.session, read_features(header, payload))
        self.connection.allow(self.server.limits.message_seconds)  # to write; a turn takes what it takes
        return features_message(Kind(header.kind), header.session, made_TI, header.number_type)

    def reply(self, code: int, message: bytes) -> None:
        self.connection.allow(self.server.limits.message_seconds)
        self.send_response_only(code)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(message)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(message)
        self.wfile.flush()

    def refuse(self, error: ProtocolError, unread: int = 0) -> None:
        """Say why in a few words; where a message was left unread, the connection ends."""
        if unread or error.status is Status.UNAUTHORIZED:
            self.close_connection = True
        words = error.words.encode()
        header = Header(kind=0, status=error.status, num_bytes=len(words))
        self.reply(HTTP_CODES[error.status], header.pack() + words)
        if unread:
            self.discard(unread)

    def discard(self, unread: int) -> None:
        """Read on for a moment: closed at once, the system would throw the reply away with the rest."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.allow(DISCARD_SECONDS)
        left = min(unread, DISCARDED_BYTES)
        while left > 0 and (part := self.rfile.read1(min(left, 1 << 16))):
            left -= len(part)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request of this protocol: the standard page would repeat what was sent."""
        self.close_connection = True
        if not hasattr(self, "request_version") or self.request_version == "HTTP/0.9":
            self.request_version = "HTTP/1.1"
        words = b"not a request of this protocol"
        header = Header(kind=0, status=Status.BAD_MESSAGE, num_bytes=len(words))
        self.reply(code, header.pack() + words)

    def log_message(self, *_: Any) -> None:
        """Nothing: who asked what and when is nobody's business."""


def _length_of(given: list[str]) -> int:
    """A Content-Length; -1 for what is none, or for two of them."""
    text = given[0] if len(given) == 1 else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def serve(server: HostServer, announce: Callable[[str, int], None]) -> None:
    """Serve until the process is told to stop."""
    announce(str(server.server_address[0]), server.server_port)
    try:
        server.serve_forever(poll_interval=0.2)
    finally:
        server.server_close()
