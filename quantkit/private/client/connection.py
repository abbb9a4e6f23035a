"""A host at the other end of a connection, which is trusted with features and with nothing else.

Whatever it sends is checked before it is used: that it is HTTP, how long it says it is, that all of it comes
in time, that its header answers what was asked and that its numbers are numbers. Every fault is one line.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.private.protocol import (
    HEADER,
    LONGEST_WORDS,
    NAMED_TYPES,
    PATH,
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

Floats = NDArray[np.float32]
CONNECT_SECONDS = 10.0
REPLY_SECONDS = 300.0  # a long prompt behind other clients' takes its time
CURES: dict[Status, str] = {
    Status.UNAUTHORIZED: "give the host's --token-file",
    Status.OTHER_MODEL: "give the client folder that was written along with this host",
    Status.NO_ROOM: "try again later, or raise --max-clients of the host",
    Status.CACHE_FULL: "shorten the prompt or ask for fewer new tokens, or raise --max-tokens of the host",
    Status.TOO_LARGE: "shorten the prompt, or raise --max-message-mb of the host",
}


@dataclass(kw_only=True, slots=True)
class RemoteHost:
    """One client's session with a host."""

    url: str
    address: str
    token: str
    width: int
    number_type: int
    sock: TimedSocket
    session: int = 0
    bytes_sent: int = 0  # payloads and their headers, without HTTP's
    bytes_received: int = 0
    reply_seconds: float = REPLY_SECONDS

    def advance(self, features_TI: Floats) -> Floats:
        """The next tokens' features through the host's blocks; the last one's come back, [1, width]."""
        kind = Kind.STEP if len(features_TI) == 1 else Kind.PREFILL
        header, payload = self._ask(kind, features_message(kind, self.session, features_TI, self.number_type))
        try:
            check_features(header, width=self.width, most_tokens=1)
            return read_features(header, payload)
        except ProtocolError as error:
            raise self._fault(f"its reply is wrong ({error})") from error

    def close(self) -> None:
        """Free the cache over there; a host that is gone has done so."""
        try:
            if self.session:
                self._ask(Kind.CLOSE, Header(kind=Kind.CLOSE, session=self.session).pack())
        except InputError:
            pass
        finally:
            self.session = 0
            self.sock.close()

    def _open(self, pair: bytes, capacity: int) -> None:
        header = Header(kind=Kind.OPEN, tokens=capacity, width=self.width, num_bytes=len(pair))
        answer, _ = self._ask(Kind.OPEN, header.pack() + pair)
        if not answer.session or answer.width != self.width:
            raise self._fault("its reply opens no session for this model")
        self.session = answer.session

    def _ask(self, kind: Kind, message: bytes) -> tuple[Header, bytes]:
        """Send, and read a reply of a sane length that answers it."""
        try:
            code, content = self._exchange(kind, message)
        except TimeoutError as error:
            raise self._fault("no reply in time") from error
        except http.client.RemoteDisconnected as error:
            raise self._fault("the connection failed (the host closed it)") from error
        except http.client.IncompleteRead as error:
            raise self._fault("its reply was cut off") from error
        except http.client.HTTPException as error:
            raise self._fault(f"its reply is not HTTP ({type(error).__name__})") from error
        except (OSError, UnicodeError) as error:
            raise _unreachable(self.url, error) from error
        try:
            header = read_header(content[: HEADER.size])
        except ProtocolError as error:
            raise self._fault(f"its reply is wrong ({error}; HTTP {code})") from error
        payload = content[HEADER.size :]
        if header.status != Status.OK or code != 200:
            raise self._refusal(header, payload, code)
        if header.num_bytes != len(payload):
            raise self._fault("its reply is wrong (header and length do not agree)")
        if header.kind != kind or (self.session and header.session != self.session):
            raise self._fault("its reply answers something else")
        return header, payload

    def _exchange(self, kind: Kind, message: bytes) -> tuple[int, bytes]:
        """(HTTP's code, the reply); one connection for all, since the session ends with it."""
        self.sock.allow(self.reply_seconds)
        lines = (
            f"POST {PATH}{kind.name.lower()} HTTP/1.1",
            f"Host: {self.address}",
            f"Authorization: Bearer {self.token}",
            "Content-Type: application/octet-stream",
            f"Content-Length: {len(message)}",
        )
        head = "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")
        # Head and message at once: in two packets, a token would wake the host twice.
        # A message that is refused before all of it was sent has its reply here already, which says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(head + message)
        self.bytes_sent += len(message)
        response = http.client.HTTPResponse(self.sock, method="POST")
        try:
            response.begin()
            return response.status, self._content(response)
        finally:
            response.close()

    def _content(self, response: http.client.HTTPResponse) -> bytes:
        """The reply, once its length is known to be sane."""
        largest = HEADER.size + max(4 * self.width, 4 * LONGEST_WORDS)
        length = response.getheader("Content-Length") or ""
        if not (length.isascii() and length.isdigit()) or response.getheader("Transfer-Encoding"):
            raise self._fault("its reply does not say how long it is")
        if len(length) > 15 or int(length) > largest:
            raise self._fault(f"its reply is too long ({length[:15]} bytes, where {largest} are the most)")
        content = response.read(int(length))
        if len(content) != int(length):
            raise http.client.IncompleteRead(content)
        self.bytes_received += len(content)
        return content

    def _refusal(self, header: Header, payload: bytes, code: int) -> InputError:
        """What the host says went wrong, if it says so in words that can be printed."""
        known = header.status in list(Status) and header.status != Status.OK
        words = payload[:LONGEST_WORDS].decode("ascii", "replace") if known else ""
        words = "".join(letter if letter.isprintable() and letter.isascii() else "?" for letter in words)
        cure = CURES.get(Status(header.status), "") if known else ""
        return self._fault(words or f"it answers with HTTP {code}", cure)

    def _fault(self, what: str, next_step: str = "") -> InputError:
        return InputError(what, where=f"--host {self.url}", next_step=next_step)


