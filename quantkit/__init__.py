"""quantkit: post-training quantization and verified ONNX export for Hugging Face transformers."""

__version__ = "0.1.0"
