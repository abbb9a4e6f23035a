"""Measuring accuracy, speed and memory of anything that can be called, without torch or onnxruntime."""
