"""The status writer alone: what is written, when, and what becomes of writes that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from cluster_rig import key, model, until

from naru_operator.adapters.cluster import status_writer
from naru_operator.adapters.cluster.status_writer import MAX_WRITES, StatusWriter
from naru_operator.adapters.kube.errors import ApiAway, Conflict, NotFound, NotLeader, Rejected
from naru_operator.core.kube import Object
from naru_proto.crd.v1alpha1 import ModelDeploymentStatus
from naru_proto.errors import NaruError

KIND = "ModelDeployment"


class Api:
    """Takes statuses; `gate` holds them, `error` says which fail."""

    def __init__(self) -> None:
        self.tried: list[tuple[str, str]] = []
        self.written: list[tuple[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Callable[[Object], NaruError | None] = lambda item: None
        self.num_under_way = 0
        self.most_under_way = 0

    async def apply_status(self, item: Object) -> object:
        self.tried.append((item["metadata"]["name"], item["status"].get("phase", "")))
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            await self.gate.wait()
        finally:
            self.num_under_way -= 1
        error = self.error(item)
        if error is not None:
            raise error
        self.written.append((item["metadata"]["name"], item["status"].get("phase", "")))
        return item


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed writes are tried again soon."""
    monkeypatch.setattr(status_writer, "_RETRY_S", 0.01)


def raw(name: str, uid: str = "u") -> Object:
    made = model(name)
    made["metadata"]["uid"] = uid
    return made


def status(phase: str) -> ModelDeploymentStatus:
    return ModelDeploymentStatus.model_validate({"phase": phase})


def tell(writer: StatusWriter, name: str, phase: str, *, is_progress_only: bool = False, uid: str = "u") -> bool:
    return writer.tell(KIND, key(name), raw(name, uid), status(phase), is_progress_only=is_progress_only)


async def test_what_is_told_while_a_write_is_under_way_is_written_once_as_it_was_last(api: Api) -> None:
    writer = StatusWriter(api, 5.0, lambda words: None)
    api.gate.clear()
    tell(writer, "m", "Pending")
    await until(lambda: api.tried)
    for phase in ("Fetching", "Loading", "Ready"):
        tell(writer, "m", phase)
    assert writer.last(KIND, key("m"), "u", status("Pending")) == status("Ready")
    api.gate.set()
    await until(lambda: len(api.written) == 2)
    assert api.written == [("m", "Pending"), ("m", "Ready")]
    await writer.close()


async def test_a_status_told_in_the_very_moment_a_write_ends_is_written(api: Api) -> None:
    """The write's task has ended, and what it calls back has not run yet."""
    writer = StatusWriter(api, 5.0, lambda words: None)
    loop = asyncio.get_running_loop()
    api.gate.clear()
    tell(writer, "m", "Loading")
    await until(lambda: api.tried)
    (task,) = [it for it in asyncio.all_tasks() if it.get_name().startswith("status of")]
    original = api.error

    def at_the_end(item: Object) -> NaruError | None:
        # Runs in the task's last step: the call is ahead of the task's own callbacks.
        loop.call_soon(tell, writer, "m", "Ready")
        api.error = original
        return None

    api.error = at_the_end
    api.gate.set()
    await task
    await until(lambda: api.written == [("m", "Loading"), ("m", "Ready")])


async def test_progress_alone_waits_for_its_time_and_anything_else_does_not(api: Api) -> None:
    writer = StatusWriter(api, 5.0, lambda words: None)
    assert tell(writer, "m", "Loading")
    await until(lambda: len(api.written) == 1)
    assert not tell(writer, "m", "Fetching", is_progress_only=True)
    assert tell(writer, "m", "Ready")
    await until(lambda: len(api.written) == 2)
    quick = StatusWriter(api, 0.0, lambda words: None)
    assert tell(quick, "m", "Loading")
    assert tell(quick, "m", "Fetching", is_progress_only=True)
    await writer.close()
    await quick.close()


@pytest.mark.usefixtures("quick")
async def test_a_write_that_fails_is_tried_again_and_holds_up_no_other(api: Api) -> None:
    said: list[str] = []
    writer = StatusWriter(api, 5.0, said.append)
    bad = {f"bad{number}" for number in range(MAX_WRITES + 3)}
    refusal = Rejected("status.phase: unsupported value")
    api.error = lambda item: refusal if item["metadata"]["name"] in bad else None
    for name in sorted(bad):
        tell(writer, name, "Loading")
    tell(writer, "good", "Ready")
    await until(lambda: api.written == [("good", "Ready")])
    await until(lambda: api.tried.count(("bad0", "Loading")) >= 3)
    assert writer.last(KIND, key("bad0"), "u", status("Pending")) == status("Loading")
    assert sum("bad0 " in words for words in said) == 1
    tell(writer, "bad0", "Ready")
    api.error = lambda item: None
    await until(lambda: len(api.written) == 1 + len(bad))
    assert ("bad0", "Ready") in api.written
    assert ("bad0", "Loading") not in api.written
    assert api.most_under_way <= MAX_WRITES
    await writer.close()


def test_pauses_grow_and_end_sooner_when_there_was_no_answer() -> None:
    pauses = [status_writer._pause_s(number, Rejected("no")) for number in range(1, 9)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]
    assert [status_writer._pause_s(number, ApiAway("no")) for number in (1, 2, 3, 40)] == [2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("another one"), NotLeader("not this replica")])
async def test_a_status_of_an_object_that_is_gone_is_dropped_in_silence(api: Api, error: NaruError) -> None:
    said: list[str] = []
    writer = StatusWriter(api, 5.0, said.append)
    api.error = lambda item: error
    tell(writer, "m", "Ready")
    await until(lambda: not [it for it in asyncio.all_tasks() if it.get_name().startswith("status of")])
    assert (api.tried, said) == ([("m", "Ready")], [])
    assert writer.last(KIND, key("m"), "u", status("Pending")) == status("Ready")
    writer.forget()  # at the resync what the API server shows counts again
    assert writer.last(KIND, key("m"), "u", status("Pending")) == status("Pending")


@pytest.mark.usefixtures("quick")
async def test_an_api_server_that_is_away_is_told_once_for_all(api: Api) -> None:
    said: list[str] = []
    writer = StatusWriter(api, 5.0, said.append)
    api.error = lambda item: ApiAway(f"cannot patch {item['metadata']['name']!r}: no answer")
    for number in range(20):
        tell(writer, f"m{number}", "Ready")
    await until(lambda: len(api.tried) >= 40)
    assert len(said) == 1
    api.error = lambda item: None
    await until(lambda: len(api.written) == 20)
    await writer.close()


async def test_an_object_made_anew_under_its_name_does_not_wait_for_the_last_ones_failures(api: Api) -> None:
    writer = StatusWriter(api, 5.0, lambda words: None)
    refusal = Rejected("no")
    api.error = lambda item: refusal if item["metadata"]["uid"] == "old" else None
    tell(writer, "m", "Loading", uid="old")
    tell(writer, "n", "Loading", uid="old")
    await until(lambda: len(api.tried) == 2)
    tell(writer, "m", "Ready", uid="new")
    writer.keep_only(KIND, {key("m")})
    await until(lambda: api.written == [("m", "Ready")])
    await until(lambda: not [it for it in asyncio.all_tasks() if it.get_name().startswith("status of")])
    assert writer.last(KIND, key("n"), "old", status("Pending")) == status("Pending")
