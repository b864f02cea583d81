"""A model read from its own files: for the oracle backend and GPUs, and where no images are kept.

The plain path beside `packed_model`. The weights are copied into memory of their own. On a GPU they sleep while the
model waits in host memory, and wake with the next load; elsewhere each load reads the files again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeGuard

import numpy as np

from naru_worker.adapters.engine.backend import open_backend
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loader import Interrupted
from naru_worker.adapters.engine.sizing import FileFacts, ModelSize, merge_options, runner_options, size_model
from naru_worker.adapters.engine.wiring import EngineRoom, ModelParts, build_engine
from naru_worker.adapters.fetch import FetchedModel
from naru_worker.adapters.models.opening import OpenedFiles, join_model, open_files
from naru_worker.adapters.ops.cuda.memory.pinned_pool import NoPinnedSlot, PinnedPool
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.watched_checkpoint import OnShare, unheard
from naru_worker.core.residency import ModelSpec
from naru_worker.core.weight_layout import expected_shapes

_PAGE_BYTES = 4096
TOKENIZER_BYTES = 40 << 20
"""Of one tokenizer in memory: not known before it is built, so that of a large vocabulary."""


def prepare_plain(name: str, spec: ModelSpec, fetched: FetchedModel, room: EngineRoom) -> PlainModel:
    """Opens the files to learn what the model will take, and closes them again.

    Raises:
        LoadError: nothing servable is there, a file is broken, or it can never fit.
    """
    files = open_files(fetched.path)
    try:
        engine = merge_options(room.engine, spec.options)
        base = runner_options(room.engine, engine, files.checkpoint.config.max_position_embeddings, room.num_threads)
        facts = _facts(name, files.checkpoint, room, base, engine.tensor_parallel_size)
        size = size_model(name, facts, base, room.engine, room.memory, spec.options, room.ledger.budget_bytes)
    finally:
        files.checkpoint.close()
    return PlainModel(name, fetched, room, size)


def _facts(name: str, checkpoint: Checkpoint, room: EngineRoom, base: RunnerOptions, num_ranks: int) -> FileFacts:
    """What it takes, of several ranks on the first: none has more.

    Raises:
        LoadError: it cannot be cut so.
    """
    backend, config, exchanged_bytes = open_backend(room.engine.backend), checkpoint.config, 0
    if num_ranks > 1:
        from naru_worker.adapters.ops.tensor_parallel.shards import exchange_bytes, shard_sizes

        exchanged_bytes = exchange_bytes(room.engine.backend, config, base)
        checkpoint = shard_sizes(checkpoint, num_ranks)
    taken = backend.runner_bytes(checkpoint, base)
    return FileFacts(
        config,
        # Copies share nothing: each load is its own.
        weights_key=f"own:{name}",
        weight_bytes=taken.weight_bytes,
        kv_block_bytes=backend.kv_block_bytes(checkpoint.config, base),
        workspace_bytes=taken.workspace_bytes + exchanged_bytes,
        tokenizer_bytes=TOKENIZER_BYTES,
        device_bytes=taken.device_bytes,
        can_sleep=room.sleep_slots is not None and num_ranks == 1,
    )


class PlainModel:
    """Prepared: see `PreparedModel`."""

    def __init__(self, name: str, fetched: FetchedModel, room: EngineRoom, size: ModelSize) -> None:
        self.footprint = size.footprint
        self.detail = size.reason
        self._name = name
        self._fetched = fetched
        self._room = room
        self._size = size

    def is_current(self) -> bool:
        """Never: the files are looked at anew for each load."""
        return False

    def open(self) -> PlainHosted:
        """Maps the files.

        Raises:
            LoadError: they are broken or gone.
        """
        return PlainHosted(self._name, self._fetched, self._room, self._size, open_files(self._fetched.path))


class SleepingRunner(Runner, Protocol):
    """A runner whose weights can leave the device and come back."""

    @property
    def can_sleep(self) -> bool:
        """Whether that gives memory to others."""

    def sleep(self, pool: PinnedPool) -> int:
        """See `CudaRunner.sleep`."""

    def wake(self) -> None:
        """See `CudaRunner.wake`."""


def can_sleep(runner: Runner) -> TypeGuard[SleepingRunner]:
    """Whether a runner is worth keeping while its model waits."""
    return bool(getattr(runner, "can_sleep", False))


class PlainHosted:
    """Mapped files, and a tokenizer that is being built in a thread beside; later maybe a runner that sleeps."""

    def __init__(self, name: str, fetched: FetchedModel, room: EngineRoom, size: ModelSize, files: OpenedFiles) -> None:
        self._name = name
        self._fetched = fetched
        self._room = room
        self._size = size
        self._files = files
        self._sleeper: SleepingRunner | None = None
        """What the last load has made; asleep between two loads."""
        self._tokenizer: Future[ModelTokenizer] = Future()
        threading.Thread(target=self._open_tokenizer, name="tokenizer", daemon=True).start()

    def make_present(self, should_stop: threading.Event) -> None:
        """Reads the files into the page cache; they are packed when the weights are copied.

        Raises:
            LoadError: the tokenizer cannot be built.
            Interrupted: `should_stop` was set.
        """
        checkpoint = self._files.checkpoint
        for name in filter(checkpoint.has, expected_shapes(checkpoint.config)):
            self._pause(should_stop)
            np.frombuffer(checkpoint.get(name).data, np.uint8)[::_PAGE_BYTES].max(initial=0)
        self._tokenizer.result()

    def load(
        self, on_started: Callable[[LoadedModel], None], should_stop: threading.Event, on_share: OnShare = unheard
    ) -> LoadedModel:
        """Copies the weights while the tokenizer is built, or wakes them where they sleep.

        Raises:
            LoadError: the files are not what they said.
            Unavailable: the device has no room.
            DeviceFault: the device has failed.
            Interrupted: `should_stop` was set.
        """
        self._pause(should_stop)
        if self._sleeper is None:
            runner = self._copied(on_share, should_stop)
        else:
            self._sleeper.wake()
            runner = self._sleeper
        try:
            model = join_model(self._files.checkpoint, self._tokenizer.result())
            parts = ModelParts(
                name=self._name,
                config=model.checkpoint.config,
                chat_template=model.checkpoint.chat_template,
                weights_revision=model.checkpoint.revision,
                revision="@".join(part for part in (self._fetched.revision, model.checkpoint.revision) if part),
                tokenizer=model.tokenizer,
                vocab_limit=model.vocab_limit,
                size=self._size,
            )
            self._pause(should_stop)
            loaded = build_engine(self._room, parts, runner)
        except BaseException:
            self._sleeper = None
            runner.close()
            raise
        if self._room.sleep_slots is not None and can_sleep(runner):
            self._sleeper = runner
            loaded.release = lambda: None  # it is closed, or put to sleep, when it is known which
        return loaded

    def keep(self) -> str:
        """Puts the weights to sleep; where a runner cannot, they went with it, and the files stay mapped.

        Raises:
            DeviceFault: the device has failed.
        """
        slots = self._room.sleep_slots
        if self._sleeper is None or slots is None:
            return ""
        try:
            self._sleeper.sleep(slots)
        except (NoPinnedSlot, ValueError) as exc:
            return str(exc)
        return ""

    def close(self) -> int:
        """Lets go of the weights, and of the files once the tokenizer is done with them."""
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            sleeper.close()
        self._tokenizer.exception()
        self._files.checkpoint.close()
        self._fetched.release()
        return 0

    def _copied(self, on_share: OnShare, should_stop: threading.Event) -> Runner:
        def on_tensor(done: int, total: int) -> None:
            self._pause(should_stop)
            on_share(done, total)

        backend, options = self._room.engine.backend, self._size.runner_options
        num_ranks = self._size.footprint.num_accelerators
        if num_ranks == 1:
            return open_backend(backend).load_runner(self._files.checkpoint, options, on_share=on_tensor)
        from naru_worker.adapters.ops.tensor_parallel.group_runner import load_over_group

        assert self._room.ranks is not None, "sizes above one are those of a group"
        return load_over_group(self._room.ranks, num_ranks, self._fetched.path, backend, options)

    def _pause(self, should_stop: threading.Event) -> None:
        """Between two pieces of work."""
        if should_stop.is_set():
            raise Interrupted
        self._room.stand_aside(should_stop)

    def _open_tokenizer(self) -> None:
        try:
            self._tokenizer.set_result(self._files.build_tokenizer())
        except BaseException as exc:
            # The top of a thread: the error belongs to whoever waits for the tokenizer.
            self._tokenizer.set_exception(exc)
