"""Large pages: the right regions are found, and results and the process stay as they were."""

from __future__ import annotations

import sys
from pathlib import Path

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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="large pages are asked for on Linux only")
def test_memory_is_granted_where_the_system_grants_it():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system grants no large pages")

    def huge_kb() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

    before = huge_kb()
    with huge_pages():
        kept = bytearray(64 << 20)
    if huge_kb() == before:
        pytest.skip("the system had no large pages left")
    assert huge_kb() - before > 48 << 10
    assert len(kept) == 64 << 20
