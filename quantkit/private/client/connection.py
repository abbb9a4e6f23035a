"""Client's connection to a host, which gets features and no other trust.

Every reply is bounded in size and time and checked before use. Every fault is one line.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError, not_one_of
from quantkit.private.protocol import (
    DTYPES,
    MAX_WORDS,
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
)

try:
    from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
    from websockets.frames import CloseCode
    from websockets.sync.client import ClientConnection
    from websockets.sync.client import connect as websocket_connect
except ImportError as error:
    raise missing_library() from error

CONNECT_SECONDS = 10.0
REPLY_SECONDS = 300.0  # a long prompt may wait for other clients' prompts
CLOSE_SECONDS = 1.0  # for the host's part of the closing handshake
FIELDS_BYTES = 4096  # of a reply beside its features; all of a refusal
IS_RUNNING = "check that 'quantkit serve-host' runs there"
TOO_LARGE = "shorten the prompt, or raise --max-message-mb of the host"
NEXT_STEPS: dict[str, str] = {
    Status.OTHER_MODEL: "give the client folder that was written along with this host",
    Status.NO_ROOM: "try again later, or raise --max-clients of the host",
    Status.CACHE_FULL: "shorten the prompt or ask for fewer new tokens, or raise --max-tokens of the host",
}


@dataclass(kw_only=True, slots=True)
class RemoteHost:
    """One session with a host."""

    url: str
    width: int
    dtype: Any  # of the features in messages
    connection: ClientConnection
    reply_seconds: float
    bytes_sent: int = 0  # of messages, without WebSocket's frames
    bytes_received: int = 0

    def advance(self, features_TI: NDArray[np.float32]) -> NDArray[np.float32]:
        """Runs the host's blocks on the next tokens' features; features of the last token, [1, width]."""
        with one_line_errors(self.url):
            reply = self.exchange(features_message(features_TI, self.dtype))
            return features_of(reply, width=self.width, max_tokens=1).astype(np.float32)

    def exchange(self, message: bytes) -> Message:
        """The reply to a message; a refusal is raised."""
        self.connection.send(message)
        self.bytes_sent += len(message)
        data = self.connection.recv(timeout=self.reply_seconds)
        self.bytes_received += len(data)
        reply = read_message(data)
        if "status" in reply.fields:
            words = reply.fields.get("words", "")[:MAX_WORDS] or "it refuses without a reason"
            words = "".join(letter if letter.isprintable() and letter.isascii() else "?" for letter in words)
            raise fault(self.url, words, NEXT_STEPS.get(reply.fields["status"], ""))
        return reply

    def close(self) -> None:
        """Ends the session; the host then frees the cache."""
        self.connection.close()


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
    address = split_url(url)
    if features not in DTYPES:
        raise not_one_of(features, DTYPES, where="--features")
    with ExitStack() as stack, one_line_errors(url):
        sock = stack.enter_context(socket.create_connection(address, min(CONNECT_SECONDS, reply_seconds)))
        sock.settimeout(reply_seconds)  # for sending: a host that reads nothing is given up
        connection = websocket_connect(
            f"{url.strip('/').replace('http', 'ws', 1)}{PATH}",
            sock=sock,
            proxy=None,
            compression=None,
            additional_headers={"Authorization": f"Bearer {token}"},
            open_timeout=reply_seconds,
            ping_interval=None,
            close_timeout=CLOSE_SECONDS,
            max_size=4 * width + FIELDS_BYTES,
            max_queue=1,
            logger=SILENT,
        )
        remote = RemoteHost(
            url=url,
            width=width,
            dtype=DTYPES[features],
            connection=stack.enter_context(connection),
            reply_seconds=reply_seconds,
        )
        opening = {"version": VERSION, "pair": pair, "width": str(width), "capacity": str(capacity)}
        reply = remote.exchange(fields_message(opening))
        if reply.fields != opening or reply.tensors:
            raise fault(url, "its reply opens no session for this model")
        stack.pop_all()
    return remote


@contextmanager
def one_line_errors(url: str) -> Iterator[None]:
    """Turns every fault of a host or a connection into an InputError."""
    try:
        yield
    except InputError:
        raise
    except ProtocolError as error:
        raise fault(url, f"its reply is wrong ({error})") from error
    except InvalidStatus as error:
        if error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise fault(url, "wrong token", "give the host's --token-file") from error
        raise fault(url, f"it answers with HTTP {error.response.status_code}") from error
    except ConnectionClosed as error:
        if error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG:
            raise fault(url, "the prompt is too large for the host", TOO_LARGE) from error
        if error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
            raise fault(url, "its reply is too long") from error
        raise fault(url, "the connection failed (the host closed it)", IS_RUNNING) from error
    except TimeoutError as error:
        raise fault(url, "no reply in time") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise fault(url, f"the connection failed ({reason})", IS_RUNNING) from error
    except (WebSocketException, ValueError) as error:  # ValueError: a redirect
        raise fault(url, f"its reply opens no WebSocket ({type(error).__name__})") from error


def fault(url: str, what: str, next_step: str = "") -> InputError:
    return InputError(what, where=f"--host {url}", next_step=next_step)


def split_url(url: str) -> tuple[str, int]:
    """(host, port)"""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        is_plain = parts.scheme == "http" and not (
            parts.path.strip("/") or parts.query or parts.fragment or parts.username
        )
    except ValueError:
        is_plain, host, port = False, None, None
    if not (is_plain and host and port):
        raise InputError(
            "not the address of a host",
            where=f"--host {url}",
            allowed="http://MACHINE:PORT; it is not encrypted, so beyond this machine take a tunnel",
        )
    return host, port
