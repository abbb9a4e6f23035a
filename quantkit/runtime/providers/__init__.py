"""Execution providers: which exist, what they run, how fast."""
