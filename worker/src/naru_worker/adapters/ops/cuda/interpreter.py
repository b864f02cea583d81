"""Whether kernels run in Python, on the CPU: the environment decides when they are imported, for the process."""

from __future__ import annotations

import os

_ONES = ("1", "true", "on", "yes", "y")
"""As Triton reads them."""


def is_interpreted() -> bool:
    """Whether ``TRITON_INTERPRET`` is set."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _ONES
