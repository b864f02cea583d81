"""When a process began, from the kernel. Called for run states and for the time that `naru up` took."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def process_start(pid: int) -> int:
    """Clock ticks from boot to the start of a process; 0 where it is gone or the system does not tell."""
    try:
        # The second field, the name, may hold blanks and brackets: count from the last bracket.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def own_age_s() -> float:
    """Seconds since this process began, imports included; where the system does not tell, CPU seconds so far."""
    start_ticks = process_start(os.getpid())
    if sys.platform == "linux" and start_ticks:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return time.process_time()
