"""Values that many tasks share: sent once, opened once in each worker."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A pickled value, in a file or in memory."""

    digest: str
    file: Path | None = None
    content: bytes = b""

    def read(self) -> Any:
        return pickle.loads(self.file.read_bytes() if self.file else self.content)


_opened: dict[tuple[str, Callable[[Any], Any]], Any] = {}  # what this process has open


def shared_in_memory(value: Any) -> Shared:
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return Shared(digest=hashlib.sha256(content).hexdigest(), content=content)


def shared_in_file(value: Any, folder: Path) -> Shared:
    shared = shared_in_memory(value)
    file = folder / shared.digest
    file.write_bytes(shared.content)
    return Shared(digest=shared.digest, file=file)


def as_it_is(value: Any) -> Any:
    return value


def opened(shared: Shared, opener: Callable[[Any], Any] = as_it_is) -> Any:
    """What an opener makes of a shared value; the last one alone is kept, since it may be a model."""
    place = (shared.digest, opener)
    if place not in _opened:
        _opened.clear()  # room for the next before it is made
        _opened[place] = opener(shared.read())
    return _opened[place]
