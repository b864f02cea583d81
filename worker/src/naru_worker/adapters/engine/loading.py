"""From a URI to an engine: fetch, open, size, read. Every function here blocks and runs in a loading thread.

Called by the model host, which decides about memory between `open` and `build`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_proto.registry import ModelInfoRecord
from naru_worker.adapters.engine.backend import Backend, kv_format, open_backend
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.loaded import LoadedModel, ModelFacts
from naru_worker.adapters.engine.resident import Progress
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.fetch import FetchedModel, FetchProgress, fetch
from naru_worker.adapters.models.opening import OpenedFiles, OpenedModel, join_model, open_files
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.memory_plan import MemoryNeed, MemoryPlan, MemoryWish
from naru_worker.core.request_limits import RequestLimits
from naru_worker.core.residency import LoadOptions, ModelSpec, ModelState
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.settings import EngineSettings, MemorySettings

MAX_TOKEN_BYTES = 1024
"""Longer than any entry of the vocabularies in use (the longest are runs of blanks)."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of the worker and options of the load, merged."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool


def merge_options(settings: EngineSettings, options: LoadOptions) -> EngineOptions:
    """The load's word where it has one.

    Raises:
        LoadError: the step has no room for one token of each sequence.
    """
    num_seqs = options.max_num_seqs or settings.max_num_seqs
    num_tokens = options.max_num_batched_tokens or max(settings.max_num_batched_tokens, num_seqs)
    if num_tokens < num_seqs:
        raise LoadError(
            f"max_num_batched_tokens is {num_tokens}, below max_num_seqs {num_seqs}; raise it",
            param="max_num_batched_tokens",
        )
    caching = settings.enable_prefix_caching if options.enable_prefix_caching is None else options.enable_prefix_caching
    return EngineOptions(num_seqs, num_tokens, caching)


class DiskLoader:
    """Loads models with one backend. Safe to use from several threads."""

    def __init__(self, engine: EngineSettings, memory: MemorySettings, home: Path | None, num_threads: int) -> None:
        self._engine = engine
        self._memory = memory
        self._home = home
        self._num_threads = num_threads

    def open(self, name: str, spec: ModelSpec, on_progress: Callable[[Progress], None]) -> DiskModel:
        """Fetches the files and reads what they say about themselves.

        Raises:
            LoadError: the model cannot be had or cannot be served.
        """
        options = merge_options(self._engine, spec.options)
        fetched = fetch(spec.uri, spec.revision, self._home, lambda report: on_progress(_fetching(report)))
        try:
            backend = open_backend(self._engine.backend)
        except ImportError as exc:
            raise LoadError(f"backend {self._engine.backend!r} cannot be used here: {exc}", param="backend") from exc
        files = open_files(fetched.path)
        try:
            return self._size(name, spec, options, fetched, files, backend)
        except BaseException:
            files.checkpoint.close()
            raise

    def _size(
        self,
        name: str,
        spec: ModelSpec,
        options: EngineOptions,
        fetched: FetchedModel,
        files: OpenedFiles,
        backend: Backend,
    ) -> DiskModel:
        """What the opened files need, and what may be given to them."""
        config = files.checkpoint.config
        runner_options = RunnerOptions(
            block_size=self._engine.block_size,
            num_blocks=2,
            max_num_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=config.max_position_embeddings,
            num_threads=self._num_threads,
            kv_format=kv_format(self._engine.backend),
        )
        need = MemoryNeed(
            weight_bytes=backend.weight_bytes(files.checkpoint),
            kv_block_bytes=backend.kv_block_bytes(config, runner_options),
            block_size=self._engine.block_size,
            max_position_embeddings=config.max_position_embeddings,
        )
        # The worker's own limit is a ceiling for all models; a load's is a wish for this one, kept or refused.
        ceiling = min(self._engine.max_model_len, config.max_position_embeddings) or None
        wish = MemoryWish(
            max_num_seqs=options.max_num_seqs,
            max_model_len=spec.options.max_model_len or ceiling,
            kv_cache_bytes=spec.options.kv_cache_bytes,
            default_kv_cache_bytes=self._memory.kv_cache_bytes,
        )
        return DiskModel(name, fetched, files, backend, options, runner_options, need, wish)


