"""An open packed image: weights where they lie, the model's facts, and its tokenizer.

Made by `ImageStore.open`; read by the CPU backend (it is a `WeightsImage`) and by loading threads. Knows no budget.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.images.header import CHUNK_BYTES, PAGE_BYTES, round_up
from naru_worker.adapters.images.image_index import ImageIndex
from naru_worker.adapters.images.mapped_image import (
    MappedImage,
    acquire_image,
    is_verified,
    release_image,
    remember_verified,
    retain_image,
)
from naru_worker.adapters.images.presence import make_range_present
from naru_worker.adapters.ops.native_memory import is_resident
from naru_worker.adapters.ops.weights_image import MatrixPlace
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.serialized import tokenizer_from_bytes
from naru_worker.core.model_config import ModelConfig


class ModelImage:
    """One user's hold on a mapped image. Reading is thread-safe; after `close` every address of it is dead."""

    def __init__(self, path: Path, on_close: Callable[[], None] = lambda: None) -> None:
        """Maps the file, or shares the mapping it has in this process. `on_close` is called once.

        Raises:
            ImageDamaged: the file is not there, or no whole image of this version.
        """
        self.path = path
        self._mapped = acquire_image(path)
        self._on_close = on_close
        self._lock = threading.Lock()
        self._is_open = True
        index = self._mapped.index
        self.config: ModelConfig = index.config
        """Its EOS ids include the tokenizer's."""
        self._matrices = {matrix.names: matrix.place for matrix in index.matrices}
        self._names = {*index.vectors, *(name for m in index.matrices for name in (*m.names, *m.biases))}

    # --- weights: the `WeightsImage` protocol -----------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Of the image's first byte in this process."""
        return self._mapped.address

    @property
    def num_bytes(self) -> int:
        """Of the whole mapping."""
        return self._mapped.identity.num_bytes

    def has(self, name: str) -> bool:
        """Whether a tensor of that canonical name went into the image."""
        return name in self._names

    def matrix(self, names: tuple[str, ...]) -> MatrixPlace:
        """Where a stack of parts lies.

        Raises:
            LoadError: the image has no such matrix.
        """
        place = self._matrices.get(names)
        if place is None:
            raise LoadError(f"{self.path}: has no matrix of {names!r}; pack the model again")
        return place

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A vector's values; a view of the image, so make the first stage present before it is trusted.

        Raises:
            LoadError: the image has no such vector.
        """
        place = self.index.vectors.get(name)
        if place is None:
            raise LoadError(f"{self.path}: has no vector {name!r}; pack the model again")
        return self._mapped.bytes[place.offset : place.offset + place.length * 4].view(np.float32)

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def index(self) -> ImageIndex:
        """All the image says of its model."""
        return self._mapped.index

    @property
    def chat_template(self) -> str:
        """Empty: the model has none."""
        return self.index.chat_template

    @property
    def revision(self) -> str:
        """Content identity of the checkpoint it was packed from."""
        return self.index.revision

    @property
    def vocab_limit(self) -> int:
        """Ids at or above it are never drawn: the smaller of embedding and tokenizer."""
        return self.index.vocab_limit

    @property
    def weight_bytes(self) -> int:
        """Memory the weights take once present, vectors included."""
        return self._mapped.header.weights_end - PAGE_BYTES

    @property
    def weights_key(self) -> str:
        """Equal for images that share their pages."""
        return self.index.digest

    @property
    def tokenizer_key(self) -> str:
        """Equal for images with the very same tokenizer."""
        return self.index.tokenizer_key

    @property
    def tokenizer_bytes(self) -> int:
        """Memory the tokenizer takes once built."""
        return self.index.tokenizer_resident_bytes

    def build_tokenizer(self) -> ModelTokenizer:
        """Builds the tokenizer anew: slow, so ask a `TokenizerCache` by `tokenizer_key` first.

        Raises:
            ImageDamaged: its section is not what was packed.
            LoadError: the library does not take it.
        """
        with self._held() as mapped:
            section = mapped.tokenizer_section()
        return tokenizer_from_bytes(section, str(self.path))

    def layer_ends(self) -> tuple[int, ...]:
        """Bytes from the start that must be present for: the vectors and the embedding, each layer, and the head."""
        return self.index.stage_ends

    # --- memory -----------------------------------------------------------------------------------------------------

    def make_present(self, on_ready: Callable[[int], None], verify: bool, should_stop: threading.Event) -> None:
        """Brings the weights into memory in the order of execution; blocks, without the interpreter's lock.

        `on_ready` gets the number of bytes from the image's start that are present (and verified): after each stage, or
        once where the system has all of them.
        With `verify` the sums are compared, unless that was done for this very file since the machine was started.

        Raises:
            ImageDamaged: a chunk is damaged; what was reported as ready before it is whole.
            LoadStopped: it was told to stop.
        """
        with self._held() as mapped:
            verify = verify and not is_verified(mapped)
            ready, ends = PAGE_BYTES, self.layer_ends()
            if not verify and is_resident(mapped.address + ready, mapped.header.weights_end - ready):
                ends = ends[-1:]  # to be mapped, not read: in one go it is faster than who waits could begin
            for stage_end in ends:
                if stage_end > ready:
                    end = min(PAGE_BYTES + round_up(stage_end - PAGE_BYTES, CHUNK_BYTES), mapped.header.weights_end)
                    make_range_present(mapped, ready, end, verify, should_stop)
                    ready = end
                on_ready(ready)
            if verify:
                remember_verified(mapped.path, mapped.identity)

    @property
    def is_mapped(self) -> bool:
        """Whether somebody in this process has the image open."""
        return self._mapped.num_users > 0

    def close(self) -> None:
        """Lets go of the mapping; again is nothing."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            release_image(self._mapped)
            self._on_close()

    @contextlib.contextmanager
    def _held(self) -> Iterator[MappedImage]:
        """The mapping, which stays even if another thread closes this image meanwhile.

        Raises:
            LoadError: it is closed already.
        """
        with self._lock:
            if not self._is_open:
                raise LoadError(f"{self.path}: the image is closed")
            retain_image(self._mapped)
        try:
            yield self._mapped
        finally:
            release_image(self._mapped)
