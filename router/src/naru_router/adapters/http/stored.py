"""Files and batches put together: their endpoints by path, what runs beside the servers, what is closed at the end.

Called once by the app. Without a folder the paths are there and say how to turn them on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from naru_router.adapters.batches.batch_store import BatchStore
from naru_router.adapters.batches.line_call import LineCaller, batch_callers
from naru_router.adapters.batches.runner import BatchRunner
from naru_router.adapters.http.application import Endpoint
from naru_router.adapters.http.batches import BatchCancelEndpoint, BatchDesk, BatchEndpoint, BatchesEndpoint
from naru_router.adapters.http.files import FILES_PATH, FileContentEndpoint, FileEndpoint, FilesEndpoint
from naru_router.adapters.http.generation import Edge
from naru_router.adapters.leases import Leases
from naru_router.adapters.storage.file_shelf import FileShelf
from naru_router.adapters.storage.record_store import RecordStore
from naru_router.core.caller import Caller


@dataclass(frozen=True, slots=True)
class Stored:
    """For the application and the app."""

    endpoints: Mapping[bytes, Endpoint]
    patterns: Sequence[tuple[re.Pattern[bytes], Endpoint]]
    services: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=dict)
    closers: Sequence[Callable[[], Awaitable[None]]] = ()


def stored(
    edge: Edge,
    store: RecordStore | None,
    batch_endpoints: Callable[[Edge], Mapping[str, Endpoint]],
    leases: Leases,
    *,
    caller_named: Callable[[str], Caller],
    most_in_flight: Callable[[], int],
    max_file_bytes: int,
) -> Stored:
    """Makes all of it; starts nothing.

    Args:
        edge: of the live endpoints.
        store: of the folder; None: nothing is stored here. Closed by `closers`.
        batch_endpoints: makes the endpoints that batches may call, by path, for an edge of their own.
        leases: of this router.
        caller_named: a tenant by its name.
        most_in_flight: requests of batches at this instant.
        max_file_bytes: of an upload.
    """
    if store is None:
        return _paths(edge, None, None, max_file_bytes)
    shelf = FileShelf(store)
    batches = BatchStore(shelf)
    batch_edge = dataclasses.replace(edge, caller_of=batch_callers(caller_named))
    runner = BatchRunner(
        batches,
        LineCaller(batch_endpoints(batch_edge)),
        leases,
        most_in_flight=most_in_flight,
        is_leaving=lambda: edge.gate.is_leaving,
        max_line_bytes=edge.max_body_bytes,
    )
    paths = _paths(edge, shelf, BatchDesk(batches, runner), max_file_bytes)
    return dataclasses.replace(paths, services={"batches": runner.run}, closers=(store.close,))


def _paths(edge: Edge, shelf: FileShelf | None, desk: BatchDesk | None, max_file_bytes: int) -> Stored:
    return Stored(
        {FILES_PATH: FilesEndpoint(edge, shelf, max_file_bytes), b"/v1/batches": BatchesEndpoint(edge, desk)},
        [
            (re.compile(rb"/v1/files/(?P<id>[^/]+)"), FileEndpoint(edge, shelf)),
            (re.compile(rb"/v1/files/(?P<id>[^/]+)/content"), FileContentEndpoint(edge, shelf)),
            (re.compile(rb"/v1/batches/(?P<id>[^/]+)"), BatchEndpoint(edge, desk)),
            (re.compile(rb"/v1/batches/(?P<id>[^/]+)/cancel"), BatchCancelEndpoint(edge, desk)),
        ],
    )
