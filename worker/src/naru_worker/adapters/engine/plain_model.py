"""A model read from its own files at each load: for the oracle backend, and where no images are kept.

The plain path beside `packed_model`. The weights are copied into memory of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from naru_worker.adapters.engine.backend import open_backend
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.sizing import FileFacts, ModelSize, merge_options, runner_options, size_model
from naru_worker.adapters.engine.wiring import EngineRoom, ModelParts, build_engine
from naru_worker.adapters.fetch import FetchedModel
from naru_worker.adapters.models.opening import OpenedFiles, join_model, open_files
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.core.residency import ModelSpec

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
        facts = _facts(name, files.checkpoint, room.engine.backend, base, engine.tensor_parallel_size)
        size = size_model(name, facts, base, room.engine, room.memory, spec.options, room.ledger.budget_bytes)
    finally:
        files.checkpoint.close()
    return PlainModel(name, fetched, room, size)


def _facts(name: str, checkpoint: Checkpoint, backend_name: str, base: RunnerOptions, num_ranks: int) -> FileFacts:
    """What it takes, of several ranks on the first: none has more.

    Raises:
        LoadError: it cannot be cut so.
    """
    backend, config, exchanged_bytes = open_backend(backend_name), checkpoint.config, 0
    if num_ranks > 1:
        from naru_worker.adapters.ops.tensor_parallel.shards import exchange_bytes, shard_sizes

        exchanged_bytes = exchange_bytes(backend_name, config, base)
        checkpoint = shard_sizes(checkpoint, num_ranks)
    return FileFacts(
        config,
        # Copies share nothing: each load is its own.
        weights_key=f"own:{name}",
        weight_bytes=backend.weight_bytes(checkpoint),
        kv_block_bytes=backend.kv_block_bytes(checkpoint.config, base),
        workspace_bytes=backend.workspace_bytes(checkpoint.config, base) + exchanged_bytes,
        tokenizer_bytes=TOKENIZER_BYTES,
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


class PlainHosted:
    """Mapped files, and a tokenizer that is being built in a thread beside."""

    def __init__(self, name: str, fetched: FetchedModel, room: EngineRoom, size: ModelSize, files: OpenedFiles) -> None:
        self._name = name
        self._fetched = fetched
        self._room = room
        self._size = size
        self._files = files
        self._tokenizer: Future[ModelTokenizer] = Future()
        threading.Thread(target=self._open_tokenizer, name="tokenizer", daemon=True).start()

    def make_present(self, should_stop: threading.Event) -> None:
        """The file's pages are read when the weights are copied; only the tokenizer is waited for.

        Raises:
            LoadError: the tokenizer cannot be built.
        """
        self._tokenizer.result()

    def load(self, on_started: Callable[[LoadedModel], None], should_stop: threading.Event) -> LoadedModel:
        """Copies the weights while the tokenizer is built.

        Raises:
            LoadError: the files are not what they said.
        """
        runner = self._load_runner()
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
            return build_engine(self._room, parts, runner)
        except BaseException:
            runner.close()
            raise

    def close(self) -> int:
        """Lets go of the files, once the tokenizer is done with them; the weights were copies that the runner had."""
        self._tokenizer.exception()
        self._files.checkpoint.close()
        self._fetched.release()
        return 0

    def _load_runner(self) -> Runner:
        backend, options = self._room.engine.backend, self._size.runner_options
        num_ranks = self._size.footprint.num_accelerators
        if num_ranks == 1:
            return open_backend(backend).load_runner(self._files.checkpoint, options)
        from naru_worker.adapters.ops.tensor_parallel.group_runner import load_over_group

        assert self._room.ranks is not None, "sizes above one are those of a group"
        return load_over_group(self._room.ranks, num_ranks, self._fetched.path, backend, options)

    def _open_tokenizer(self) -> None:
        try:
            self._tokenizer.set_result(self._files.build_tokenizer())
        except BaseException as exc:
            # The top of a thread: the error belongs to whoever waits for the tokenizer.
            self._tokenizer.set_exception(exc)
