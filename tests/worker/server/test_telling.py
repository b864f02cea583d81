"""What a worker tells routers of its load and route keys, as streams hear it; and that a dead machine is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from hearer import Hearer, hear_until
from toy_worker import DEADLINE_S, Exchange, RunningWorker, ToyLoader, ask, eventually, running_worker, toy_settings

from naru_proto.route_keys import key_root, keys_of_ids, keys_of_text, pack_keys
from naru_proto.v1 import worker_pb2, worker_pb2_grpc
from naru_worker.adapters.engine.key_news import KeyNews
from naru_worker.adapters.server import channel, key_mirror, telling
from naru_worker.core.route_marks import KeyChanges

TEXT = "".join(chr(97 + i * 7 % 26) for i in range(200))


def keyed(request: worker_pb2.GenerateRequest, salt: bytes = b"") -> worker_pb2.GenerateRequest:
    request.route_keys = pack_keys(keys_of(request.text, request.model, salt))
    request.cache_salt = salt
    return request


def keys_of(text: str, model: str = "toy", salt: bytes = b"") -> tuple[bytes, ...]:
    return keys_of_text(text.encode(), key_root(salt, model))


async def hear_keys(hearer: Hearer, keys: set[bytes]) -> None:
    await hear_until(hearer, lambda: hearer.keys["toy"] == keys)


async def test_the_first_frame_has_a_snapshot_of_each_model_and_the_whole_load() -> None:
    async with running_worker(None, None, "toy", "other") as worker:
        await worker.generate(keyed(ask("r", TEXT)))
        for number in range(2):  # more prompts, until there is enough for a rate
            await worker.generate(ask(f"more-{number}", TEXT[number + 1 :]))
        described = await worker.stub.Describe(worker_pb2.DescribeRequest())
        hearer = Hearer(worker.stub)
        first = await hearer.read()
        assert [update.is_snapshot for update in first.route_keys] == [True, True]
        assert hearer.keys == {"toy": set(keys_of(TEXT)), "other": set()}
        assert hearer.epochs == {model.model: model.epoch for model in described.models}
        assert set(hearer.loads) == {"toy", "other"}
        assert hearer.loads["toy"].prefill_tokens_per_s > 0
        assert hearer.loads["toy"].decode_step_s > 0
        assert hearer.loads["other"].prefill_tokens_per_s == 0
        await hearer.exchange.close()


async def test_keys_are_told_to_all_streams_when_their_blocks_come_and_go() -> None:
    # 80 blocks of 4 tokens of one byte: the second prompt needs those of the first.
    async with running_worker(ToyLoader(num_blocks=81), None, "toy") as worker:
        one, two = Hearer(worker.stub), Hearer(worker.stub)
        for hearer in (one, two):
            await hearer.read()
        await one.exchange.send(keyed(ask("a", TEXT, max_tokens=1)))
        for hearer in (one, two):
            await hear_keys(hearer, set(keys_of(TEXT)))
        other = TEXT[::-1] + TEXT[:50]
        await worker.generate(keyed(ask("b", other, max_tokens=1)))
        left = set(keys_of(TEXT)[:1])  # the oldest tail goes first
        for hearer in (one, two):
            await hear_keys(hearer, left | set(keys_of(other)))
            assert hearer.num_snapshots == 1
            await hearer.exchange.close()


async def test_an_unload_voids_a_models_keys_and_a_reload_has_another_epoch() -> None:
    async with running_worker(None, None, "toy") as worker:
        hearer = Hearer(worker.stub)
        await hearer.exchange.send(keyed(ask("a", TEXT)))
        await hear_until(hearer, lambda: hearer.keys.get("toy"))
        before = hearer.epochs["toy"]
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", generation=1))
        await hear_until(hearer, lambda: not hearer.keys["toy"])
        assert hearer.loads["toy"] == worker_pb2.ModelLoad(model="toy")
        await worker.load("toy", generation=2)
        await hear_until(hearer, lambda: hearer.epochs["toy"] > before)
        assert hearer.keys["toy"] == set()
        (model,) = (await worker.stub.Describe(worker_pb2.DescribeRequest())).models
        assert hearer.epochs["toy"] == model.epoch
        await worker.generate(keyed(ask("b", TEXT)))
        await hear_until(hearer, lambda: hearer.keys["toy"] == set(keys_of(TEXT)))
        await hearer.exchange.close()


async def test_prompts_of_token_ids_have_keys_as_well_and_salts_keep_tenants_apart() -> None:
    async with running_worker(None, None, "toy") as worker:
        hearer = Hearer(worker.stub)
        ids = list(TEXT.encode())
        by_id = ask("ids", "")
        by_id.token_ids.ids.extend(ids)
        by_id.route_keys = pack_keys(keys_of_ids(ids, key_root(b"", "toy")))
        await hearer.exchange.send(by_id)
        await hearer.finish("ids")
        expected = set(keys_of_ids(ids, key_root(b"", "toy")))
        await hear_until(hearer, lambda: hearer.keys["toy"] == expected)
        for salt, num_cached in ((b"a", 0), (b"b", 0), (b"a", 199)):
            deltas = await worker.generate(keyed(ask("r", TEXT, max_tokens=1), salt))
            assert deltas[0].cached_tokens == num_cached
            expected |= set(keys_of(TEXT, salt=salt))
        await hear_until(hearer, lambda: hearer.keys["toy"] == expected)
        await hearer.exchange.close()


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("route_keys", {"route_keys": b"x" * 17}),
        ("route_keys", {"route_keys": b"x" * 16 * 257}),
        ("shared_prefix_bytes", {"shared_prefix_bytes": -1}),
        ("shared_prefix_bytes", {"shared_prefix_bytes": 201}),
    ],
)
async def test_what_no_router_would_send_is_refused_by_name(param: str, fields: dict[str, object]) -> None:
    async with running_worker(None, None, "toy") as worker:
        request = ask("r", TEXT)
        for name, value in fields.items():
            setattr(request, name, value)
        (delta,) = await worker.generate(request)
        assert (delta.error.code, delta.error.param) == ("invalid_request_error", param)


async def test_made_up_keys_never_make_a_worker_hold_more_than_its_blocks_allow() -> None:
    async with running_worker(ToyLoader(num_blocks=65), None, "toy") as worker:
        hearer = Hearer(worker.stub)
        for number in range(40):
            request = ask("r", TEXT[:128], max_tokens=1)
            request.route_keys = b"".join(b"%16d" % (number * 256 + i) for i in range(256))
            deltas = await worker.generate(request)
            assert not deltas[-1].error.code
        await hear_until(hearer, lambda: b"%16d" % (39 * 256) in hearer.keys.get("toy", set()))
        assert len(hearer.keys["toy"]) <= 32 * 64
        await hearer.exchange.close()


async def test_requests_of_other_streams_are_counted_while_they_live_and_no_longer() -> None:
    async with running_worker(None, None, "toy") as worker:
        hearer, other = Hearer(worker.stub), Exchange(worker.stub)
        runner = worker.loader.runners["toy"]
        gate = threading.Event()
        runner.before_step = lambda batch: wait_for(gate)
        await other.send(*(ask(f"o{i}", TEXT, max_tokens=4) for i in range(3)))
        await hearer.exchange.send(ask("mine", TEXT, max_tokens=4))
        await hear_until(hearer, lambda: hearer.load.num_others == 3 and hearer.loads["toy"].num_others == 3)
        await hear_until(hearer, lambda: hearer.counted[-1:] == ["mine"])
        load = hearer.loads["toy"]
        # The prompt under way is being computed, the rest of them wait.
        assert 3 * len(TEXT) <= load.waiting_tokens <= 4 * len(TEXT)
        other.break_off()
        await hear_until(hearer, lambda: hearer.load.num_others == 0 and hearer.loads["toy"].num_others == 0)
        gate.set()
        await hearer.finish("mine")
        await hear_until(hearer, lambda: hearer.loads["toy"].waiting_tokens == 0)
        await hearer.exchange.close()


async def test_held_requests_and_prompts_under_way_are_in_the_numbers() -> None:
    async with running_worker() as worker:
        opened = worker.loader.building["toy://a"] = threading.Event()
        await worker.load("toy", tier=worker_pb2.TIER_COLD)
        hearer = Hearer(worker.stub)
        await hearer.exchange.send(ask("a", TEXT), ask("b", TEXT))
        await hear_until(hearer, lambda: hearer.counted[-1:] == ["b"] and hearer.loads["toy"].num_waiting == 2)
        assert hearer.loads["toy"].waiting_tokens == 2 * (len(TEXT) // 4)
        opened.set()
        await hearer.finish("a", "b")
        await hear_until(hearer, lambda: hearer.loads["toy"].waiting_tokens == 0)
        assert hearer.loads["toy"].num_waiting == 0
        await hearer.exchange.close()


async def test_an_idle_stream_hears_nothing_when_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "TELL_INTERVAL_S", 0.001)
    monkeypatch.setattr(telling, "REST_INTERVAL_S", 0.002)
    async with running_worker(None, None, "toy") as worker:
        hearer = Hearer(worker.stub)
        await hearer.read()
        teller = worker.app._servicer._teller
        looks = teller.num_looks
        await eventually(lambda: teller.num_looks >= looks + 5, "nobody looks")
        await worker.generate(keyed(ask("r", TEXT, max_tokens=1)))
        frame = await hearer.read()
        # It may be seen while it is there, or by the keys that it left.
        is_about_it = frame.load.num_others == 1 or bool(frame.route_keys)
        assert is_about_it, "the first frame after the first one is about the request"
        await hearer.exchange.close()
        await eventually(lambda: not teller._tellings and teller._timer is None, "it ticks for nobody")


async def test_nobody_looks_while_nothing_goes_on_and_whatever_does_is_told_as_soon_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telling, "REST_INTERVAL_S", 3600.0)
    async with running_worker(None, None, "toy") as worker:
        teller = worker.app._servicer._teller

        def rests() -> bool:
            due_s = teller._timer.when() - asyncio.get_running_loop().time() if teller._timer is not None else 0.0
            return due_s > 300.0

        hearer, other = Hearer(worker.stub), Exchange(worker.stub)
        await hearer.read()
        await eventually(rests, "it looks on and on")
        await worker.generate(keyed(ask("r", TEXT, max_tokens=1)))
        await hear_keys(hearer, set(keys_of(TEXT)))
        await eventually(rests, "it looks on and on after a request")
        await other.send(keyed(ask("s", TEXT[::-1], max_tokens=1)))
        await hear_keys(hearer, {*keys_of(TEXT), *keys_of(TEXT[::-1])})
        await eventually(rests, "it looks on and on after a stream's request")
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", generation=1))
        await hear_until(hearer, lambda: not hearer.keys["toy"])
        await other.close()
        await hearer.exchange.close()


async def test_a_long_snapshot_comes_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "MAX_FRAME_KEYS", 2)
    async with running_worker(None, None, "toy") as worker:
        await worker.generate(keyed(ask("r", TEXT + TEXT[: 240 - 200])))
        await worker.generate(keyed(ask("s", TEXT[::-1])))
        hearer = Hearer(worker.stub)
        await hear_until(hearer, lambda: len(hearer.keys.get("toy", ())) == 6)
        assert len(hearer.exchange.frames) >= 3
        assert hearer.num_snapshots == 1
        await hearer.exchange.close()


def test_a_reader_that_lags_behind_starts_anew_and_the_list_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_mirror, "MAX_CHANGES", 8)

    class Engine:
        key_news = KeyNews()

    class Model:
        engine = Engine()

    mirror = key_mirror.KeyMirror(Model())  # type: ignore[arg-type]
    for number in range(100):
        before = mirror.place
        Engine.key_news.put(KeyChanges((b"%d" % number,), (b"%d" % (number - 3),) if number > 2 else ()))
        mirror.refresh()
        assert len(mirror._changes) <= 8
        assert mirror.since(before) == KeyChanges((b"%d" % number,), (b"%d" % (number - 3),) if number > 2 else ())
        assert mirror.since(mirror.place) == KeyChanges()
    assert mirror.since(0) is None
    assert list(mirror.held) == [b"97", b"98", b"99"]


@contextlib.asynccontextmanager
async def blackhole(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address that leads to another one until the event is set: then it is silent, and closes nothing."""
    host, _, port = address.rpartition(":")
    is_dead = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not is_dead.is_set():
                writer.write(data)
                await writer.drain()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, far_writer))
        for ends in ((reader, far_writer), (far_reader, writer)):
            tasks.add(asyncio.create_task(pump(*ends)))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", is_dead
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
        server.close()
        await server.wait_closed()


async def test_a_router_whose_machine_died_is_noticed_and_its_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PING_INTERVAL_MS", 300)
    monkeypatch.setattr(channel, "PING_TIMEOUT_MS", 600)
    async with (
        running_worker(None, toy_settings(), "toy") as worker,
        blackhole(worker.app.address) as (address, is_dead),
        grpc.aio.insecure_channel(address) as line,
    ):
        hold_steps(worker, 0.02)
        lost = Exchange(worker_pb2_grpc.WorkerStub(line))
        await lost.send(ask("r", max_tokens=200), ask("s", max_tokens=200))
        await lost.read_until(lambda: {"r", "s"} <= lost.deltas.keys())
        assert len(worker.app.board) == 2
        is_dead.set()
        hold_steps(worker, 0.5)
        await eventually(lambda: not len(worker.app.board), "requests of a router that is gone run on")
        hold_steps(worker, 0.0)
        lost.break_off()


def wait_for(gate: threading.Event) -> None:
    assert gate.wait(DEADLINE_S), "nobody opens the gate"


def hold_steps(worker: RunningWorker, step_s: float) -> None:
    worker.loader.runners["toy"].before_step = lambda batch: time.sleep(step_s)
