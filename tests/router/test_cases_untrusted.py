"""What others made up: headers, route keys, clocks, and records that this router does not understand."""

from __future__ import annotations

import functools
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, simple
from stub_worker import say
from telling_worker import start_telling

from naru_proto import names
from naru_proto.registry import LeaseRecord
from naru_proto.tenants import key_digest
from naru_proto.v1 import worker_pb2 as wire
from naru_router.adapters.leases import Leases, connect
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.tenancy.quota_keeper import QuotaKeeper

A, B = "nk-a", "nk-b"
SECRET = "hunter2"


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    path = tmp_path / "tenants.json"
    tenants = [{"name": name, "keys": [key_digest(key)]} for name, key in (("a", A), ("b", B))]
    path.write_text(json.dumps({"tenants": tenants}))
    return str(path)


async def test_nobody_becomes_another_tenant_by_saying_so(rig: Rig, tenants_file: str) -> None:
    await rig.publish_model()
    worker = await rig.start_worker()
    await rig.start_router(tenants_file=tenants_file)
    claims = {
        "x-tenant": "b",
        "x-naru-tenant": "b",
        "x-tenant-id": "b",
        "naru-tenant": "b",
        "x-cache-salt": "b",
        "x-naru-route": "w9",
        "x-naru-priority": "-100",
        "x-forwarded-user": "b",
    }
    for path in (CHAT, COMPLETION):
        worker.requests.clear()
        plain, other = {"x-api-key": A}, {"x-api-key": B}
        fields: dict[str, Any] = {"tenant": "b", "cache_salt": "b", "route_keys": "AAAA", "salt": "b", "adapter": "x"}
        await rig.client.post(path, json=body(path), headers=plain)
        await rig.client.post(path, json=body(path, **fields), headers={**plain, **claims})
        await rig.client.post(path, json=body(path), headers=other)
        assert (await rig.client.post(path, json=body(path, **fields), headers=claims)).status_code == 401
        mine, claimed, others = worker.requests
        assert (claimed.tenant, claimed.cache_salt, claimed.route_keys, claimed.adapter) == (
            "a",
            mine.cache_salt,
            mine.route_keys,
            "",
        )
        assert claimed.priority == mine.priority == 0 and claimed.tenant_weight == mine.tenant_weight
        assert others.cache_salt != mine.cache_salt != b""


@pytest.mark.parametrize(
    "update",
    [
        wire.RouteKeyUpdate(model=MODEL, epoch=1, added=b"x" * 15),
        wire.RouteKeyUpdate(model=MODEL, epoch=-5, added=b"x" * 16),
        wire.RouteKeyUpdate(model="m" * 100_000, epoch=1, is_snapshot=True),
        wire.RouteKeyUpdate(model="nobody's", epoch=1, added=b"x" * 16),
        wire.RouteKeyUpdate(model=MODEL, epoch=1, removed=b"x" * 16, is_snapshot=True, added=b"x" * 16 * 50_000),
    ],
    ids=["half a key", "epoch of the past", "long name", "no snapshot", "one key fifty thousand times"],
)
async def test_keys_that_a_worker_made_up_cost_no_request_and_are_told_once(
    rig: Rig, caplog: pytest.LogCaptureFixture, update: wire.RouteKeyUpdate
) -> None:
    await rig.publish_model()
    worker = await start_telling(rig, "w0", say("a"), rate=1000.0)
    await rig.start_router()
    for _ in range(3):
        for stream in worker._streams:
            stream.tell(update)
        assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 200
    index = rig.app.fleet.news.index
    index.check()
    assert index.num_keys <= 1 and rig.app.fleet.num_up() == 1
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("news")]
    assert len(lines) <= 1 and all(len(line) < 500 for line in lines)


def _shifted(offset_s: float) -> float:
    return time.monotonic() + offset_s


