"""The other processes of a worker with several accelerators: one for each, so that models can be cut over them.

Opened and ended by `app`. Torch is imported where there are any.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from naru_proto.errors import LoadError
from naru_worker.settings import EngineSettings

if TYPE_CHECKING:
    from naru_worker.adapters.ops.tensor_parallel.rank_group import RankGroup

_log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""For them to end by themselves."""


def open_ranks(settings: EngineSettings) -> RankGroup | None:
    """Starts them, which takes seconds; None: there is one accelerator. They end with the thread that calls.

    Raises:
        LoadError: there are fewer accelerators, or a process does not start; says which, and what to do.
    """
    if settings.num_accelerators == 1:
        return None
    try:
        from naru_worker.adapters.ops.tensor_parallel.opening import open_group
    except ImportError as error:
        raise LoadError(
            f"models cannot be cut over accelerators here: {error}; install torch, or set num_accelerators to 1"
        ) from error
    return open_group(settings.backend, settings.num_accelerators, settings.step_timeout_s)


async def end_ranks(ranks: RankGroup, *, is_idle: bool) -> None:
    """In good order where nothing runs; else nobody waits for exchanges that may never end."""
    if is_idle:
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.to_thread(ranks.close)
            return
        except TimeoutError:
            _log.warning("the processes of other accelerators did not end within %g s: they are killed", END_TIMEOUT_S)
    ranks.kill()
