"""Large pages: the right regions are found, and results and the process stay as they were."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from quantkit.runtime.huge_pages import PAGE_BYTES, huge_pages, large_regions

pytestmark = pytest.mark.once
MAPS = """\
00400000-00800000 r-xp 00000000 08:01 1234 /usr/bin/python3
00a00000-01500000 rw-p 00000000 00:00 0 [heap]
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
7f0000a00000-7f0000b00000 rw-p 00000000 00:00 0
7f0001000000-7f0002000000 rw-p 00000000 08:01 99 /data/weights.safetensors
7f0003000000-7f0004000000 r--p 00000000 00:00 0
7ffc00000000-7ffc01000000 rw-p 00000000 00:00 0 [stack]
"""


def test_only_whole_pages_of_private_anonymous_memory():
    assert list(large_regions(MAPS)) == [(0xA00000, 0x1400000), (0x7F0000200000, 0x7F0000800000)]
    assert all(start % PAGE_BYTES == end % PAGE_BYTES == 0 for start, end in large_regions(MAPS))


def test_values_survive():
    with huge_pages():
        kept = [np.arange(1 << 18, dtype=np.float64) + number for number in range(8)]
    for number, array in enumerate(kept):
        assert array[0] == number
        assert array[-1] == (1 << 18) - 1 + number


def test_an_error_inside_passes_through():
    with pytest.raises(ValueError, match="no"), huge_pages():
        raise ValueError("no")


# In a process of its own: another test's memory would blur what is counted.
CHILD = """
import mmap, sys
from pathlib import Path
from quantkit.runtime.huge_pages import huge_pages

def huge_kb():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

size = 64 << 20
before = huge_kb()
asked = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
asked.madvise(mmap.MADV_HUGEPAGE)
for page in range(0, size, 4096):
    asked[page] = 1
directly = huge_kb() - before
with huge_pages():
    kept = [bytearray(b"x") * (1 << 20) for _ in range(64)]
print(directly, huge_kb() - before - directly)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="large pages are asked for on Linux only")
def test_many_small_allocations_get_what_one_large_one_gets():
    """64 pieces of 1 MB, none of which could hold a large page alone, beside 64 MB asked for directly."""
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    directly, inside = map(int, ran.stdout.split())
    if directly < 32 << 10:
        pytest.skip(f"this system granted {directly >> 10} MB of 64 to a direct request")
    assert inside > 32 << 10
