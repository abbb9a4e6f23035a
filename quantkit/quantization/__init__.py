"""Weights to integers."""