class DiskModel:
    """An opened model: its files are mapped, its tokenizer is being built in a thread beside."""

    def __init__(
        self,
        name: str,
        fetched: FetchedModel,
        files: OpenedFiles,
        backend: Backend,
        options: EngineOptions,
        runner_options: RunnerOptions,
        need: MemoryNeed,
        wish: MemoryWish,
    ) -> None:
        self.need = need
        self.wish = wish
        self._name = name
        self._fetched = fetched
        self._files = files
        self._checkpoint = files.checkpoint
        self._backend = backend
        self._options = options
        self._runner_options = runner_options
        self._tokenizer: Future[ModelTokenizer] = Future()
        threading.Thread(target=self._open_tokenizer, name="tokenizer", daemon=True).start()

    def build(self, plan: MemoryPlan) -> LoadedModel:
        """Reads the weights while the tokenizer is built, puts the engine together, and lets go of the files.

        Raises:
            LoadError: the files are not what they said.
        """
        options = dataclasses.replace(
            self._runner_options, num_blocks=plan.num_blocks, max_model_len=plan.max_model_len
        )
        runner: Runner | None = None
        try:
            runner = self._backend.load_runner(self._checkpoint, options)
            return self._assemble(runner, options, join_model(self._checkpoint, self._tokenizer.result()), plan)
        except BaseException:
            if runner is not None:
                runner.close()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Lets go of the files, once the tokenizer is done with them."""
        self._tokenizer.exception()
        self._checkpoint.close()

    def _open_tokenizer(self) -> None:
        try:
            self._tokenizer.set_result(self._files.build_tokenizer())
        except BaseException as exc:
            # The top of a thread: the error belongs to whoever waits for the tokenizer.
            self._tokenizer.set_exception(exc)

    def _assemble(self, runner: Runner, options: RunnerOptions, model: OpenedModel, plan: MemoryPlan) -> LoadedModel:
        scheduler = _make_scheduler(model, options, enable_prefix_caching=self._options.enable_prefix_caching)
        tokens = TokenTable(model.tokenizer)
        facts = ModelFacts(
            info=_model_info(model, plan),
            revision="@".join(part for part in (self._fetched.revision, model.checkpoint.revision) if part),
            weight_bytes=runner.weight_bytes,
            kv_bytes=runner.kv_bytes,
            kv_bytes_per_token=self.need.kv_block_bytes // options.block_size,
            block_size=options.block_size,
            num_blocks=plan.num_blocks,
        )
        return LoadedModel(
            name=self._name,
            engine=ModelEngine(scheduler, runner, options, tokens, model.vocab_limit),
            tokenizer=model.tokenizer,
            tokens=tokens,
            limits=RequestLimits(plan.max_model_len, model.vocab_limit, MAX_TOKEN_BYTES),
            facts=facts,
            release=runner.close,
        )


def _make_scheduler(model: OpenedModel, options: RunnerOptions, *, enable_prefix_caching: bool) -> Scheduler:
    config = model.checkpoint.config
    kv = KVManager(
        options.num_blocks,
        options.block_size,
        model_revision=model.checkpoint.revision,
        enable_prefix_caching=enable_prefix_caching,
    )
    limits = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_tokens,
        max_model_len=options.max_model_len,
        eos_token_ids=config.eos_token_ids,
        vocab_size=config.vocab_size,
    )
    return Scheduler(limits, kv)


def _model_info(model: OpenedModel, plan: MemoryPlan) -> ModelInfoRecord:
    return ModelInfoRecord(
        architecture=model.checkpoint.config.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=model.checkpoint.config.vocab_size,
        chat_template=model.checkpoint.chat_template,
        bos_token=model.tokenizer.bos_token,
        eos_token=model.tokenizer.eos_token,
    )


def _fetching(report: FetchProgress) -> Progress:
    return Progress(
        ModelState.FETCHING, report.bytes_done, report.bytes_total, f"{report.phase} {report.detail}".strip()
    )