async def test_leases_and_quotas_go_by_the_time_of_redis_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers whose clocks are days apart agree about both."""
    clients = [connect(rig.redis_url) for _ in range(3)]
    now_s = time.time()
    offsets_s = (0.0, 86_400.0 * 3, -86_400.0 * 3)
    limit, granted = 30, 0
    for number, (client, offset_s) in enumerate(zip(clients, offsets_s, strict=True)):
        monkeypatch.setattr(time, "time", functools.partial(float, now_s + offset_s))
        leases = Leases(client, f"r{number}")
        assert (await leases.take("one", 1000.0) is not None) == (number == 0)
        held = await leases.read("one")
        assert held is not None and held.holder == "r0"
        assert await leases.fence("one", held) > held.token
        clock = functools.partial(_shifted, 1e6 + offset_s)
        keeper = QuotaKeeper(client, f"r{number}", lambda: 3, Metrics(), clock=clock)
        account = keeper._account("t", "requests", limit)
        for _ in range(40):
            await keeper._exchange([account])
            granted += account.share.take(1, keeper.now_s())
            account.share.waiting = 1
    assert granted <= limit
    assert granted >= limit / 2, "the first ones get theirs"
    for client in clients:
        await client.aclose()


async def test_records_of_a_newer_version_are_served_as_far_as_they_are_understood(
    rig: Rig, tenants_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    newer: dict[str, Any] = {
        "strategy": "quantum_affinity",
        "cache_isolation": "shared_with_friends",
        "policy": "eternal",
        "field_of_tomorrow": {"deeply": ["nested"]},
    }
    await rig.publish_model()
    record = json.loads(await rig.board.hget(names.KEY_MODELS, MODEL) or "{}")
    await rig.board.hset(names.KEY_MODELS, MODEL, json.dumps({**record, **newer}))
    workers = [await rig.start_worker(f"w{number}") for number in range(2)]
    for worker in workers:
        key = names.key_worker(worker.worker_id)
        lease = json.loads(await rig.board.get(key) or "{}")
        lease["models"]["other"] = {**lease["models"][MODEL], "state": "hibernating", "mood": 7}
        lease |= {"constellation": "Orion", "models": lease["models"]}
        await rig.board.set(key, json.dumps(lease))
    await rig.publish_model("other")
    lease_of_tomorrow = {"holder": "r9", "token": 5, "worker_id": "", "since": "later"}
    await rig.board.set(names.KEY_KEEPER, json.dumps(lease_of_tomorrow), ex=1000)
    await rig.start_router(tenants_file=tenants_file, model_wait_s=0.3)
    for path in (CHAT, COMPLETION):
        reply = await rig.client.post(path, json=body(path), headers={"x-api-key": A})
        assert reply.status_code == 200
    requests = [request for worker in workers for request in worker.requests]
    assert all(request.cache_salt for request in requests), "an isolation that is not known isolates"
    held = await rig.client.post(COMPLETION, json={**body(COMPLETION), "model": "other"}, headers={"x-api-key": A})
    assert held.status_code == 503, "a state that is not known serves nothing"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert LeaseRecord.from_json(await rig.board.get(names.KEY_KEEPER) or b"").holder == "r9"


DAMAGE: list[bytes] = [
    b'{"name": "tiny-a", "uri": "s3://' + SECRET.encode() + b'", "generation": "one"}',
    b'{"name": "tiny-a", "uri": "' + SECRET.encode(),
    b'"' + SECRET.encode() + b'"',
    b"[" * 100_000 + SECRET.encode(),
    b"\xff\xfe" + SECRET.encode(),
    b'{"name": "tiny-a", "uri": "' + SECRET.encode() + b'", "generation": 1, "max_wait_s": 1e400}',
    b'{"name": "tiny-a", "uri": "x", "generation": 1, "target": {"' + SECRET.encode() + b'": 1}}',
]


@pytest.mark.parametrize("data", DAMAGE)
async def test_a_damaged_record_is_left_out_and_its_content_is_in_no_log_and_no_answer(
    rig: Rig, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    await simple(rig, registry_poll_s=0.05)
    await rig.publish_model("sound")
    await rig.publish_worker("w0", models=(MODEL, "sound"))
    await rig.board.hset(names.KEY_MODELS, MODEL, data)
    await rig.board.sadd(names.KEY_WORKERS, "w9")
    await rig.board.set(names.key_worker("w9"), data)
    await rig.board.hset(names.KEY_FOOTPRINTS, MODEL, data)
    await rig.board.hset(names.key_known("w0"), MODEL, data)
    await rig.board.set(names.KEY_KEEPER, data)
    await rig.board.publish(names.CHANNEL_CHANGES, "models")
    await rig.until(lambda: set(rig.app.fleet.route_map.models) == {"sound"})
    read_s = rig.app.registry._read_at_s
    await rig.until(lambda: rig.app.registry._read_at_s != read_s)
    assert (await rig.post(COMPLETION, {**body(COMPLETION), "model": "sound"})).status_code == 200
    gone = await rig.post(COMPLETION, body(COMPLETION))
    assert gone.status_code == 404 and SECRET not in gone.text
    for page in ("/readyz", "/metrics", "/v1/models", "/v1/naru/placement"):
        assert SECRET not in (await rig.client.get(page)).text
    assert SECRET not in caplog.text
    told = [record for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 2 and {("ModelRecord" in it.getMessage()) for it in told} == {True, False}