def connect(
    url: str,
    *,
    token: str,
    pair: str,
    width: int,
    capacity: int,
    features: str = "float32",
    reply_seconds: float = REPLY_SECONDS,
) -> RemoteHost:
    """A session with room for `capacity` tokens on the host that belongs to this client."""
    host, port = split_url(url)
    if features not in NAMED_TYPES:
        raise InputError(f"'{features}'", where="--features", allowed=", ".join(NAMED_TYPES))
    try:
        plain = socket.create_connection((host, port), timeout=min(CONNECT_SECONDS, reply_seconds))
    except OSError as error:
        raise _unreachable(url, error) from error
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    remote = RemoteHost(
        url=url,
        address=f"{host}:{port}",
        token=token,
        width=width,
        number_type=NAMED_TYPES[features],
        sock=timed(plain),
        reply_seconds=reply_seconds,
    )
    try:
        remote._open(bytes.fromhex(pair), capacity)
    except BaseException:
        remote.sock.close()
        raise
    return remote


def _unreachable(url: str, error: Exception) -> InputError:
    words = getattr(error, "strerror", None) or type(error).__name__
    return InputError(
        f"the connection failed ({words})",
        where=f"--host {url}",
        next_step="check that 'quantkit serve-host' runs there",
    )


def split_url(url: str) -> tuple[str, int]:
    """Host and port."""
    parts: Any = None
    port = None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        pass
    more = parts is None or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username
    if more or parts.scheme != "http" or not parts.hostname or not port:
        raise InputError(
            "not the address of a host",
            where=f"--host {url}",
            allowed="http://MACHINE:PORT; it is not encrypted, so beyond this machine take a tunnel",
        )
    return str(parts.hostname), int(port)
