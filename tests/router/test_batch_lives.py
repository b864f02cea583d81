"""What a batch goes through: refusals, cancels, the end of its time, and routers that stop, die or work beside it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from batch_client import BATCHES, CHAT, Tap, asked_of, begin, counted, ended, line, lines, put_batch, read, serve
from router_rig import Rig, poll
from stub_worker import say

from naru_proto.names import key_batch
from naru_proto.v1 import worker_pb2 as wire
from naru_router.adapters.batches import line_run, runner
from naru_router.adapters.batches.parts import PartWriter
from naru_router.adapters.storage.record_store import RecordStore
from naru_router.core.batches.record import ACTIVE_KIND, KIND


@pytest.fixture(autouse=True)
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that a test puts beside the routers wake nobody."""
    monkeypatch.setattr(runner, "REST_LOOK_S", 0.2)


# --- refusals, cancels, the end of time -----------------------------------------------------------------------------


async def test_a_busy_fleet_is_asked_again_until_it_answers(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_run, "pause_s", lambda *_: 0.01)
    tries: Counter[str] = Counter()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        tries[request.text] += 1
        if tries[request.text] <= 4:
            error = wire.Error(code="rate_limit_exceeded", message="busy", retryable=False, retry_after_s=1)
            yield wire.Delta(error=error, request_done=True)
            return
        async for delta in say("ok")(request):
            yield delta

    await serve(rig, tmp_path, script)
    batch = await ended(rig, await begin(rig, lines(20)))
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert set(tries.values()) == {5}


async def test_a_fault_of_ours_is_tried_three_times_and_then_told(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_run, "pause_s", lambda *_: 0.01)
    tries: Counter[bool] = Counter()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        is_hopeless = "hopeless" in request.text
        tries[is_hopeless] += 1
        if is_hopeless or tries[is_hopeless] == 1:
            yield wire.Delta(error=wire.Error(code="internal_error", message="oh", retryable=False), request_done=True)
            return
        async for delta in say("ok")(request):
            yield delta

    await serve(rig, tmp_path, script)
    batch = await ended(rig, await begin(rig, "\n".join([line("hopeless"), line("better")])))
    (error,) = await read(rig, batch["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("hopeless", 500)
    (answer,) = await read(rig, batch["output_file_id"])
    assert answer["custom_id"] == "better"
    assert tries == {True: 3, False: 2}


async def test_no_more_requests_are_in_flight_than_may_be(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path, batch_concurrency=5)
    batch = await ended(rig, await begin(rig, lines(60)))
    assert batch["request_counts"]["completed"] == 60
    assert rig.workers["w0"].most_running == 5


async def test_a_cancelled_batch_keeps_what_is_done(rig: Rig, tmp_path: Path) -> None:
    tap = Tap(free=4)
    await serve(rig, tmp_path, tap.script)
    batch_id = await begin(rig, lines(10))
    await counted(rig, batch_id, 4)
    cancelling = (await rig.client.post(f"{BATCHES}/{batch_id}/cancel")).json()
    assert cancelling["status"] == "cancelling"
    batch = await ended(rig, batch_id)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 4)
    assert batch["cancelled_at"] >= batch["cancelling_at"] > 0
    assert len(await read(rig, batch["output_file_id"])) == 4
    worker = rig.workers["w0"]
    await worker.until(lambda: not worker.running)
    assert len(worker.cancelled) == 6


async def test_a_batch_whose_time_is_over_keeps_what_is_done_and_names_the_rest(rig: Rig, tmp_path: Path) -> None:
    tap = Tap(free=2)
    await serve(rig, tmp_path, tap.script)
    batch_id = await begin(rig, lines(5))
    await counted(rig, batch_id, 2)
    await rig.app.stop()  # so that the record has no other writer
    store = RecordStore(tmp_path)
    record = await store.get(KIND, "", batch_id)
    assert record is not None
    await store.put(KIND, "", batch_id, {**record, "expires_at": int(time.time()) - 1})
    await store.close()
    await rig.client.aclose()
    await rig.start_router(files_dir=str(tmp_path))
    batch = await ended(rig, batch_id)
    assert (batch["status"], batch["request_counts"]) == ("expired", {"total": 5, "completed": 2, "failed": 3})
    assert len(await read(rig, batch["output_file_id"])) == 2
    errors = await read(rig, batch["error_file_id"])
    assert [it["error"]["code"] for it in errors] == ["batch_expired"] * 3
    assert [it["response"] for it in errors] == [None] * 3
    done = {it["custom_id"] for it in [*errors, *await read(rig, batch["output_file_id"])]}
    assert done == {f"line-{i}" for i in range(5)}


async def test_a_full_disk_stops_nothing_for_good(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()
    is_full = True
    append = PartWriter.append

    def write(self: PartWriter, data: bytes) -> None:
        if is_full:
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOSPC, "no space")
        append(self, data)

    monkeypatch.setattr(PartWriter, "append", write)
    monkeypatch.setattr(line_run, "MAX_KEPT_BYTES", 0)
    await serve(rig, tmp_path, batch_concurrency=4)
    batch_id = await begin(rig, lines(30))
    await refused.wait()
    assert sum(asked_of(rig).values()) <= 8, "while answers cannot be kept, few are asked for"
    is_full = False
    batch = await ended(rig, batch_id)
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert set(asked_of(rig).values()) == {1}


async def test_a_file_that_is_deleted_before_it_was_read_fails_the_batch(rig: Rig, tmp_path: Path) -> None:
    await rig.publish_model()
    await rig.start_worker()
    await rig.start_router(files_dir=str(tmp_path))
    store = RecordStore(tmp_path)
    record = {
        "id": "batch_x", "status": "validating", "input_file_id": "file-x", "endpoint": CHAT,
        "expires_at": int(time.time()) + 99, "request_counts": {}, "work": {"output_expires_after_s": None},
    }  # fmt: skip
    await store.put(KIND, "", "batch_x", record)
    await store.put(ACTIVE_KIND, "", "batch_x", {"tenant": ""})
    batch = await ended(rig, "batch_x")
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "invalid_input_file")
    assert await store.list(ACTIVE_KIND, "", limit=5) == []
    await store.close()


