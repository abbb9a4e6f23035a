"""Architectures without a family row: roles found by probing and tracing the modules."""
