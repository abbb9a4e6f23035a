"""Large pages under a model's weights, requested from Linux.

A decoded token reads every weight once; in pages of 4 KB that is tens of thousands of address translations,
and in pages of 2 MB a few dozen. Most distributions grant large pages only on request ("madvise"), and
onnxruntime does not request them. So while a session loads, mallopt puts large allocations side by side, and
afterwards large pages are requested under them. Both are advice that a system may ignore and that changes no
result; docs/log.md has the gain.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")
PAGE_BYTES = 2 << 20
HUGEPAGE, COLLAPSE = 14, 25  # madvise: from now on; and at once, for present memory (Linux 6.1)
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt: free memory kept; size from which on to use own regions
SIDE_BY_SIDE = 1 << 30
# Where the library's own rule ends up after a few large allocations. Setting one of the two ends that rule,
# and a low limit of kept memory would then give back and fetch again the same pages in each run.
USUAL_THRESHOLD, USUAL_TRIM = 32 << 20, 64 << 20


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Large pages under the memory that the block allocates and keeps."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
    if library is None or not hasattr(library, "mallopt"):  # another system, or another C library
        yield
        return
    library.mallopt(MMAP_THRESHOLD, SIDE_BY_SIDE)
    try:
        yield
    finally:
        library.mallopt(MMAP_THRESHOLD, USUAL_THRESHOLD)
        library.mallopt(TRIM_THRESHOLD, USUAL_TRIM)
    madvise = library.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in large_regions(MAPS.read_text(encoding="ascii", errors="replace")):
        if madvise(start, end - start, HUGEPAGE) == 0:
            for page in range(start, end, PAGE_BYTES):  # the first failure would end one call for all
                madvise(page, PAGE_BYTES, COLLAPSE)


def large_regions(maps: str) -> Iterator[tuple[int, int]]:
    """Writable private memory without a file behind it, cut to whole large pages."""
    for line in maps.splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or inode != "0" or (name and name[0].startswith("[stack")):
            continue
        first, last = (int(part, 16) for part in addresses.split("-"))
        start, end = -(-first // PAGE_BYTES) * PAGE_BYTES, last // PAGE_BYTES * PAGE_BYTES
        if end > start:
            yield start, end
