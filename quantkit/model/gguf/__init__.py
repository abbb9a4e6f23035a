"""GGUF files of llama.cpp as checkpoints: header, architectures, tokenizer, and the folder made of them."""
