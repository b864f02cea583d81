"""Ranks as threads of one process: what torch.distributed offers, over shared memory and barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

TIMEOUT_S = 60.0


class ThreadRanks:
    """Stands in for the module ``torch.distributed`` where `run` calls.

    One rank computes at a time: Triton's interpreter is not made for threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_exchanges: dict[str, int] = {}
        self._barrier = threading.Barrier(size)
        self._slots: list[Tensor] = [Tensor()] * size
        self._own = threading.local()
        self._turn = threading.Lock()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank returns; the first error, if there is one."""

        def one(rank: int) -> Any:
            self._own.rank = rank
            try:
                with self._turn:
                    return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.size)]
            errors = [error for error in (future.exception() for future in futures) if error is not None]
            for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                raise error
            return [future.result() for future in futures]

    def all_gather_into_tensor(self, output: Tensor, given: Tensor, group: None) -> None:
        pieces = self._exchange("all_gather", given)
        assert output.numel() == self.size * given.numel()
        for part, piece in zip(output.view(self.size, -1), pieces, strict=True):
            part.copy_(piece.reshape(-1))

    def all_to_all_single(self, output: Tensor, given: Tensor, group: None) -> None:
        pieces = self._exchange("all_to_all", given)
        for part, piece in zip(output.view(self.size, -1), pieces, strict=True):
            part.copy_(piece.view(self.size, -1)[self._own.rank])

    def gather(self, given: Tensor, outputs: list[Tensor] | None, dst: int, group: None) -> None:
        pieces = self._exchange("gather", given)
        assert (outputs is not None) == (self._own.rank == dst)
        for output, piece in zip(outputs or [], pieces, strict=outputs is not None):
            output.copy_(piece)

    def _exchange(self, name: str, given: Tensor) -> list[Tensor]:
        if self._own.rank == 0:
            self.num_exchanges[name] = self.num_exchanges.get(name, 0) + 1
        self._slots[self._own.rank] = given.clone()
        self._meet()
        pieces = list(self._slots)
        assert all(piece.shape == given.shape for piece in pieces), "ranks exchange tensors of one shape"
        self._meet()
        return pieces

    def _meet(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait(TIMEOUT_S)
        finally:
            self._turn.acquire()
