"""Secrets of private inference: the key of a protected model and the token of a host, in owner-only files.

A key is 32 random bytes, bound to one model by its fingerprint: the key of another model would go unnoticed,
because both sides would still agree, and a key in use for two models is lost twice. A key is in no repr,
error, report or pickle. Secret files are created with mode 0600, never overwritten, and refused when group or
others may access them.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.files import parse_json, require_regular
from quantkit.private.order import Order, keyed_order

FORMAT, VERSION = "quantkit-feature-key", 1
KEY_BYTES, FINGERPRINT_BYTES = 32, 32
OWNER_ONLY = 0o600
MAX_FILE_BYTES = 4096
MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    secret: bytes = field(repr=False)
    model: str  # fingerprint

    def order(self, space: str, width: int) -> Order:
        return keyed_order(self.secret, model=bytes.fromhex(self.model), space=space, width=width)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a key is not pickled")


def create_key(path: Path, model: str) -> Key:
    key = Key(secret=secrets.token_bytes(KEY_BYTES), model=model)
    document = {"format": FORMAT, "version": VERSION, "model": model, "key": key.secret.hex()}
    write_secret(path, json.dumps(document, indent=2) + "\n")
    return key


def open_key(path: Path, model: str) -> Key:
    """The key in a file, if it is for this model."""
    text = read_secret(path, what="key", remedy="make a new key and protect again")
    try:
        document = parse_json(text if len(text) <= MAX_FILE_BYTES else "", where=path)
    except InputError:
        document = {}
    damage = ""  # described without the file's content
    if document.get("format") != FORMAT:
        damage = "not a key file"
    elif document.get("version") != VERSION:
        damage = "a key file of a version that this quantkit does not read"
    elif not _is_hex(document.get("key"), KEY_BYTES) or not _is_hex(document.get("model"), FINGERPRINT_BYTES):
        damage = "its key or its model's fingerprint is damaged"
    if damage:
        raise InputError(
            damage,
            where=str(path),
            allowed="a file that 'quantkit protect' made",
            next_step="restore it from a copy, or protect again with a new key",
        )
    if not hmac.compare_digest(document["model"], model):
        raise InputError(
            "the key is for another model",
            where=str(path),
            allowed=f"a key for the model with the fingerprint {model[:16]}; this one is for "
            f"{document['model'][:16]}",
            next_step="give that model, or another --key FILE, which is made if it does not exist",
        )
    return Key(secret=bytes.fromhex(document["key"]), model=model)


def _is_hex(value: object, num_bytes: int) -> bool:
    try:
        return isinstance(value, str) and len(bytes.fromhex(value)) == num_bytes
    except ValueError:
        return False


def make_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    write_secret(path, token + "\n")
    return token


def read_token(path: Path) -> str:
    content = read_secret(path, what="token", remedy="make a new one")
    token = content.decode("ascii", "replace").strip()
    is_plain = token.isprintable() and token.isascii() and " " not in token
    if not is_plain or not MIN_TOKEN_LENGTH <= len(token) < MAX_FILE_BYTES:
        raise InputError(
            "not a token",
            where=str(path),
            allowed=f"one line of {MIN_TOKEN_LENGTH} or more letters and digits",
            next_step="remove the file; 'quantkit serve-host' then makes a new one",
        )
    return token


def write_secret(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", where=str(path)) from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, OWNER_ONLY)  # independent of the umask
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def read_secret(path: Path, *, what: str, remedy: str) -> bytes:
    """Up to MAX_FILE_BYTES + 1 bytes of a secret file; `what` and `remedy` are for the error message."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1)
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
