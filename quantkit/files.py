"""Files that others wrote: the boundary at which their bytes become text and JSON.

Only a regular file is opened, because a FIFO blocks and a device never ends, and only up to a size. A fault
while a content is read or taken apart is a fault of the file: an `InputError` that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import InputError

MAX_TEXT_BYTES = 64 << 20  # a tokenizer takes some forty times the bytes of a text
MAX_JSON_BYTES = 32 << 20  # the largest index of a published checkpoint has about 15 MB
MAX_DEPTH = 64  # of lists and objects in each other; published files have 10
COPY_AGAIN = "copy the file again, or make it again"
Value = TypeVar("Value")


@contextmanager
def reading(
    where: str | Path, fault: str = "is damaged", *, allowed: str = "", next_step: str = COPY_AGAIN
) -> Iterator[None]:
    """Turn every error of a reader or parser into an `InputError` about the file."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        raise InputError(reason, where=str(where), allowed=allowed, next_step=next_step) from error
    except Exception as error:  # parsers of several libraries, whose exceptions share no base class
        reason = f"{fault} ({type(error).__name__}: {error})"
        raise InputError(reason, where=str(where), allowed=allowed, next_step=next_step) from error


def require_regular(path: Path) -> None:
    """Refuse a folder, a FIFO, a socket and a device; an absent file is left to its reader."""
    if path.exists() and not path.is_file():
        raise InputError(
            "cannot be read (not a regular file)", where=str(path), allowed="a regular file, or a link to one"
        )


def read_bytes(path: Path, max_bytes: int, *, allowed: str = "", next_step: str = COPY_AGAIN) -> bytes:
    with reading(path, allowed=allowed, next_step=next_step):
        require_regular(path)
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError("the file is too large", where=str(path), allowed=f"up to {max_bytes:,} bytes")
    return content


def read_text(
    path: Path, max_bytes: int = MAX_TEXT_BYTES, *, allowed: str = "", next_step: str = COPY_AGAIN
) -> str:
    content = read_bytes(path, max_bytes, allowed=allowed, next_step=next_step)
    with reading(path, "cannot be read as UTF-8", allowed=allowed, next_step=next_step):
        return content.decode("utf-8-sig").replace("\r\n", "\n")


def read_json(path: Path, *, allowed: str = "", next_step: str = COPY_AGAIN) -> dict[str, Any]:
    """The object in a JSON file."""
    text = read_text(path, MAX_JSON_BYTES, allowed=allowed, next_step=next_step)
    return parse_json(text, where=path, allowed=allowed, next_step=next_step)


def parse_json(
    text: str | bytes, *, where: str | Path, allowed: str = "", next_step: str = COPY_AGAIN
) -> dict[str, Any]:
    """The object in a JSON text."""
    with reading(where, "not JSON", allowed=allowed, next_step=next_step):
        document = json.loads(text)
        if not isinstance(document, dict):
            raise TypeError(f"it holds {type(document).__name__} and not an object")
        require_shallow(document)
        if "\\ud" in str(text).lower():  # halves of a character cannot be printed or written
            json.dumps(document, ensure_ascii=False).encode()
    return document


def require_shallow(document: object) -> None:
    """Refuse lists and mappings that are nested so deeply that later recursion would fail."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"more than {MAX_DEPTH} lists and objects in each other")


def expect(document: dict[str, Any], key: str, kind: type[Value], *, where: str | Path) -> Value | None:
    """The value of a key, checked for its type; None where it is null or absent."""
    value = document.get(key)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise InputError(f"'{key}' is {value!r}", where=str(where), allowed=f"a value of type {kind.__name__}")
