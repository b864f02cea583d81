"""The election over HTTP: who leads, who follows at once, who stops by itself when nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from fake_kube_api import FakeKubeApi, Reply, Seen, hang, refusal

from naru_operator.adapters.kube.client import ClientSettings, KubeClient
from naru_operator.adapters.kube.election import Election, election_client_settings
from naru_operator.adapters.kube.errors import Forbidden
from naru_operator.core.leadership import Timing

LEASES = "/apis/coordination.k8s.io/v1/namespaces/naru/leases"
LEASE = f"{LEASES}/naru-operator"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
SHORT = Timing(lease_s=1.2, deadline_s=0.7, renew_s=0.2)
LONG = Timing(lease_s=3600, deadline_s=1800, renew_s=0.1)
"""No test outlives this lease, however slow the machine is."""


class Changes:
    """What an election told of itself."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self._came = asyncio.Event()

    def hear(self, is_leader: bool) -> None:
        self.told.append(is_leader)
        self._came.set()

    async def last(self, wanted: bool) -> None:
        async with asyncio.timeout(20):
            while not self.told or self.told[-1] is not wanted:
                self._came.clear()
                await self._came.wait()


class Leases:
    """Holds one lease as an API server does."""

    def __init__(self, api: FakeKubeApi) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        api.on("GET", LEASE, self.get)
        api.on("POST", LEASES, self.create)
        api.on("PUT", LEASE, self.replace)
        api.on("POST", REVIEWS, Reply(201, {"status": {"allowed": True}}))

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""

    async def get(self, _seen: Seen, _request: web.Request) -> Reply:
        return Reply(body=self.lease) if self.lease else refusal(404, "NotFound", "no lease")

    async def create(self, seen: Seen, _request: web.Request) -> Reply:
        return refusal(409, "AlreadyExists", "it exists") if self.lease else self.stored(seen)

    async def replace(self, seen: Seen, _request: web.Request) -> Reply:
        if not self.lease or seen.body["metadata"].get("resourceVersion") != str(self.version):
            return refusal(409, "Conflict", "the object has been modified")
        return self.stored(seen)

    def stored(self, seen: Seen) -> Reply:
        self.version += 1
        self.lease = {**seen.body, "metadata": {**seen.body["metadata"], "resourceVersion": str(self.version)}}
        return Reply(body=self.lease)


@pytest.fixture
async def api() -> AsyncIterator[FakeKubeApi]:
    async with FakeKubeApi() as running:
        yield running


@contextlib.asynccontextmanager
async def replica(
    api: FakeKubeApi, identity: str, changes: Changes | None = None, timing: Timing = LONG
) -> AsyncIterator[Election]:
    heard = changes or Changes()
    patient = ClientSettings(2, connect_timeout_s=20, read_timeout_s=20, retry_pauses_s=())
    client = KubeClient(api.configuration(), patient if timing is LONG else election_client_settings(timing))
    try:
        async with Election(client, "naru", identity, timing=timing, on_change=heard.hear) as election:
            yield election
    finally:
        await client.close()


async def leads(election: Election) -> None:
    async with asyncio.timeout(20):
        await election.wait_leading()


async def test_the_first_replica_leads_and_the_second_waits(api: FakeKubeApi) -> None:
    leases = Leases(api)
    async with replica(api, "one") as one:
        await leads(one)
        async with replica(api, "two") as two:
            await api.wait_for("GET", LEASE, 8)
            assert one.is_leader and not two.is_leader and two.holder == "one"
            assert leases.holder == "one"


async def test_a_clean_end_hands_over_at_once(api: FakeKubeApi) -> None:
    leases = Leases(api)
    async with contextlib.AsyncExitStack() as stack:
        two = None
        async with replica(api, "one") as one:
            await leads(one)
            two = await stack.enter_async_context(replica(api, "two"))
        assert not one.is_leader
        assert two is not None
        await leads(two)
        assert leases.lease is not None and leases.lease["spec"]["leaseTransitions"] == 1
    assert leases.holder == ""


async def test_a_leader_that_reaches_nobody_stops_by_itself_and_comes_back(api: FakeKubeApi) -> None:
    leases = Leases(api)
    changes = Changes()
    async with replica(api, "one", changes, SHORT) as one:
        await leads(one)
        api.on("PUT", LEASE, hang)
        api.on("GET", LEASE, hang)
        await changes.last(False)
        assert not one.is_leader
        assert leases.holder == "one"  # the record still says so: others wait for its end
        api.on("GET", LEASE, leases.get)
        api.on("PUT", LEASE, leases.replace)
        await leads(one)
        await changes.last(True)
    assert changes.told[-1] is False


async def test_a_stale_lease_is_taken_over(api: FakeKubeApi) -> None:
    leases = Leases(api)
    leases.version = 4
    spec = {"holderIdentity": "dead", "leaseDurationSeconds": 1, "renewTime": "2999-01-01T00:00:00.000000Z"}
    leases.lease = {"kind": "Lease", "metadata": {"name": "naru-operator", "resourceVersion": "4"}, "spec": spec}
    async with replica(api, "one", timing=SHORT) as one:
        await leads(one)
        assert leases.holder == "one"


async def test_who_lost_the_lease_to_another_stops(api: FakeKubeApi) -> None:
    leases = Leases(api)
    changes = Changes()
    async with replica(api, "one", changes) as one:
        await leads(one)
        assert leases.lease is not None
        leases.version += 1
        taken = {**leases.lease["spec"], "holderIdentity": "thief"}
        leases.lease = {**leases.lease, "metadata": {"resourceVersion": str(leases.version)}, "spec": taken}
        await changes.last(False)
        assert not one.is_leader and one.holder == "thief"


async def test_an_edit_of_the_lease_by_somebody_else_costs_no_lead(api: FakeKubeApi) -> None:
    leases = Leases(api)
    changes = Changes()
    async with replica(api, "one", changes) as one:
        await leads(one)
        assert leases.lease is not None
        leases.version += 1
        leases.lease["metadata"]["resourceVersion"] = str(leases.version)
        writes = len(api.requests("PUT", LEASE))
        await api.wait_for("PUT", LEASE, writes + 3)
        assert changes.told == [True] and one.is_leader


async def test_a_broken_lease_object_is_no_obstacle(api: FakeKubeApi) -> None:
    leases = Leases(api)
    leases.version = 4
    leases.lease = {"metadata": {"resourceVersion": "4"}, "spec": {"leaseDurationSeconds": "long", "renewTime": 3}}
    async with replica(api, "one") as one:
        await leads(one)


async def test_a_missing_permission_fails_the_start_and_names_it(api: FakeKubeApi) -> None:
    Leases(api)

    async def review(seen: Seen, _request: web.Request) -> Reply:
        asked = seen.body["spec"]["resourceAttributes"]
        return Reply(201, {"status": {"allowed": asked["verb"] != "update"}})

    api.on("POST", REVIEWS, review)
    with pytest.raises(Forbidden, match=r"permission to update leases\.coordination\.k8s\.io in namespace 'naru'"):
        async with replica(api, "one"):
            raise AssertionError("it must not start")
    assert api.requests("POST", LEASES) == []


async def test_a_start_without_any_api_server_waits_for_it(api: FakeKubeApi) -> None:
    leases = Leases(api)
    api.on("POST", REVIEWS, refusal(503, "", ""))
    api.on("GET", LEASE, refusal(503, "", ""), refusal(503, "", ""), leases.get)
    async with replica(api, "one") as one:
        await leads(one)
