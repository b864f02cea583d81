"""The `cuda` backend: Triton kernels and torch on NVIDIA GPUs."""
