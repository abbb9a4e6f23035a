"""Running an artifact. The only room that imports onnxruntime."""
