"""Puts the repository's root on the path, so that `bench` is found however pytest was started, and hastens kernels."""

from __future__ import annotations

import sys
from pathlib import Path

from quick_interpreter import hasten

_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

hasten()
