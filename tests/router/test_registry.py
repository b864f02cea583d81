"""A board that cannot be read, comes back empty, or holds what makes no sense."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from redis_process import RedisProcess
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, simple

from naru_proto import names
from naru_router.core.route_map import RouteMap


async def metric(rig: Rig, line_start: str) -> float:
    text = (await rig.client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(line_start))


async def test_without_redis_the_last_map_stays_in_use(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = RedisProcess(tmp_path_factory.mktemp("r"))
    own.start()
    lonely = Rig(own.url)
    try:
        await simple(lonely, registry_poll_s=0.05)
        own.stop()
        await lonely.until(lambda: not lonely.app.registry.status.is_up)
        assert (await lonely.post(CHAT, body(CHAT))).status_code == 200
        ready = await lonely.client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json()["registry"]["up"] is False and ready.json()["registry"]["problem"]
        assert await metric(lonely, "naru_router_registry_up") == 0
        own.start()
        await lonely.until(lambda: lonely.app.registry.status.is_up)
        # It is empty, and what it had is written again soon.
        assert (await lonely.post(CHAT, body(CHAT))).status_code == 200
        await lonely.publish_model("another")
        await lonely.until(lambda: "another" in lonely.app.fleet.route_map.models)
        assert {MODEL, "another"} == set(lonely.app.fleet.route_map.models)
        await lonely.publish_model()
        await lonely.publish_worker("w0")
        await lonely.until(lambda: lonely.app.registry._lost is None)
        # From here on what is gone was deleted.
        await lonely.board.hdel(names.KEY_MODELS, MODEL)
        await lonely.until(lambda: MODEL not in lonely.app.fleet.route_map.models)
        assert (await lonely.post(CHAT, body(CHAT))).status_code == 404
    finally:
        await lonely.close()
        own.stop()


async def test_a_map_is_made_anew_only_when_something_in_it_has_changed(rig: Rig) -> None:
    await simple(rig, registry_poll_s=0.02)
    registry, heard = rig.app.registry, list[RouteMap]()
    listener = registry._listener

    def listen(route_map: RouteMap) -> None:
        heard.append(route_map)
        listener(route_map)

    registry._listener = listen
    await rig.until(lambda: len(heard) >= 5)
    assert len({id(route_map) for route_map in heard[1:]}) == 1, "nothing has changed"
    await rig.publish_worker("w0", leaving=True)
    await rig.until(lambda: rig.app.fleet.route_map.workers["w0"].leaving)
    await rig.board.delete(names.key_worker("w0"))
    await rig.until(lambda: not rig.app.fleet.route_map.workers)
    await rig.publish_worker("w0")
    await rig.until(lambda: "w0" in rig.app.fleet.route_map.workers)


async def test_a_router_that_has_never_read_the_map_is_not_ready(rig: Rig) -> None:
    rig.redis_url = "unix:///nonexistent/redis.sock"
    with contextlib.suppress(TimeoutError):
        rig.until = _at_once  # type: ignore[method-assign]
        await rig.start_router()
    ready = await rig.client.get("/readyz")
    assert ready.status_code == 503 and ready.json()["status"] == "starting"
    assert (await rig.client.get("/healthz")).status_code == 200
    for reply in (await rig.client.get("/v1/models/m"), await rig.post(COMPLETION, body(COMPLETION))):
        assert reply.status_code == 503, "it cannot know that there is no such model"


async def _at_once(*args: Any, **kwargs: Any) -> None:
    return


async def test_records_that_cannot_be_read_leave_the_others_in_use(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    broken = [b"", b"{", b"[]", b"null", b'{"name": 5}', b"\xff", b'{"name":"x","uri":"","generation":1,"aliases":5}']
    for i, data in enumerate(broken):
        await rig.board.hset(names.KEY_MODELS, f"broken{i}", data)
        await rig.board.sadd(names.KEY_WORKERS, f"broken{i}")
        await rig.board.set(names.key_worker(f"broken{i}"), data)
    lies = b'{"worker_id": "liar", "address": 5, "epoch": "", "models": {"a": {"state": 7}}}'
    await rig.board.sadd(names.KEY_WORKERS, "liar")
    await rig.board.set(names.key_worker("liar"), lies)
    await simple(rig, registry_poll_s=0.02)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200
    assert sorted(rig.app.fleet.route_map.workers) == ["w0"]
    assert [m["id"] for m in (await rig.client.get("/v1/models")).json()["data"]] == [MODEL]
    warnings = [r for r in caplog.records if "'liar'" in r.getMessage()]
    assert len(warnings) == 1  # once, not at each reading