# --- routers that stop, die, and work beside one another ------------------------------------------------------------


async def test_another_router_goes_on_where_one_has_stopped(rig: Rig, tmp_path: Path) -> None:
    tap = Tap(free=10)
    await serve(rig, tmp_path, tap.script, batch_concurrency=4)
    batch_id = await begin(rig, lines(30))
    await counted(rig, batch_id, 10)
    await rig.app.stop()
    await rig.client.aclose()
    tap.opened.set()
    await rig.start_router(files_dir=str(tmp_path))
    batch = await ended(rig, batch_id)
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    asked = asked_of(rig)
    assert set(asked) == {f"line-{i}" for i in range(30)}
    assert max(asked.values()) <= 2
    assert sum(asked.values()) <= 30 + 4, "nothing is done twice but what was in flight"
    answers = Counter(it["custom_id"] for it in await read(rig, batch["output_file_id"]))
    assert answers == Counter({f"line-{i}": 1 for i in range(30)})


async def test_a_router_that_drains_finishes_what_it_has_begun_and_begins_nothing(rig: Rig, tmp_path: Path) -> None:
    tap = Tap(free=5)
    await serve(rig, tmp_path, tap.script, batch_concurrency=4)
    batch_id = await begin(rig, lines(20))
    worker = rig.workers["w0"]
    await worker.until(lambda: len(worker.requests) == 9)
    drain = asyncio.create_task(rig.app.drain())
    await rig.until(lambda: rig.app.gate.is_leaving)
    tap.opened.set()
    await drain
    await rig.app.stop()
    assert len(worker.requests) == 9
    await rig.client.aclose()
    await rig.start_router(files_dir=str(tmp_path))
    assert (await ended(rig, batch_id))["request_counts"]["completed"] == 20
    assert set(asked_of(rig).values()) == {1}, "what had begun was kept"


async def test_two_routers_do_each_line_once(rig: Rig, second: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    await second.start_router(files_dir=str(tmp_path))
    made = [await begin(each, lines(40)) for each in (rig, second, rig, second)]
    for batch_id in made:
        batch = await ended(rig, batch_id)
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert len(await read(second, batch["output_file_id"])) == 40
    assert set(asked_of(rig).values()) == {4}, "once in each of four batches"


async def test_a_batch_goes_on_when_its_router_is_killed(rig: Rig, tmp_path: Path) -> None:
    tap = Tap(free=10)
    await rig.publish_model()
    worker = await rig.start_worker(script=tap.script)
    arguments = ["--http-port=0", "--grpc-port=0", f"--redis-url={rig.redis_url}"]
    arguments += [f"--files-dir={tmp_path}", "--batch-concurrency=4"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "naru_router", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert b"ready" in await process.stdout.readline()
        store = RecordStore(tmp_path)
        await put_batch(store, "batch_killed", lines(30))
        await worker.until(lambda: len(worker.requests) >= 14, timeout_s=30)

        async def has_told() -> bool:
            record = await store.get(KIND, "", "batch_killed")
            return record is not None and record["request_counts"].get("completed", 0) >= 10

        await poll(has_told)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await store.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    tap.opened.set()
    await rig.start_router(files_dir=str(tmp_path))
    assert await rig.board.exists(key_batch("batch_killed")), "the dead router's lease still stands"
    batch = await ended(rig, "batch_killed")
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert len(await read(rig, batch["output_file_id"])) == 30
    assert sum(asked_of(rig).values()) <= 30 + 4


async def test_many_batches_of_one_tenant_leave_room_for_another(rig: Rig, tmp_path: Path) -> None:
    tap = Tap(free=0)
    await serve(rig, tmp_path, tap.script, batch_concurrency=64)
    store = RecordStore(tmp_path)
    for i in range(6):
        await put_batch(store, f"batch_{i}", lines(1))
    await put_batch(store, "batch_of_another", lines(2), tenant="another")
    worker = rig.workers["w0"]
    await worker.until(lambda: len(worker.requests) >= 4)
    tap.opened.set()
    for i in range(6):
        assert (await ended(rig, f"batch_{i}"))["status"] == "completed"
    # Nobody of that name may ask any more: its lines are answered as those of somebody whose key is gone.
    record = None
    async with asyncio.timeout(20):
        while record is None or record["status"] != "completed":
            record = await store.get(KIND, "another", "batch_of_another")
            await asyncio.sleep(0.02)
    assert record["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    await store.close()


async def test_a_batch_whose_router_died_while_it_was_made_is_found(rig: Rig, tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    await put_batch(store, "batch_x", lines(1))
    assert await store.delete(ACTIVE_KIND, "", "batch_x")
    await store.close()
    await serve(rig, tmp_path)
    assert (await ended(rig, "batch_x"))["status"] == "completed"


async def test_large_lines_run_few_at_a_time(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_run, "MAX_LINES_BYTES", 5000)
    await serve(rig, tmp_path)
    content = "\n".join(line(f"line-{i}", filler="x" * 2000) for i in range(12))
    huge = line("line-12", filler="x" * 9000)
    batch = await ended(rig, await begin(rig, f"{content}\n{huge}"))
    assert batch["request_counts"]["completed"] == 13
    assert rig.workers["w0"].most_running == 2
