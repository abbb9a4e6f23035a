"""Measuring accuracy, speed and memory of anything that can be called; it knows neither torch nor onnxruntime."""
