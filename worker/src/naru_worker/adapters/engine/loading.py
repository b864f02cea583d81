"""From a URI to an engine. Every function here blocks and runs in a loading thread.

    prepare: fetch the files, pack them into an image (in a process of its own), learn what they will take
    open:    map the image
    load:    runner, tokenizer, scheduler, engine

With images off, and for a backend that cannot read them, models are read from their own files (`plain_model`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.backend import open_backend
from naru_worker.adapters.engine.encoder_model import prepare_encoder
from naru_worker.adapters.engine.kinds import Kind, kind_of
from naru_worker.adapters.engine.loader import ImageUsage, Interrupted, PreparedModel
from naru_worker.adapters.engine.onnx_model import prepare_onnx
from naru_worker.adapters.engine.packed_model import PackedModel, prepare_packed
from naru_worker.adapters.engine.plain_model import prepare_plain
from naru_worker.adapters.engine.progress import seldom
from naru_worker.adapters.engine.resident import Progress
from naru_worker.adapters.engine.sizing import merge_options
from naru_worker.adapters.engine.wiring import EngineRoom
from naru_worker.adapters.fetch import DEFAULT_SETTINGS, FetchedModel, FetchProgress, fetch, peek
from naru_worker.adapters.images.errors import LoadStopped, StoreFull
from naru_worker.adapters.images.store import ImageStore
from naru_worker.core.residency import ModelSpec, ModelState
from naru_worker.settings import FetchSettings

_log = logging.getLogger(__name__)

_FILE_SHARE = 0.9
"""Weights keep their formats when packed: files larger than the budget by more than this can never fit."""


class DiskLoader:
    """Loads models with one backend. Safe to use from several threads."""

    def __init__(
        self, room: EngineRoom, home: Path | None, store: ImageStore | None, fetching: FetchSettings = DEFAULT_SETTINGS
    ) -> None:
        """`store` None: models are read from their own files."""
        self._room = room
        self._home = home
        self._store = store
        self._fetching = fetching

    def image_usage(self) -> ImageUsage:
        """Bytes of packed images; quick, from any thread."""
        if self._store is None:
            return ImageUsage()
        return ImageUsage(self._store.budget_bytes, self._store.used_bytes())

    def find(self, spec: ModelSpec) -> int | None:
        """Bytes of a model's files on this machine; None: they are not here. An image needs them beside it."""
        return peek(spec.uri, spec.revision, self._home, credentials=spec.credentials, settings=self._fetching)

    def close(self) -> None:
        """Ends the packing processes."""
        if self._store is not None:
            self._store.close()

    def prepare(
        self, name: str, spec: ModelSpec, on_progress: Callable[[Progress], None], should_stop: threading.Event
    ) -> PreparedModel:
        """Fetches and packs what is not here yet, and learns what the model will take.

        Raises:
            LoadError: the model cannot be had, cannot be served, or can never fit.
            Interrupted: `should_stop` was set.
        """
        merged = merge_options(self._room.engine, spec.options)
        fetched = fetch(
            spec.uri,
            spec.revision,
            self._home,
            lambda report: on_progress(_fetching(report)),
            credentials=spec.credentials,
            settings=self._fetching,
        )
        kind = kind_of(fetched.path)
        if kind is not Kind.DECODER and (spec.options.tensor_parallel_size or 1) > 1:
            raise LoadError(
                f"tensor_parallel_size is {spec.options.tensor_parallel_size}, and only models that generate can be "
                "cut over several accelerators; write 1",
                param="tensor_parallel_size",
            )
        if kind is Kind.ONNX:
            return prepare_onnx(name, spec, fetched, self._room, should_stop)
        try:
            open_backend(self._room.engine.backend)
        except ImportError as exc:
            raise LoadError(
                f"backend {self._room.engine.backend!r} cannot be used here: {exc}", param="backend"
            ) from exc
        if kind is Kind.ENCODER:
            return prepare_encoder(name, spec, fetched, self._room)
        self._refuse_hopeless(name, fetched, merged.tensor_parallel_size)
        if self._store is not None:
            try:
                packed = self._packed(name, spec, fetched, self._store, on_progress, should_stop)
                fetched.release()
                return packed
            except StoreFull as exc:
                # A model that could be served must not wait for disk space.
                _log.warning("model %s is loaded from its own files: %s", name, exc.message)
            except LoadStopped as exc:
                raise Interrupted from exc
        return prepare_plain(name, spec, fetched, self._room)

    def _packed(
        self,
        name: str,
        spec: ModelSpec,
        fetched: FetchedModel,
        store: ImageStore,
        on_progress: Callable[[Progress], None],
        should_stop: threading.Event,
    ) -> PackedModel:
        def packing(done: int, total: int) -> None:
            on_progress(Progress(ModelState.FETCHING, done, total, "packing"))

        path = store.ensure(fetched.path, seldom(packing), should_stop)
        return prepare_packed(name, spec, fetched, path, store, self._room)

    def _refuse_hopeless(self, name: str, fetched: FetchedModel, num_ranks: int) -> None:
        """Before any work: weights of which one rank's part is larger than the whole budget."""
        files = [fetched.path] if fetched.path.is_file() else sorted(fetched.path.glob("*.safetensors"))
        num_bytes = sum(file.stat().st_size for file in files) // num_ranks
        budget_bytes = self._room.ledger.budget_bytes
        if num_bytes * _FILE_SHARE > budget_bytes:
            where = f" on each of {num_ranks} accelerators" if num_ranks > 1 else ""
            raise LoadError(
                f"model {name!r} has {num_bytes / 1e6:,.1f} MB of weights{where}; this worker's whole budget is "
                f"{budget_bytes / 1e6:,.1f} MB; raise memory_budget_bytes or serve it on a larger worker",
                param="memory",
            )


def _fetching(report: FetchProgress) -> Progress:
    return Progress(
        ModelState.FETCHING, report.bytes_done, report.bytes_total, f"{report.phase} {report.detail}".strip()
    )
