"""Accuracy, similarity, latency and memory of an artifact."""
