"""Graphs of standard operators with fixed sizes, for NPUs."""
