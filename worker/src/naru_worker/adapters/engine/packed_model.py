"""A model that is loaded from its packed image: mapped, not copied, and started while its last layers still arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loader import Interrupted
from naru_worker.adapters.engine.sizing import FileFacts, ModelSize, merge_options, runner_options, size_model
from naru_worker.adapters.engine.wiring import EngineRoom, ModelParts, build_engine
from naru_worker.adapters.fetch import FetchedModel
from naru_worker.adapters.images.errors import ImageDamaged, LoadStopped
from naru_worker.adapters.images.model_image import ModelImage
from naru_worker.adapters.images.store import ImageStore
from naru_worker.adapters.machine import mapped_file_bytes
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.weights.watched_checkpoint import OnShare, unheard
from naru_worker.core.residency import ModelSpec


def prepare_packed(
    name: str, spec: ModelSpec, fetched: FetchedModel, path: Path, store: ImageStore, room: EngineRoom
) -> PackedModel:
    """Reads an image's index to learn what the model will take.

    Raises:
        LoadError: the image is damaged (it is removed then, and packed anew at the next try), or it can never fit.
    """
    from naru_worker.adapters.ops import cpu

    image = open_image(store, path)
    try:
        config = image.config
        engine = merge_options(room.engine, spec.options)
        base = runner_options(room.engine, engine, config.max_position_embeddings, room.num_threads)
        facts = FileFacts(
            config,
            weights_key=image.weights_key,
            weight_bytes=image.weight_bytes,
            kv_block_bytes=cpu.kv_block_bytes(config, base),
            workspace_bytes=cpu.workspace_bytes(config, base),
            tokenizer_bytes=image.tokenizer_bytes,
        )
        size = size_model(name, facts, base, room.engine, room.memory, spec.options, room.ledger.budget_bytes)
    finally:
        image.close()
    return PackedModel(name, fetched, path, store, room, size)


def open_image(store: ImageStore, path: Path) -> ModelImage:
    """Maps an image; a damaged one is removed, so that the next try packs it anew.

    Raises:
        ImageDamaged: it is not what was packed.
    """
    try:
        return store.open(path)
    except ImageDamaged:
        store.remove(path)
        raise


class PackedModel:
    """Prepared: see `PreparedModel`."""

    def __init__(
        self, name: str, fetched: FetchedModel, path: Path, store: ImageStore, room: EngineRoom, size: ModelSize
    ) -> None:
        self.footprint = size.footprint
        self.detail = size.reason
        self._name = name
        self._fetched = fetched
        self._path = path
        self._store = store
        self._room = room
        self._size = size

    def is_current(self) -> bool:
        """Whether the source is unchanged and its image still here."""
        return self._store.find(self._fetched.path) == self._path

    def open(self) -> PackedHosted:
        """Maps the image.

        Raises:
            LoadError: it is damaged or gone.
        """
        image = open_image(self._store, self._path)
        self._fetched.touch()
        return PackedHosted(self._name, self._fetched, self._path, self._store, self._room, self._size, image)


class PackedHosted:
    """A mapped image."""

    def __init__(
        self,
        name: str,
        fetched: FetchedModel,
        path: Path,
        store: ImageStore,
        room: EngineRoom,
        size: ModelSize,
        image: ModelImage,
    ) -> None:
        self._name = name
        self._fetched = fetched
        self._path = path
        self._store = store
        self._room = room
        self._size = size
        self._image = image
        self._is_present = False
        self._built: ModelTokenizer | None = None

    def make_present(self, should_stop: threading.Event) -> None:
        """Reads all weights into memory and builds the tokenizer.

        Raises:
            LoadError: the image is damaged (it is removed) or cannot be read.
            Interrupted: `should_stop` was set.
        """
        self._tokenizer()
        self._arrive(lambda num_bytes: None, should_stop)

    def load(
        self, on_started: Callable[[LoadedModel], None], should_stop: threading.Event, on_share: OnShare = unheard
    ) -> LoadedModel:
        """An engine over the image. Unless all is present, it starts first and the weights follow, layer by layer.

        Raises:
            LoadError: the image is damaged (it is removed) or cannot be read.
            Interrupted: `should_stop` was set.
        """
        from naru_worker.adapters.ops import cpu

        self._room.stand_aside(should_stop)
        tokenizer = self._tokenizer()
        runner = cpu.load_image_runner(
            self._image, self._size.runner_options, ready_bytes=None if self._is_present else 0
        )
        is_started = False
        try:
            self._room.stand_aside(should_stop)
            image = self._image
            parts = ModelParts(
                name=self._name,
                config=image.config,
                chat_template=image.chat_template,
                weights_revision=image.revision,
                revision="@".join(part for part in (self._fetched.revision, image.revision) if part),
                tokenizer=tokenizer,
                vocab_limit=image.vocab_limit,
                size=self._size,
            )
            model = build_engine(self._room, parts, runner)
            self._room.stand_aside(should_stop)
            if not self._is_present:
                is_started = True
                on_started(model)

                def arrived(num_bytes: int) -> None:
                    runner.set_ready_bytes(num_bytes)
                    on_share(num_bytes, image.num_bytes)

                self._arrive(arrived, should_stop)
                # Behind the weights are only parts that no step reads.
                runner.set_ready_bytes(self._image.num_bytes)
            return model
        except BaseException:
            # Who was given the model releases it, once the engine thread has let go; until then a step that waits for
            # weights must not wait for ever.
            runner.fail() if is_started else runner.close()
            raise

    def keep(self) -> str:
        """They are the image's pages, which stay mapped."""
        return ""

    def close(self) -> int:
        """Unmaps the image, and looks whether it is gone: not while another model uses the same one."""
        self._image.close()
        return 0 if self._image.is_mapped else mapped_file_bytes(self._path)

    def _tokenizer(self) -> ModelTokenizer:
        """Kept while it is hosted: models with equal tokenizers share one."""
        if self._built is None:
            image = self._image
            self._built = self._room.tokenizers.get(image.tokenizer_key, image.tokenizer_bytes, image.build_tokenizer)
        return self._built

    def _arrive(self, on_ready: Callable[[int], None], should_stop: threading.Event) -> None:
        try:
            self._image.make_present(on_ready, verify=True, should_stop=should_stop)
        except ImageDamaged:
            self._store.remove(self._path)
            raise
        except LoadStopped as exc:
            raise Interrupted from exc
        except OSError as exc:
            raise LoadError(f"image {self._path.name!r} cannot be read: {exc.strerror or exc}") from exc
        self._is_present = True
