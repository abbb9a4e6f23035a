"""Writing ONNX: the onnx and onnx_ir packages live here and nowhere else."""
