"""Labels of the nodes that workers run on, for models whose copies are spread over more than nodes. Used by the models'
control.

Nodes are read one by one, only those that hold workers, and only while some model asks for a label: where none does,
no right on nodes is needed. Where the right is missing, copies are spread by node. What was read goes to the route map,
for the routers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from naru_operator.adapters.cluster.leases import Leases
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import Forbidden, NotFound
from naru_operator.adapters.kube.kinds import NODE
from naru_operator.core.kube import Object, ObjectKey
from naru_proto.errors import NaruError

_log = logging.getLogger(__name__)

BY_NODE = frozenset({"", "kubernetes.io/hostname"})
"""Keys for which a worker's node is enough."""
_REREAD_S = 600.0
"""Labels of failure domains stay for a node's life; one that was labelled late is seen after so long."""
_RETRY_S = 60.0
"""Before nodes are asked for again that could not be read."""
MAX_READS = 16
"""Nodes that are read in one turn; the others follow in the next."""


class NodeLabels:
    """asyncio thread only."""

    def __init__(self, client: KubeClient, leases: Leases) -> None:
        self._client, self._leases = client, leases
        self._read: dict[str, tuple[float, Mapping[str, str]]] = {}
        """Node to when it was read, and all its labels."""
        self._paused_until_s = 0.0
        self._has_complained = False
        self.is_behind = False
        """There are more nodes to read."""

    async def update(
        self, keys: Iterable[str], known: Mapping[str, Mapping[str, str]]
    ) -> Mapping[str, Mapping[str, str]]:
        """Node to its labels among ``keys``, as far as they can be read. ``known``: what the route map says now."""
        wanted_keys = set(keys) - BY_NODE
        nodes = {record.node for record in self._leases.board.workers.values() if record.node} if wanted_keys else set()
        await self._read_some(nodes)
        self._read = {node: each for node, each in self._read.items() if node in nodes}
        labels = {
            node: {key: found[key] for key in sorted(wanted_keys) if key in found}
            for node, (_, found) in sorted(self._read.items())
        }
        # What a predecessor wrote holds until it was read anew.
        labels = {node: dict(known[node]) for node in sorted(nodes & known.keys() - labels.keys())} | labels
        await self._write(labels, known)
        return labels

    async def _read_some(self, nodes: set[str]) -> None:
        now_s = time.monotonic()
        due = sorted(node for node in nodes if node not in self._read or now_s - self._read[node][0] > _REREAD_S)
        self.is_behind = len(due) > MAX_READS and now_s >= self._paused_until_s
        if now_s < self._paused_until_s:
            return
        for node in due[:MAX_READS]:
            try:
                raw = await self._client.get(NODE.name, ObjectKey("", node))
            except NotFound:
                self._read[node] = (now_s, {})  # a worker of another cluster, or a node that has just gone
            except NaruError as exc:
                self._paused_until_s = now_s + (_REREAD_S if isinstance(exc, Forbidden) else _RETRY_S)
                self.is_behind = False
                self._complain(exc)
                return
            else:
                self._read[node] = (now_s, _labels(raw))
                self._has_complained = False

    def _complain(self, exc: NaruError) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("labels of nodes cannot be read, so copies are spread by node (%s)", exc.message)

    async def _write(self, labels: Mapping[str, Mapping[str, str]], known: Mapping[str, Mapping[str, str]]) -> None:
        news = {node: found for node, found in labels.items() if known.get(node) != found}
        try:
            await self._leases.write_nodes(news, sorted(known.keys() - labels.keys()))
        except NaruError as exc:
            _log.debug("labels of nodes were not written: %s", exc.message)


def _labels(raw: Object) -> dict[str, str]:
    metadata = raw.get("metadata")
    found = metadata.get("labels") if isinstance(metadata, dict) else None
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str) and isinstance(value, str)}
