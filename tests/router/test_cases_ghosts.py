"""Workers that are gone while something still says that they are there, and news of them that got lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from redis_process import RedisProcess
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, poll, simple
from stub_worker import Script, StubWorker, fail, say

from naru_proto import names
from naru_proto.registry import WorkerRecord
from naru_proto.v1 import worker_pb2 as wire
from naru_router.core.breaker import DEFAULTS

OTHER = "tiny-b"


async def metric(rig: Rig, line_start: str) -> float:
    text = (await rig.client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(line_start))


def only(model: str, text: str) -> Script:
    """Answers for one model and knows no other, as a worker does."""

    async def script(request: wire.GenerateRequest) -> Any:
        held = say(text) if request.model == model else fail("model_not_found", "not known here")
        async for delta in held(request):
            yield delta

    return script


async def two_workers(rig: Rig, **settings: Any) -> tuple[StubWorker, StubWorker]:
    """The one that the smallest body goes to comes first."""
    await rig.publish_model()
    workers = [await rig.start_worker(f"w{i}") for i in range(2)]
    await rig.start_router(**settings)
    home = (await rig.post(COMPLETION, body(COMPLETION))).headers["x-naru-route"].split(";")[0]
    first, second = sorted(workers, key=lambda worker: worker.worker_id != home)
    first.requests.clear()
    return first, second


async def answers(rig: Rig, count: int = 6) -> set[tuple[int, str]]:
    """Status and text of some requests for the model."""
    replies = [await rig.post(COMPLETION, body(COMPLETION)) for _ in range(count)]
    return {(reply.status_code, reply.json()["choices"][0]["text"]) for reply in replies}


async def _change(rig: Rig, worker: StubWorker, **fields: Any) -> None:
    """Rewrites a lease, and announces it."""
    key = names.key_worker(worker.worker_id)
    record = WorkerRecord.from_json(await rig.board.get(key) or b"")
    models = {name: dataclasses.replace(it, **fields.get("resident", {})) for name, it in record.models.items()}
    changes = {name: value for name, value in fields.items() if name != "resident"}
    await rig.board.set(key, dataclasses.replace(record, **{"models": models, **changes}).to_json())
    await rig.board.publish(names.CHANNEL_CHANGES, f"worker:{worker.worker_id}")


GONE: dict[str, dict[str, Any]] = {
    "drains": {"draining": True},
    "address empty": {"address": ""},
    "address of nobody": {"address": "127.0.0.1:1"},
    "load failed": {"resident": {"state": "failed", "error": "no memory"}},
    "model drains": {"resident": {"state": "draining"}},
    "model not held": {"models": {}},
    "a state nobody knows": {"resident": {"state": "hibernating"}},
}


@pytest.mark.parametrize("changes", GONE.values(), ids=GONE)
async def test_a_worker_that_can_serve_no_longer_is_left_at_once(rig: Rig, changes: dict[str, Any]) -> None:
    ghost, other = await two_workers(rig, registry_poll_s=1000.0)
    await _change(rig, ghost, **changes)
    await rig.until(
        lambda: [record.worker_id for record in rig.app.fleet.ready(MODEL)] == [other.worker_id],
    )
    assert await answers(rig) == {(200, "Hello")}
    assert ghost.requests == []


async def test_a_worker_whose_lease_is_gone_is_left_at_once(rig: Rig) -> None:
    ghost, _ = await two_workers(rig, registry_poll_s=1000.0)
    await rig.board.delete(names.key_worker(ghost.worker_id))
    await rig.board.publish(names.CHANNEL_CHANGES, f"worker:{ghost.worker_id}")
    await rig.until(lambda: ghost.worker_id not in rig.app.fleet.route_map.workers)
    assert await answers(rig) == {(200, "Hello")} and ghost.requests == []


async def test_a_worker_that_moved_is_asked_at_its_new_address_alone(rig: Rig) -> None:
    ghost = await simple(rig, say("old"), registry_poll_s=1000.0)
    moved = StubWorker("w0", say("new"))
    await moved.start()
    rig.workers["moved"] = moved
    await _change(rig, ghost, address=f"127.0.0.1:{moved.port}")
    await rig.until(lambda: rig.app.fleet.link("w0")[0].address == f"127.0.0.1:{moved.port}" and bool(_ready(rig)))
    assert await answers(rig) == {(200, "new")} and ghost.requests == []


def _ready(rig: Rig) -> list[str]:
    return [record.worker_id for record in rig.app.fleet.ready(MODEL)]


@pytest.mark.parametrize("has_other_copy", [True, False])
async def test_an_address_that_a_worker_of_another_model_took_over_gives_no_wrong_answer(
    rig: Rig, has_other_copy: bool
) -> None:
    """The old lease has not ended, and names what the new worker listens on."""
    await rig.publish_model()
    await rig.publish_model(OTHER)
    ghost = await rig.start_worker("ghost", only(MODEL, "a"))
    if has_other_copy:
        await rig.start_worker("w1", only(MODEL, "a"))
    await rig.start_router(model_wait_s=0.3)
    await ghost.kill()
    taker = StubWorker("taker", only(OTHER, "b"))
    await taker.start(ghost.port)
    rig.workers["taker"] = taker
    await rig.publish_worker("taker", models=(OTHER,))
    await rig.until(lambda: rig.app.fleet.num_up() == len(rig.workers))
    for path in (COMPLETION, CHAT):
        replies = [await rig.post(path, body(path)) for _ in range(4 if has_other_copy else 2)]
        assert {reply.status_code for reply in replies} == {200 if has_other_copy else 503}
        assert not any('"b"' in reply.text for reply in replies)
        for _ in range(2):
            served = await rig.post(path, {**body(path), "model": OTHER})
            assert served.status_code == 200 and '"b"' in served.text
    # What it was asked for in vain is remembered: one question for each of its lives, not for each request.
    assert len([r for r in taker.requests if r.model == MODEL]) <= 2


async def test_a_deletion_that_nobody_announced_is_found_by_reading_again(rig: Rig) -> None:
    ghost, other = await two_workers(rig, registry_poll_s=0.05)
    await rig.board.delete(names.key_worker(ghost.worker_id))
    await rig.until(lambda: _ready(rig) == [other.worker_id])
    assert await answers(rig) == {(200, "Hello")} and ghost.requests == []


async def test_what_changed_while_the_connection_was_cut_is_found_afterwards(rig: Rig) -> None:
    ghost, other = await two_workers(rig, registry_poll_s=0.2)
    for kind in ("pubsub", "normal"):
        await rig.board.client_kill_filter(_type=kind, skipme=True)
    await rig.board.delete(names.key_worker(ghost.worker_id))
    await rig.board.publish(names.CHANNEL_CHANGES, f"worker:{ghost.worker_id}")
    await rig.until(lambda: _ready(rig) == [other.worker_id])
    # And the channel is heard again: within far less than the tests' patience only where the poll is not what helps.
    rig.app.registry._poll_interval_s = 1000.0

    async def is_heard() -> bool:
        return bool(await rig.board.publish(names.CHANNEL_CHANGES, "models"))

    await poll(is_heard)
    await rig.publish_worker(ghost.worker_id)
    await rig.until(lambda: len(_ready(rig)) == 2)


async def test_how_old_the_map_is_can_be_seen(rig: Rig, redis_process: RedisProcess) -> None:
    await simple(rig, registry_poll_s=0.05)

    async def ages_s() -> tuple[float, float]:
        page = await rig.client.get("/readyz")
        assert page.status_code == 200
        return page.json()["registry"]["age_s"], await metric(rig, "naru_router_registry_age_seconds")

    async def is_old() -> bool:
        return min(await ages_s()) > 0.5

    async def is_fresh() -> bool:
        return max(await ages_s()) < 0.5

    await poll(is_fresh)
    with redis_process.hanging():
        await poll(is_old)
    await poll(is_fresh)


async def test_a_worker_that_takes_no_connection_loses_no_request(rig: Rig) -> None:
    """Its lease says for long yet that it is ready."""
    ghost, other = await two_workers(rig)
    await ghost.kill()
    assert await answers(rig, 10) == {(200, "Hello")}
    assert _ready(rig) == [other.worker_id]
    assert (await rig.client.get("/readyz")).json()["workers"] == {"leased": 2, "connected": 1}
    await ghost.start(ghost.port)
    await rig.until(lambda: len(_ready(rig)) == 2)


async def test_a_worker_that_fails_again_and_again_is_left_alone_for_a_while(rig: Rig) -> None:
    failing, other = await two_workers(rig)
    failing.script = fail("internal_error", "the engine broke", retryable=True)
    assert await answers(rig, 12) == {(200, "Hello")}
    assert len(failing.requests) == DEFAULTS.max_faults and len(other.requests) == 12
    assert await metric(rig, f'naru_router_circuits_opened_total{{worker="{failing.worker_id}"}}') == 1
