"""A board that somebody else has written to, or that lost its data: the rest is served on, and routers agree again."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any, cast

import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, info, poll, simple

from naru_proto import names


async def stored_seed(rig: Rig) -> bytes | None:
    return (await cast(Awaitable[list[bytes | None]], rig.board.mget([names.KEY_SEED])))[0]


async def is_seed(rig: Rig, seed: bytes) -> bool:
    return await stored_seed(rig) == seed == rig.app.fleet.seed


async def test_a_seed_that_was_lost_is_written_again_and_newcomers_take_it(rig: Rig, second: Rig) -> None:
    await simple(rig, registry_poll_s=0.05)
    seed = rig.app.fleet.seed
    assert len(seed) == 32 and await stored_seed(rig) == seed
    await rig.board.delete(names.KEY_SEED)
    await poll(lambda: is_seed(rig, seed))
    await second.start_router()
    assert second.app.fleet.seed == seed


@pytest.mark.parametrize("damage", ["empty", "hash"])
async def test_a_seed_that_is_none_is_replaced(rig: Rig, damage: str) -> None:
    await simple(rig, registry_poll_s=0.05)
    seed = rig.app.fleet.seed
    await rig.board.delete(names.KEY_SEED)
    if damage == "empty":
        await rig.board.set(names.KEY_SEED, b"")
    else:
        await rig.board.hset(names.KEY_SEED, "a", "b")
    await poll(lambda: is_seed(rig, seed))
    assert rig.app.registry.status.is_up
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200


async def test_routers_with_different_seeds_take_the_one_that_stands_there(rig: Rig, second: Rig) -> None:
    await simple(rig, registry_poll_s=0.05)
    await second.start_router(registry_poll_s=0.05)
    other = b"f" * 32
    await rig.board.set(names.KEY_SEED, other)
    for each in (rig, second):
        await poll(lambda each=each: is_seed(each, other))  # type: ignore[misc]
    # A seed of any length is one, and no more of it is kept than a hash can take.
    await rig.board.set(names.KEY_SEED, b"s" * 10_000)
    await rig.until(lambda: rig.app.fleet.seed == b"s" * 64)
    assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 200


async def test_tables_of_the_wrong_kind_and_leases_of_any_shape_leave_the_others_in_use(rig: Rig) -> None:
    await simple(rig, registry_poll_s=0.05)
    await rig.board.set(names.key_known("w0"), "text")
    await rig.board.set(names.KEY_FOOTPRINTS, "text")
    damaged: list[Any] = [
        {"worker_id": "x", "address": "nowhere", "epoch": "e", "models": {}},
        {"worker_id": "x", "address": "h:1", "epoch": "e", "models": {"m": {"state": "ready", "eta_s": 10**400}}},
        {"worker_id": "x", "address": "h:1", "epoch": "e", "models": {MODEL: {"state": "ready", "error": "\ud800"}}},
    ]
    for number, lease in enumerate([*map(json.dumps, damaged), "[" * 50_000]):
        await rig.board.sadd(names.KEY_WORKERS, "x")
        await rig.board.set(names.key_worker("x"), lease)
        await rig.publish_model(f"after-{number}")
        await rig.until(lambda number=number: f"after-{number}" in rig.app.fleet.route_map.models)  # type: ignore[misc]
        assert list(rig.app.fleet.route_map.workers) == ["w0"]
    for path in ("/v1/models", "/readyz", "/metrics"):
        assert (await rig.client.get(path)).status_code == 200
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200


async def test_a_template_that_was_swapped_under_its_digest_is_not_rendered(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.publish_model()
    worker = await rig.start_worker()
    await rig.board.set(names.key_model_info(info().digest()), info(template="{{ 'swapped' }}").to_json())
    await rig.start_router(registry_poll_s=0.05, model_wait_s=0.1)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 503
    assert [request.text for request in worker.requests if request.text] == []
    assert len([r for r in caplog.records if info().digest() in r.getMessage()]) == 1
    await rig.publish_worker("w0")  # it writes its facts again
    await rig.until(lambda: rig.app.fleet.route_map.info(MODEL) is not None)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200
    assert worker.requests[-1].text.startswith("<|im_start|>")
