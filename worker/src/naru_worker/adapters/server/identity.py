"""Who this worker is: fixed from start to end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Name and make of one process."""

    worker_id: str
    incarnation: str
    """Random for each start: a worker that comes back under its name is another one."""
    backend: str
    isa: str
    """Instruction set the kernels run on; empty where it is not ours to choose."""
    num_threads: int
    num_accelerators: int = 1

    @property
    def epoch(self) -> str:
        """Changes when this worker starts anew: all it held before is void. Each model has an epoch of its own."""
        return self.incarnation
