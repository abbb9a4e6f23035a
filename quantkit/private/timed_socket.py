"""A socket with one deadline for a whole message.

An ordinary timeout starts again with every byte, so that a peer who sends one byte now and then holds a
connection for ever. This one says until when all must have come, however it comes.
"""

from __future__ import annotations

import socket
import time
from typing import Any


class TimedSocket(socket.socket):
    """Reads and writes up to `deadline`, in seconds of the monotonic clock; then they raise TimeoutError."""

    deadline: float | None = None

    def allow(self, seconds: float) -> None:
        """Time for all that is read and written from now on."""
        self.deadline = time.monotonic() + seconds

    def _set_time_left(self) -> None:
        if self.deadline is None:
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        """Some bytes."""
        self._set_time_left()
        return super().recv_into(*arguments, **options)

    def send(self, *arguments: Any) -> int:
        """Some bytes."""
        self._set_time_left()
        return super().send(*arguments)

    def sendall(self, *arguments: Any) -> None:
        """All bytes."""
        self._set_time_left()
        super().sendall(*arguments)


def timed(plain: socket.socket) -> TimedSocket:
    """The same connection, with a deadline to come."""
    return TimedSocket(fileno=plain.detach())
