"""The rig of these tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from naru_operator.adapters.route_map import RouteMap

if TYPE_CHECKING:
    from cluster_rig import ClusterRig


@pytest.fixture
async def rig(route_map: RouteMap, redis_server_url: str) -> AsyncIterator[ClusterRig]:
    """One replica over an empty cluster and an empty route map."""
    from cluster_rig import cluster_rig

    async with cluster_rig(route_map, redis_server_url) as made:
        yield made
