"""An encoder from its folder to its engine: what the hub prepares, opens, loads and closes.

There is no packed image: its weights are small, and are packed into memory of their own when they are brought to the
host. From there a load is an engine over them, and what is booked for them is what they take, to the byte.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_proto.registry import ModelInfoRecord
from naru_worker.adapters.engine.backend import open_encoder_backend
from naru_worker.adapters.engine.batch_engine import encoder_engine
from naru_worker.adapters.engine.batch_runner import EncoderRunner
from naru_worker.adapters.engine.loaded import LoadedModel, ModelFacts, PoolingFacts
from naru_worker.adapters.engine.loader import Interrupted
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.engine.wiring import MAX_TOKEN_BYTES, EngineRoom
from naru_worker.adapters.fetch import FetchedModel
from naru_worker.adapters.ops.encoder_options import EncoderOptions
from naru_worker.adapters.ops.protocol import FloatArray
from naru_worker.adapters.tokenizer.folder_tokenizer import read_tokenizer_files, tokenizer_of_files
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.origin import folder_origin
from naru_worker.adapters.weights.encoder_folder import EncoderCheckpoint
from naru_worker.adapters.weights.watched_checkpoint import OnShare, unheard
from naru_worker.core.encoder_config import EncoderConfig
from naru_worker.core.hub.model import Footprint
from naru_worker.core.request_limits import RequestLimits
from naru_worker.core.residency import ModelSpec

PRIVATE_BYTES = 1 << 20
"""Engine, queue and facts of one model."""
MAX_STEP_TOKENS = 4096
"""Of one batch where nothing else is asked for: tens of milliseconds of a small encoder, while no other model runs."""
_TOKENIZER_RATIO = 16
"""A tokenizer takes about 14 times its file in memory."""
_Stamp = tuple[tuple[str, int, int], ...]


def prepare_encoder(name: str, spec: ModelSpec, fetched: FetchedModel, room: EngineRoom) -> EncoderModel:
    """Opens the files to learn what the model will take, and closes them again.

    Raises:
        LoadError: nothing servable is there, a file is broken, or it can never fit.
    """
    stamp = _stamp(fetched.path)
    checkpoint = EncoderCheckpoint(fetched.path)
    config = checkpoint.config
    checkpoint.close()
    options = _options(spec, config, room)
    backend = open_encoder_backend(room.engine.backend)
    size = next((size for path, size, _ in stamp if Path(path).name == "tokenizer.json"), 0)
    footprint = Footprint(
        # Copies share nothing: each load is its own.
        weights_key=f"own:{name}",
        weight_bytes=backend.weight_bytes(config),
        kv_floor_bytes=0,
        workspace_bytes=backend.workspace_bytes(config, options),
        private_bytes=PRIVATE_BYTES + _TOKENIZER_RATIO * size,
    )
    needed = footprint.weight_bytes + footprint.workspace_bytes + footprint.private_bytes
    if needed > room.ledger.budget_bytes:
        raise LoadError(
            f"model {name!r} needs {needed / 1e6:,.1f} MB; this worker's whole budget is "
            f"{room.ledger.budget_bytes / 1e6:,.1f} MB; raise memory_budget_bytes or serve it on a larger worker",
            param="memory",
        )
    return EncoderModel(_Prepared(name, spec, fetched, room, options, stamp, footprint))


@dataclass(frozen=True, slots=True)
class _Prepared:
    name: str
    spec: ModelSpec
    fetched: FetchedModel
    room: EngineRoom
    options: EncoderOptions
    stamp: _Stamp
    footprint: Footprint


class EncoderModel:
    """Prepared: see `PreparedModel`."""

    def __init__(self, prepared: _Prepared) -> None:
        self.footprint = prepared.footprint
        self.detail = ""
        self._prepared = prepared

    def is_current(self) -> bool:
        """Whether the files are as they were."""
        return _stamp(self._prepared.fetched.path) == self._prepared.stamp

    def open(self) -> EncoderHosted:
        """Maps the files.

        Raises:
            LoadError: they are broken, changed or gone.
        """
        if not self.is_current():
            raise LoadError(
                f"{self._prepared.fetched.path}: has changed since it was prepared; load it again", param="path"
            )
        self._prepared.fetched.touch()
        return EncoderHosted(self._prepared, EncoderCheckpoint(self._prepared.fetched.path))


class EncoderHosted:
    """Mapped files, and from `make_present` on packed weights in memory of their own."""

    def __init__(self, prepared: _Prepared, checkpoint: EncoderCheckpoint) -> None:
        self._prepared = prepared
        self._config = checkpoint.config
        self._checkpoint: EncoderCheckpoint | None = checkpoint
        self._revision = ""
        self._runner: EncoderRunner | None = None
        self._tokenizer: ModelTokenizer | None = None
        self._is_on_device = prepared.room.engine.backend == "cuda"

    def make_present(self, should_stop: threading.Event) -> None:
        """Packs the weights and builds the tokenizer; the latter alone where the weights go to a device.

        Raises:
            LoadError: a file is broken, or there is not enough memory.
            Interrupted: `should_stop` was set.
        """
        if self._is_on_device:
            self._tokenizer = self._tokenizer or self._build_tokenizer()
        else:
            self._present(should_stop)

    def load(
        self, on_started: Callable[[LoadedModel], None], should_stop: threading.Event, on_share: OnShare = unheard
    ) -> LoadedModel:
        """An engine over the packed weights, which stay hosted.

        Raises:
            LoadError: a file is broken, or there is not enough memory.
            Interrupted: `should_stop` was set.
        """
        runner, tokenizer = self._present(should_stop)
        prepared, config = self._prepared, self._config
        spec, engine = prepared.spec.options, prepared.room.engine
        return LoadedModel(
            name=prepared.name,
            engine=encoder_engine(
                runner,
                max_batch_size=spec.max_batch_size or engine.max_batch_size,
                max_batch_delay_s=(
                    engine.max_batch_delay_s if spec.max_batch_delay_s is None else spec.max_batch_delay_s
                ),
            ),
            tokenizer=tokenizer,
            tokens=TokenTable(tokenizer),
            limits=RequestLimits(
                prepared.options.max_tokens, min(config.vocab_size, tokenizer.vocab_size), MAX_TOKEN_BYTES
            ),
            facts=self._facts(tokenizer),
            release=lambda: None,
            pooling=PoolingFacts(
                kind=config.task,
                max_tokens=prepared.options.max_tokens,
                normalize=config.normalize,
                dimension=config.width,
                is_sigmoid=config.is_sigmoid,
            ),
        )

    def keep(self) -> str:
        """They stay packed; those on a device do not come back from there."""
        return "an encoder's weights do not leave the GPU for it" if self._is_on_device else ""

    def close(self) -> int:
        """Gives back the weights; what was loaded from them has been released before."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._tokenizer = None
        self._prepared.fetched.release()
        return 0

    def _present(self, should_stop: threading.Event) -> tuple[EncoderRunner, ModelTokenizer]:
        if self._tokenizer is None:
            self._tokenizer = self._build_tokenizer()
        if self._runner is None:
            checkpoint = self._checkpoint
            assert checkpoint is not None, "it is closed only after the weights were packed"
            backend = open_encoder_backend(self._prepared.room.engine.backend)
            tensors = self._stoppable(checkpoint.tensors(), should_stop)
            self._runner = backend.load_encoder(self._config, tensors, self._prepared.options)
            self._revision = checkpoint.revision
            checkpoint.close()
            self._checkpoint = None
        return self._runner, self._tokenizer

    def _stoppable(
        self, tensors: Iterator[tuple[str, FloatArray]], should_stop: threading.Event
    ) -> Iterator[tuple[str, FloatArray]]:
        for item in tensors:
            if should_stop.is_set():
                raise Interrupted
            self._prepared.room.stand_aside(should_stop)
            yield item

    def _build_tokenizer(self) -> ModelTokenizer:
        """Models with equal tokenizers share one."""
        files = read_tokenizer_files(self._prepared.fetched.path)
        num_embeddings = self._config.vocab_size
        return self._prepared.room.tokenizers.get(
            "encoder:" + folder_origin(files, num_embeddings).hex(),
            _TOKENIZER_RATIO * len(files.tokenizer),
            functools.partial(tokenizer_of_files, files, num_embeddings, generates=False),
        )

    def _facts(self, tokenizer: ModelTokenizer) -> ModelFacts:
        config = self._config
        return ModelFacts(
            info=ModelInfoRecord(
                architecture=config.family,
                max_model_len=self._prepared.options.max_tokens,
                vocab_size=config.vocab_size,
                chat_template="",
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                tasks=(config.task,),
                embedding_dim=0 if config.num_labels else config.hidden_size,
            ),
            revision="@".join(part for part in (self._prepared.fetched.revision, self._revision) if part),
            weight_bytes=self._prepared.footprint.weight_bytes,
            kv_bytes=0,
            kv_bytes_per_token=0,
            block_size=1,
            num_blocks=0,
        )


def _options(spec: ModelSpec, config: EncoderConfig, room: EngineRoom) -> EncoderOptions:
    """The load's word where it has one.

    Raises:
        LoadError: a longer context is asked for than the model has.
    """
    wished = spec.options.max_model_len
    if wished is not None and wished > config.max_tokens:
        raise LoadError(
            f"max_model_len is {wished}; this model takes {config.max_tokens} tokens at most", param="max_model_len"
        )
    max_tokens = wished or min(config.max_tokens, room.engine.max_model_len or config.max_tokens)
    step_tokens = spec.options.max_num_batched_tokens or max(room.engine.step_tokens, MAX_STEP_TOKENS)
    return EncoderOptions(max_tokens, max(max_tokens, step_tokens), room.num_threads)


def _stamp(folder: Path) -> _Stamp:
    """Tells whether a file has changed; empty where the folder is gone."""
    try:
        files = [path for path in sorted((*folder.iterdir(), *folder.glob("*/config.json"))) if path.is_file()]
        stats = [(str(path), path.stat()) for path in files]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
