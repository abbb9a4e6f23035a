"""Private inference: a model split between a client and a host."""
