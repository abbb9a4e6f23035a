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


_opened: dict[Callable[[Any], Any], tuple[str, Any]] = {}  # what this process has open, by its opener


def shared_in_memory(value: Any) -> Shared:
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return Shared(digest=hashlib.sha256(content).hexdigest(), content=content)


def shared_in_file(value: Any, folder: Path) -> Shared:
    shared = shared_in_memory(value)
    file = folder / shared.digest
    file.write_bytes(shared.content)
    return Shared(digest=shared.digest, file=file)


def opened(shared: Shared, opener: Callable[[Any], Any] = lambda value: value) -> Any:
    """What an opener makes of a shared value; each opener keeps the last one, since it may be a model."""
    known = _opened.get(opener)
    if known is None or known[0] != shared.digest:
        known = None
        _opened.pop(opener, None)  # room for the next before it is made
        _opened[opener] = (shared.digest, opener(shared.read()))
    return _opened[opener][1]
