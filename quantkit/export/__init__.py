"""Quantized checkpoints to ONNX graphs. The only room that imports onnx."""
