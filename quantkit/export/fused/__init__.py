"""Graphs of fused operators with free sizes."""
