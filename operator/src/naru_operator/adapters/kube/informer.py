"""Keeps the store true: lists everything at the start and every few minutes, and watches in between. Run by the app.

The first full list is what tells that the store is complete; no watch can. Later lists heal what a watch missed and
find what others deleted or changed. The watch begins after the first list, and anew whenever it ends; each beginning
of a stream is followed by a full list, as no watch tells what was deleted before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from kubernetes.client.configuration import Configuration

from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import NotFound
from naru_operator.adapters.kube.kinds import WATCHED, Kind
from naru_operator.adapters.kube.kopf_setup import Sight, WatchSettings
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.adapters.kube.watching import Watch
from naru_operator.core.backoff import count_failures, restart_delay_s
from naru_proto.errors import NaruError

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0
"""After the last of a watch's lists, before the full list that shows what they could not."""


class Informer:
    """One store's source. asyncio thread only."""

    def __init__(
        self,
        client: KubeClient,
        configuration: Configuration,
        store: ObjectStore,
        *,
        resync_s: float,
        watch_settings: WatchSettings | None = None,
    ) -> None:
        """``resync_s``: between full lists."""
        self._client = client
        self._store = store
        self._resync_s = resync_s
        self._watch = Watch(configuration, store.namespaces, self._on_sight, self._on_listed, watch_settings)
        self._watching: asyncio.Task[None] | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._trouble = "not listed yet"

    @property
    def trouble(self) -> str:
        """Why the store may not be true: the last list's failure. Empty: the last list was whole."""
        return self._trouble

    async def resync(self) -> None:
        """Lists everything anew; returns when a list that began after the call is in the store."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._wanted.set()
        await waiting

    async def run(self) -> None:
        """Lists and watches until cancelled. A missing permission or kind is told and tried again."""
        num_failures = 0
        try:
            while True:
                self._wanted.clear()
                waiting, self._waiting = self._waiting, []
                if await self._turn():
                    num_failures, pause_s = 0, self._resync_s
                    for future in waiting:
                        if not future.done():
                            future.set_result(None)
                else:
                    num_failures += 1
                    pause_s = restart_delay_s(num_failures)
                    self._waiting += waiting
                    self._wanted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wanted.wait()
        finally:
            await self._stop_watching()

    async def _turn(self) -> bool:
        """One full list; whether it was whole."""
        try:
            await self._list_all()
        except NaruError as exc:
            if isinstance(exc, NotFound):
                await self._stop_watching()  # it must look for the kinds anew when they are there
            self._tell(exc.message)
            return False
        except Exception as exc:
            # The top of the loop: an answer nobody thought of must not end the sight of the cluster.
            logger.exception("a list of the cluster failed")
            self._tell(f"{type(exc).__name__}: {exc}")
            return False
        if self._trouble:
            logger.info("the cluster is listed: %s", ", ".join(self._counts()))
        self._trouble = ""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_on(), name="watch")
        return True

    async def _list_all(self) -> None:
        is_first = not self._store.is_synced
        for kind, selector in WATCHED.items():
            for namespace in self._store.namespaces:
                news = await self._list(kind, namespace, selector)
                if news and not is_first:
                    logger.info("a list showed %d %s that no watch had told of", news, kind.resource)

    async def _list(self, kind: Kind, namespace: str | None, selector: str) -> int:
        try:
            listing = await self._client.list(kind.name, namespace, selector)
        except NotFound as exc:
            raise NotFound(f"{exc.message}: is the kind installed? apply the chart's crds/") from exc
        return self._store.replace(kind.name, namespace, listing)

    async def _watch_on(self) -> None:
        """Watches for ever."""
        num_failures = 0
        while True:
            began_s = time.monotonic()
            await self._watch.run()
            num_failures = count_failures(num_failures, time.monotonic() - began_s)
            await asyncio.sleep(restart_delay_s(num_failures))

    async def _stop_watching(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None

    def _on_sight(self, sight: Sight) -> None:
        self._store.take(sight.kind, sight.obj, is_deleted=sight.is_deleted)

    def _on_listed(self) -> None:
        """A stream begins: what was deleted since our last list and before its own, only another list of ours shows."""
        if self._soon is not None:
            self._soon.cancel()
        self._soon = asyncio.get_running_loop().call_later(_SETTLE_S, self._wanted.set)

    def _counts(self) -> list[str]:
        return [f"{len(self._store.objects(kind.name))} {kind.resource}" for kind in WATCHED]

    def _tell(self, trouble: str) -> None:
        """Once for each trouble, not at each attempt."""
        if trouble != self._trouble:
            logger.warning("the cluster cannot be listed: %s", trouble)
        self._trouble = trouble
