"""How fast this machine reads memory, as quantkit measures it: the floor under a token is bytes over this."""

from __future__ import annotations

import timing

from quantkit.runtime.machine.throughput import read_bandwidth_gb_per_s

if __name__ == "__main__":
    timing.take_turns(lambda: {"gb_per_s": [read_bandwidth_gb_per_s(timing.NUM_THREADS, of="median")]})
