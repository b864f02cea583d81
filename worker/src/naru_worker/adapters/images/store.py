"""The packed images of a node: packed once, found again by their source, kept under a budget of bytes.

Called by loading threads of the worker; several workers of a node may share the folder. Images are addressed by what
they were packed from, so equal models are one file and share memory. The disk holds at every instant a whole image, or
none. Knows nothing of memory budgets, nor of who uses a model.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.images.errors import StoreFull
from naru_worker.adapters.images.eviction import choose_victims
from naru_worker.adapters.images.file_locks import FileLocks
from naru_worker.adapters.images.image_folder import ImageFolder, Partial
from naru_worker.adapters.images.mapped_image import FileIdentity, remember_verified
from naru_worker.adapters.images.model_image import ModelImage
from naru_worker.adapters.images.packing import PackingProcess, PackPlan
from naru_worker.adapters.images.packing_pool import PackingPool
from naru_worker.adapters.images.source_files import SourceFiles, settled_source_files, source_files

MAX_TRIES = 3
"""A source that is being written changes under each of them."""
_STORE_LOCK = "store"

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


class ImageStore:
    """Thread-safe; every method may block on the disk."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        """Makes the folder, and removes what crashes have left in it. Images above the budget go with the next one.

        Raises:
            LoadError: the folder cannot be used.
        """
        self._budget_bytes = budget_bytes
        self._folder = ImageFolder(folder.absolute())
        self._locks = FileLocks(self._folder.locks)
        self._lock = threading.Lock()
        self._in_use: Counter[str] = Counter()
        self._packing = PackingPool()
        # Not every caller has an end at which it closes the store.
        weakref.finalize(self, self._packing.close)
        never = threading.Event()
        with self._folder.writing(), self._locks.hold(_STORE_LOCK, never):
            self._folder.clean_partials()
            self._folder.clean_rest()
            self._locks.clean()

    def close(self) -> None:
        """Ends idle packing processes now, not when they have been idle for long. Nothing is packed afterwards."""
        self._packing.close()

    @property
    def budget_bytes(self) -> int:
        """What images may take on the disk, those being packed included."""
        return self._budget_bytes

    def find(self, source: Path) -> Path | None:
        """The source's image if it is here and the source looks as it did; a few stat calls, nothing is opened."""
        try:
            return self._folder.recorded(source_files(source))
        except LoadError:
            return None

    def ensure(self, source: Path, on_progress: Progress, should_stop: threading.Event) -> Path:
        """The source's image, packed if it is not here; blocks.

        One of all that want it packs, in whatever thread or process; `on_progress` is called while this one does.

        Raises:
            StoreFull: no room on the disk or in the budget, now.
            LoadError: the source cannot be served, the image is larger than the budget, or the folder cannot be used.
            LoadStopped: it was told to stop.
        """
        for _ in range(MAX_TRIES):
            files = settled_source_files(source, should_stop)
            path = self._folder.recorded(files)
            if path is None:
                path = self._ensure(files, on_progress, should_stop)
            if path is not None:
                self._folder.touch(path)
                return path
        raise LoadError(f"{source}: changed {MAX_TRIES} times while it was packed; load it when it is complete")

    def open(self, path: Path) -> ModelImage:
        """Maps an image. It is in use until it is closed, and is not evicted by this process.

        Raises:
            ImageDamaged: it is not whole, or gone by now; `remove` it and `ensure` it again.
        """
        self.pin(path)
        try:
            image = ModelImage(path, on_close=lambda: self.unpin(path))
        except BaseException:
            self.unpin(path)
            raise
        self._folder.touch(path)
        return image

    def pin(self, path: Path) -> None:
        """In use once more."""
        with self._lock:
            self._in_use[path.stem] += 1

    def unpin(self, path: Path) -> None:
        """In use once less."""
        with self._lock:
            self._in_use[path.stem] -= 1
            assert self._in_use[path.stem] >= 0, "an image is unpinned as often as it was pinned"
            if not self._in_use[path.stem]:
                del self._in_use[path.stem]

    def remove(self, path: Path) -> None:
        """Removes an image, in use or not: mappings of it live on.

        Raises:
            LoadError: the folder cannot be written.
        """
        with self._folder.writing():
            self._folder.remove(path)

    def used_bytes(self) -> int:
        """What is taken of the budget."""
        return sum(image.num_bytes for image in self._folder.images()) + self._folder.partial_bytes()

    def num_images(self) -> int:
        """Whole images in the folder."""
        return len(self._folder.images())

    def _ensure(self, files: SourceFiles, on_progress: Progress, should_stop: threading.Event) -> Path | None:
        """Packs in turn with others that want the same source; None: it changed meanwhile."""
        with self._locked(f"source-{files.key}", should_stop):
            path = self._folder.recorded(files)
            if path is not None:
                return path
            partial_path = self._folder.partial_path()
            with self._packing.planned(files.path, partial_path, should_stop) as (process, plan):
                # Another source with the same content may be being packed.
                with self._locked(f"image-{plan.digest}", should_stop):
                    path = self._folder.image(plan.digest)
                    if not self._folder.is_whole(path):
                        self.remove(path)
                        if not self._pack(files, process, plan, partial_path, on_progress, should_stop):
                            return None
                    elif source_files(files.path) != files:
                        return None
                    self._folder.record(files, path)
                    return path

    def _pack(
        self,
        files: SourceFiles,
        process: PackingProcess,
        plan: PackPlan,
        partial_path: Path,
        on_progress: Progress,
        should_stop: threading.Event,
    ) -> bool:
        """Writes and publishes the image; False: the source changed, and nothing was published."""
        partial = self._reserve(plan, partial_path, should_stop)
        try:
            process.write(on_progress)
            if source_files(files.path) != files:
                return False
            path = self._folder.image(plan.digest)
            self._folder.publish(partial, path)
            # Its sums were just taken from the file as it lies there: the first load need not compare them again.
            remember_verified(path, FileIdentity.of(path.stat()))
            return True
        finally:
            partial.discard()

    def _reserve(self, plan: PackPlan, partial_path: Path, should_stop: threading.Event) -> Partial:
        """Takes the space, evicting what it must; the file stands for the booking, in every process."""
        if plan.num_bytes > self._budget_bytes:
            raise LoadError(
                f"the packed model needs {plan.num_bytes} bytes on disk, but the budget for all images is "
                f"{self._budget_bytes}; raise it"
            )
        with self._locked(_STORE_LOCK, should_stop):
            self._folder.clean_partials()
            over_bytes = self.used_bytes() + plan.num_bytes - self._budget_bytes
            self._evict(max(over_bytes, plan.num_bytes - self._folder.disk_free_bytes()), plan.num_bytes)
            return self._folder.make_partial(partial_path, plan.num_bytes)

    def _evict(self, missing_bytes: int, needed_bytes: int) -> None:
        if missing_bytes <= 0:
            return
        # The lock is held to the end: nobody pins what is about to go.
        with self._lock, self._folder.writing():
            images = self._folder.images()
            victims = choose_victims(images, missing_bytes, self._in_use)
            if victims is None:
                used = sum(image.num_bytes for image in images)
                busy = sum(image.num_bytes for image in images if image.digest in self._in_use)
                raise StoreFull(
                    f"image folder {str(self._folder.root)!r}: the packed model needs {needed_bytes} bytes; of the "
                    f"budget of {self._budget_bytes} bytes {used} are taken, {busy} by images in use, and the disk has "
                    f"{self._folder.disk_free_bytes()} free; unload a model, free disk space, or raise the budget"
                )
            for victim in victims:
                self._folder.remove(self._folder.image(victim.digest))

    @contextlib.contextmanager
    def _locked(self, name: str, should_stop: threading.Event) -> Iterator[None]:
        """A lock whose errors are sentences; those of what is done under it pass as they are."""
        with contextlib.ExitStack() as stack:
            with self._folder.writing():
                stack.enter_context(self._locks.hold(name, should_stop))
            yield
