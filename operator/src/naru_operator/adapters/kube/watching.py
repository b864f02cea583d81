"""Watch streams by kopf, in a thread and an event loop of their own. Started and ended by the informer.

kopf takes a process for its own: it installs signal handlers and, when it ends, cancels every task of its loop that
it did not know before. In a thread it does neither to us. How it is set up is in `kopf_setup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import kopf
from kubernetes.client.configuration import Configuration

from naru_operator.adapters.kube import kopf_setup
from naru_operator.adapters.kube.kopf_login import Login
from naru_operator.adapters.kube.kopf_logs import forwarded_logs, words_of
from naru_operator.adapters.kube.kopf_setup import OnSight, Sight, WatchSettings

logger = logging.getLogger(__name__)

_GRACE_S = 1.0
"""For kopf to end by itself; it may wait much longer for tasks that nobody has told to end."""
_NUM_CANCELLATIONS = 20
_CANCELLATION_S = 0.1
_TLS_CLOSE_S = 0.25
"""TLS connections say goodbye before they close, and the HTTP library does not wait for that.

Source: aiohttp's documentation, graceful shutdown of a client session.
"""
_STOP_TIMEOUT_S = 10.0


class Watch:
    """Watches the kinds in `WATCHED` and hands on what happens."""

    def __init__(
        self,
        configuration: Configuration,
        namespaces: tuple[str | None, ...],
        on_sight: OnSight,
        on_listed: Callable[[], None],
        settings: WatchSettings | None = None,
    ) -> None:
        """``namespaces``: as a store's; `(None,)` means all.

        ``on_listed`` is called after a list by which a stream begins: deletions before it go unseen. Both callbacks
        are called in the loop that runs this.
        """
        self._configuration = configuration
        self._namespaces = namespaces
        self._on_sight = on_sight
        self._on_listed = on_listed
        self._settings = settings or WatchSettings()

    async def run(self) -> None:
        """Watches until cancelled; returns, with the reason in the log, when kopf gives up.

        Events are handed on in the calling loop, which must run all the while.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        lifeline = _Lifeline()

        def hand_on(sight: Sight) -> None:
            if not lifeline.is_cut:
                loop.call_soon_threadsafe(self._on_sight, sight)

        def tell_listed() -> None:
            if not lifeline.is_cut:
                loop.call_soon_threadsafe(self._on_listed)

        def thread() -> None:
            try:
                asyncio.run(self._operate(hand_on, tell_listed, lifeline))
            except Exception as exc:
                # The top of the thread: whatever kopf ends with, the informer starts it anew.
                logger.warning("the watch ended: %s", words_of(f"{type(exc).__name__}: {exc}"))
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(ended.set)

        with forwarded_logs():
            threading.Thread(target=thread, name="watch", daemon=True).start()
            try:
                await ended.wait()
            finally:
                lifeline.cut()
                with contextlib.suppress(TimeoutError):  # the thread is a daemon: it ends with the process
                    async with asyncio.timeout(_STOP_TIMEOUT_S):
                        await ended.wait()

    async def _operate(self, on_sight: OnSight, on_listed: Callable[[], None], lifeline: _Lifeline) -> None:
        """In the thread, until the lifeline is cut or kopf gives up."""
        asyncio.get_running_loop().set_exception_handler(_ignore)
        stop = lifeline.attach()
        login = Login(self._configuration, on_listed)
        is_everywhere = None in self._namespaces
        operator = asyncio.create_task(
            kopf.operator(
                registry=kopf_setup.registry(login, on_sight, stop.set),
                settings=kopf_setup.settings(self._settings),
                standalone=True,
                clusterwide=is_everywhere,
                namespaces=() if is_everywhere else tuple(name for name in self._namespaces if name),
                stop_flag=stop,
            )
        )
        await stop.wait()
        await asyncio.wait({operator}, timeout=_GRACE_S)
        has_failed = operator.done() and not lifeline.is_cut
        await _cancel_the_rest()
        await login.close()
        await asyncio.sleep(_TLS_CLOSE_S)
        if has_failed:
            await operator


async def _cancel_the_rest() -> None:
    """Cancels whatever runs in this loop, again and again: some tasks of kopf miss a cancellation while they start."""
    for _ in range(_NUM_CANCELLATIONS):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCELLATION_S)


def _ignore(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What tasks of kopf that are cancelled die of has been told by then, and is of no further use."""
    logger.debug("%s", words_of(str(context.get("exception") or context.get("message"))))


class _Lifeline:
    """By which one thread ends what runs in another one's event loop."""

    def __init__(self) -> None:
        self.is_cut = False
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def attach(self) -> asyncio.Event:
        """In the loop to be ended: an event that is set when the line is cut, or was cut already."""
        with self._lock:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            if self.is_cut:
                self._stop.set()
            return self._stop

    def cut(self) -> None:
        """In the other thread."""
        with self._lock:
            self.is_cut = True
            if self._loop is not None and self._stop is not None:
                with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                    self._loop.call_soon_threadsafe(self._stop.set)
