"""Large pages under a model's weights, where Linux gives them to those who ask.

A decoded token reads every weight once; in pages of 4 KB that is tens of thousands of address translations,
and in pages of 2 MB a few dozen. Most distributions grant large pages only on request ("madvise"), and
onnxruntime does not request them, so it is done here for the memory that a loaded session holds: advice
that the system may ignore, and that changes no result. See docs/log.md for what it gained.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")
PAGE_BYTES = 2 << 20
SMALLEST_BYTES = 4 << 20  # regions below this hold no weights worth the call
HUGEPAGE, COLLAPSE = 14, 25  # madvise: from now on; and now, for what is there already (Linux 6.1)


def use_huge_pages() -> int:
    """Ask for large pages under this process's large anonymous regions; bytes that were granted at once."""
    if not sys.platform.startswith("linux") or not MAPS.exists():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    granted = 0
    for start, end in _large_regions(MAPS.read_text(encoding="ascii", errors="replace")):
        length = end - start
        if madvise(start, length, HUGEPAGE) == 0 and madvise(start, length, COLLAPSE) == 0:
            granted += length
    return granted


def _large_regions(maps: str) -> Iterator[tuple[int, int]]:
    """Writable private memory without a file behind it, cut to whole large pages."""
    for line in maps.splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or inode != "0" or (name and name[0].startswith("[stack")):
            continue
        first, last = (int(part, 16) for part in addresses.split("-"))
        start, end = -(-first // PAGE_BYTES) * PAGE_BYTES, last // PAGE_BYTES * PAGE_BYTES
        if end - start >= SMALLEST_BYTES:
            yield start, end
