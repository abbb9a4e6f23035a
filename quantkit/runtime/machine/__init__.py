"""The machine: hardware, installed runtimes, measured throughput."""
