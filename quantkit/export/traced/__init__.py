"""Graphs traced from the original and lowered to quantized operators."""
