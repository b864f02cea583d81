"""Model files: readers of safetensors and GGUF, and the checkpoint over them."""
