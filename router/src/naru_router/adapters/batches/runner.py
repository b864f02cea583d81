"""Works on batches while the router lives: looks which are not over, takes leases, and goes on where another one died.

A service of the app. Each batch is worked on by the router that holds its lease in Redis; see BatchWork.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable

from naru_proto.errors import NaruError, Unavailable
from naru_proto.names import BATCH_LEASE_TTL_S, key_batch
from naru_router.adapters.batches.batch_store import BatchStore
from naru_router.adapters.batches.line_call import LineCaller
from naru_router.adapters.batches.slots import Slots
from naru_router.adapters.batches.work import BatchWork, LeaseLost, Tools
from naru_router.adapters.leases import Leases, Tenure
from naru_router.adapters.storage.record_store import TenantFolder

logger = logging.getLogger(__name__)

MAX_WORKS = 16
"""Batches that one router works on at once."""
MAX_WORKS_OF_TENANT = 4
"""Of those, one tenant's, so that another one's need not wait for them to end."""
LOOK_S = 2.0
REST_LOOK_S = 4.0
"""Between two looks where the last one has found none: a new one wakes the router that takes it."""
KEEP_S = BATCH_LEASE_TTL_S / 5
TRY_AGAIN_S = 10.0
SWEEP_S = 3600.0


class BatchRunner:
    """Of one router."""

    def __init__(
        self,
        store: BatchStore,
        caller: LineCaller,
        leases: Leases,
        *,
        most_in_flight: Callable[[], int],
        is_leaving: Callable[[], bool],
        max_line_bytes: int,
    ) -> None:
        """`most_in_flight`: requests of batches at this instant; `is_leaving`: the router is to end."""
        self.paths = caller.paths
        self._store = store
        self._leases = leases
        self._is_leaving = is_leaving
        self._tools = Tools(store, caller, Slots(most_in_flight), is_leaving, max_line_bytes)
        self._works: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._woken = asyncio.Event()
        self._sweep_s = 0.0
        self._has_any = False
        """The last look has found batches that are not over, whoever works on them."""

    def wake(self) -> None:
        """There is a new batch, or one is to end."""
        self._woken.set()

    async def run(self) -> None:
        """Works until cancelled; what is under way then goes on elsewhere, or after the next start."""
        try:
            while True:
                self._woken.clear()
                try:
                    await self._look()
                    await self._sweep()
                except NaruError as exc:
                    logger.warning("batches cannot be looked at: %s", exc.message)
                except Exception:
                    # The top of the loop: a fault in one round must not end all batches.
                    logger.exception("looking at batches failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S if self._has_any else REST_LOOK_S):
                        await self._woken.wait()
        finally:
            works = tuple(self._works.values())
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _look(self) -> None:
        if self._is_leaving():
            return
        active = await self._store.active()
        self._has_any = bool(active)
        now_s = time.monotonic()
        self._not_before_s = {
            batch_id: self._not_before_s[batch_id] for _, batch_id in active if batch_id in self._not_before_s
        }
        of_tenant = Counter(folder for folder, batch_id in active if batch_id in self._works)
        for folder, batch_id in active:
            if len(self._works) >= MAX_WORKS:
                return
            is_due = batch_id not in self._works and now_s >= self._not_before_s.get(batch_id, -math.inf)
            if is_due and of_tenant[folder] < MAX_WORKS_OF_TENANT:
                of_tenant[folder] += await self._take(folder, batch_id)

    async def _take(self, folder: TenantFolder, batch_id: str) -> bool:
        """Begins with a batch; False: another router works on it."""
        tenure = Tenure(self._leases, key_batch(batch_id), BATCH_LEASE_TTL_S)
        if not await tenure.keep():
            return False
        task = asyncio.create_task(self._work(folder, batch_id, tenure), name=f"batch {batch_id}")
        self._works[batch_id] = task
        task.add_done_callback(lambda _: self._forget(batch_id))
        return True

    def _forget(self, batch_id: str) -> None:
        del self._works[batch_id]
        self._woken.set()

    async def _work(self, folder: TenantFolder, batch_id: str, tenure: Tenure) -> None:
        keeping = asyncio.create_task(_keep(tenure))
        try:
            fence, tenant = await tenure.fence(), await self._store.tenant_of(folder, batch_id)
            if fence and tenant is not None:
                await BatchWork(self._tools, tenant, batch_id, fence, lambda: tenure.is_held).run()
        except LeaseLost:
            logger.warning("the lease of the batch %s was lost; another router may go on with it", batch_id)
        except NaruError as exc:
            logger.warning("the batch %s waits: %s", batch_id, exc.message)
            self._not_before_s[batch_id] = time.monotonic() + TRY_AGAIN_S
        except Exception:
            # The top of a batch: a fault in one must not end the others; it is tried again later.
            logger.exception("working on the batch %s failed", batch_id)
            self._not_before_s[batch_id] = time.monotonic() + TRY_AGAIN_S
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            with contextlib.suppress(Unavailable):  # then it ends by itself
                await tenure.give_up()

    async def _sweep(self) -> None:
        if time.monotonic() >= self._sweep_s:
            self._sweep_s = time.monotonic() + SWEEP_S
            await self._store.revive()
            self._woken.set()
            count = await self._store.shelf.sweep() + await self._store.shelf.store.sweep()
            if count:
                logger.info("%d expired files and broken writes removed", count)


async def _keep(tenure: Tenure) -> None:
    while True:
        await asyncio.sleep(KEEP_S)
        with contextlib.suppress(Unavailable):  # what is held stays so until its time is over
            await tenure.keep()
