"""Which layers are quantized, in which format, for which target, at what cost. No weights, no torch."""
