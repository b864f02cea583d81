"""While a thread records a graph, others leave torch's allocator its memory: it cannot give it back meanwhile.

Held by `streams` around each capture, and here around what other threads ask of torch.
"""

from __future__ import annotations

import logging
import threading

import torch

_log = logging.getLogger(__name__)

recording = threading.RLock()
"""Held while a graph is recorded."""


def empty_torch_cache() -> None:
    """Gives what torch keeps unused back to the driver, once no graph is recorded any more."""
    with recording:
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            # Some versions of torch do not get over a capture that failed: memory stays with them, which is no reason
            # for a model not to leave.
            _log.warning("torch does not give back the memory that it keeps", exc_info=True)
