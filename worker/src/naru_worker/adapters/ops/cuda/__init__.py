"""The `cuda` backend: Triton kernels and torch on NVIDIA GPUs."""

import os

# What every version of Triton did by default, until the next one asks for it by name.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
