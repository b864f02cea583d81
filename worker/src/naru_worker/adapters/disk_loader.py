"""The loader of a worker process, out of its settings. Called by `app`.

Imported late: numpy and the tokenizers library load while the server already starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from naru_worker.adapters import cores, machine
from naru_worker.adapters.engine.loader import Loader
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool
    from naru_worker.adapters.ops.tensor_parallel.rank_group import RankGroup


def disk_loader(
    ranks: RankGroup | None,
    sleep_slots: PinnedPool | None,
    settings: WorkerSettings,
    ledger: MemoryLedger,
    is_busy: Callable[[], bool],
) -> Loader:
    """Loads what lies on this node's disk, or is fetched to it.

    `ranks`: processes that models are cut over; `sleep_slots`: where weights wait that leave a GPU.
    """
    from naru_worker.adapters.engine.loading import DiskLoader
    from naru_worker.adapters.engine.wiring import EngineRoom
    from naru_worker.adapters.fetch.cache import default_home
    from naru_worker.adapters.images.store import ImageStore

    home = Path(settings.server.home).expanduser() if settings.server.home else default_home()
    store = None
    if settings.engine.backend == "cpu" and settings.images.image_budget_bytes != 0:
        folder = Path(settings.images.image_dir).expanduser() if settings.images.image_dir else home / "images"
        limit = settings.images.image_budget_bytes
        store = ImageStore(folder, machine.image_budget_bytes(folder) if limit < 0 else limit)
    num_threads = cores.compute_threads(settings.engine.num_threads).count
    room = EngineRoom(
        settings.engine, settings.memory, num_threads, ledger, is_busy, ranks=ranks, sleep_slots=sleep_slots
    )
    return DiskLoader(room, home, store, settings.fetch)
