"""Parameters, MACs, bytes and times of every step of a model."""
