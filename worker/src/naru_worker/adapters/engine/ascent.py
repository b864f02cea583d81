"""One load under way, between its loading thread and the asyncio thread: what it has opened, and what has begun.

Made by the operation that loads. A load may fail after its engine has begun; what the engine thread may still read must
then stay mapped until that has let go.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loader import HostedModel, PreparedModel
from naru_worker.adapters.weights.watched_checkpoint import OnShare


class Ascent:
    """`load` runs in a loading thread, all else in the asyncio thread."""

    def __init__(
        self,
        prepared: PreparedModel,
        hosted: HostedModel | None,
        stop: threading.Event,
        on_started: Callable[[LoadedModel], None],
        on_share: OnShare,
    ) -> None:
        """`hosted`: the weights, where they are in host memory already. `on_started`: in the asyncio thread, `on_share`
        in the one that loads.
        """
        self._prepared = prepared
        self._hosted = hosted
        self._stop = stop
        self._on_started = on_started
        self._on_share = on_share
        self._aio = asyncio.get_running_loop()
        self._is_started = False
        self.begun: LoadedModel | None = None
        """Its engine takes requests, or did."""
        self.left_open: HostedModel | None = None
        """Of a load that failed after its engine had begun: to be closed when the engine thread has let go."""

    def load(self) -> tuple[HostedModel, LoadedModel]:
        """The weights and the model.

        Raises:
            LoadError, Unavailable, Interrupted: see `HostedModel.load`.
        """
        hosted = self._hosted or self._prepared.open()
        try:
            return hosted, hosted.load(self._start, self._stop, self._on_share)
        except BaseException:
            if self._is_started:
                self.left_open = hosted
            elif hosted is not self._hosted:
                hosted.close()
            raise

    def discard(self, late: tuple[HostedModel, LoadedModel] | None) -> None:
        """Lets go of what came too late (None: an error did). The engine thread has let go before."""
        model = self.begun or (late[1] if late else None)
        if model is not None:
            model.release()
        hosted = self.left_open or (late[0] if late else self._hosted)
        if hosted is not None:
            hosted.close()

    def _start(self, model: LoadedModel) -> None:
        self._is_started = True
        self._aio.call_soon_threadsafe(self._begin, model)

    def _begin(self, model: LoadedModel) -> None:
        self.begun = model
        self._on_started(model)
