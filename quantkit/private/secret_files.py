"""Files that only their owner may read: written so from the first moment, refused where others may too."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from quantkit.errors import InputError

OWNER_ONLY = 0o600
LARGEST_FILE = 4096
SHORTEST_TOKEN = 16


def write_secret(path: Path, text: str) -> None:
    """A new file that only its owner may read; one that is there is never written over."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", where=str(path)) from error
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(handle, OWNER_ONLY)  # whatever the process masks away or adds
        file.write(text)
        file.flush()
        os.fsync(handle)


def read_secret(path: Path, *, what: str, remedy: str) -> bytes:
    """What a secret file holds, up to a little more than any may; `what` it is and the `remedy` are told."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise InputError(f"the {what} cannot be read ({error.strerror})", where=str(path)) from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"others may read this {what} (mode {stat.S_IMODE(mode):04o})",
            where=str(path),
            allowed="mode 0600",
            next_step=f"chmod 600 {path}; if others have read it, {remedy}",
        )
    return content


def read_token(path: Path) -> str:
    """The token by which a client shows that it may use a host."""
    content = read_secret(path, what="token", remedy="make a new one")
    token = content.decode("ascii", "replace").strip()
    is_plain = token.isprintable() and token.isascii() and " " not in token
    if not is_plain or not SHORTEST_TOKEN <= len(token) < LARGEST_FILE:
        raise InputError(
            "not a token",
            where=str(path),
            allowed=f"one line of {SHORTEST_TOKEN} or more letters and digits",
            next_step="remove the file; 'quantkit serve-host' then makes a new one",
        )
    return token


def make_token(path: Path) -> str:
    """A new token in a new file."""
    token = secrets.token_urlsafe(32)
    write_secret(path, token + "\n")
    return token
