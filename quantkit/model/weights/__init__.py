"""Weights of a checkpoint: headers, tensors, and the torch module that holds them."""
