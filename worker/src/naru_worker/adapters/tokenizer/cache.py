"""Tokenizers shared among models: many models of a family have the very same one, and building it is slow.

Called by loading threads, by the key of an image's tokenizer section. Keeps what some model uses as long as it is used,
and a few more up to a limit of bytes, last used first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer


class TokenizerCache:
    """Thread-safe. A tokenizer wanted by several threads at once is built by one of them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: what may be kept beyond its last use, by the sizes that callers give."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[str, ModelTokenizer] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, tuple[ModelTokenizer, int]] = OrderedDict()
        self._building: dict[str, Future[ModelTokenizer]] = {}
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Of the tokenizers kept here, whether some model uses them or not."""
        return self._kept_bytes

    def get(self, key: str, num_bytes: int, build: Callable[[], ModelTokenizer]) -> ModelTokenizer:
        """The tokenizer of that key, built if it is not here; blocks while it is.

        Raises:
            LoadError: what `build` raises; the next caller tries again.
        """
        with self._lock:
            found = self._alive.get(key)
            if found is not None:
                self._keep(key, found, num_bytes)
                return found
            future = self._building.get(key)
            is_mine = future is None
            if future is None:
                future = self._building[key] = Future()
        if not is_mine:
            return future.result()
        try:
            built = build()
        except BaseException as error:
            with self._lock:
                del self._building[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._building[key]
            self._alive[key] = built
            self._keep(key, built, num_bytes)
        future.set_result(built)
        return built

    def has(self, key: str) -> bool:
        """Whether it could be had without building."""
        with self._lock:
            return key in self._alive

    def clear(self) -> None:
        """Keeps nothing beyond its use from now."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def _keep(self, key: str, tokenizer: ModelTokenizer, num_bytes: int) -> None:
        """Moves to the newest end; lets the oldest go until the limit holds."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._kept[key] = (tokenizer, num_bytes)
        self._kept_bytes += num_bytes
        while self._kept_bytes > self._max_bytes:
            _, (_, freed_bytes) = self._kept.popitem(last=False)
            self._kept_bytes -= freed_bytes
