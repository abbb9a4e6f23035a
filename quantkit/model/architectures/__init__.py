"""Architectures that quantkit brings itself."""
