"""Pieces of batches: what is on disk of them, their pace, their lines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from naru_router.adapters.batches.line_reader import read_lines
from naru_router.adapters.batches.parts import Done, Parts, entry
from naru_router.adapters.batches.slots import Slots
from naru_router.adapters.storage import file_shelf
from naru_router.adapters.storage.file_shelf import FileShelf
from naru_router.adapters.storage.record_store import RecordStore
from naru_router.core.batches.line import LineFault, output_line, parse_line
from naru_router.core.batches.pace import MAX_PAUSE_S, Pace, pause_s


async def test_an_entry_that_was_being_written_was_never_done(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    parts = Parts(store, "", "batch_x")
    first, later = await parts.writer(5), await parts.writer(12)
    first.append(entry(1, b'{"a": 1}', is_error=False) + entry(2, b'{"b": 2}', is_error=True))
    first.append(b"3 o {")
    later.append(b"junk\n" + entry(2, b'{"again": 2}', is_error=False) + entry(4, b'{"c": 3}', is_error=False))
    first.close()
    later.close()
    found: list[tuple[int, bool, bytes]] = []
    done = Done(4)
    await parts.scan(lambda number, is_error, text: found.append((number, is_error, text)))
    assert found == [
        (1, False, b'{"a": 1}'), (2, True, b'{"b": 2}'), (2, False, b'{"again": 2}'), (4, False, b'{"c": 3}'),
    ]  # fmt: skip
    assert [done.add(number, is_error=is_error) for number, is_error, _ in found] == [True, True, False, True]
    assert (done.completed, done.failed, 3 in done, 4 in done, 5 in done) == (2, 1, False, True, False)
    assert not done.add(5, is_error=False)
    await parts.remove()
    found.clear()
    await parts.scan(lambda number, is_error, text: found.append((number, is_error, text)))
    assert found == []
    await store.close()


def test_the_pace_falls_at_refusals_and_comes_back() -> None:
    pace = Pace()
    assert pace.limit(64) == 64
    for _ in range(50):
        pace.refused(10.0)
    assert pace.limit(64) == 42, "many refusals of one moment count once"
    pace.refused(11.0)
    assert pace.limit(64) == 27
    for _ in range(20):
        pace.refused(12.0 + 2 * _)
    assert pace.limit(64) == 1
    for _ in range(5000):
        pace.answered()
    assert pace.limit(64) == 64
    assert pace.limit(128) == 128, "another worker has come"
    assert pace.limit(16) == 16


def test_pauses_grow_and_keep_to_what_was_told() -> None:
    assert [pause_s(i, 0.0, 0.5) for i in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert pause_s(0, 20.0, 0.5) == 20.0
    assert pause_s(1000, 0.0, 0.999) < MAX_PAUSE_S * 1.25
    assert pause_s(0, 1e9, 0.0) == MAX_PAUSE_S * 0.75


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"custom_id": "a", "custom_id": "b"}', "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b'{"custom_id": "\\ud83d", "method": "POST", "url": "/x", "body": {"model": "m"}}', "invalid_json_line"),
        (b'{"custom_id": "a", "method": "POST", "url": "/x", "body": {"model": "m", "a": 1e999}}', "invalid_json_line"),
        (b'{"custom_id": "%b", "method": "POST"}' % (b"a" * 513), "invalid"),
    ],
)  # fmt: skip
def test_lines_that_json_in_utf_8_cannot_carry_are_refused(data: bytes, code: str) -> None:
    with pytest.raises(LineFault) as raised:
        parse_line(data, "/x")
    assert raised.value.code == code


@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 1000])
async def test_lines_are_the_same_however_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(file_shelf, "CHUNK_BYTES", chunk_bytes)
    store = RecordStore(tmp_path)
    for content, wanted in (
        (b"", []),
        (b"\n \n\t\r\n", []),
        (b"one", [(1, b"one")]),
        (b"one\ntwo\r\n\nfour\n", [(1, b"one"), (2, b"two\r"), (4, b"four")]),
        (b"x" * 10 + b"\n" + b"y" * 11 + b"\nz", [(1, b"x" * 10), (2, None), (3, b"z")]),
        (b"y" * 50, [(1, None)]),
    ):
        path = tmp_path / "lines"
        path.write_bytes(content)
        found = [each async for each in read_lines(FileShelf(store), path, 10)]
        assert found == wanted
    await store.close()


async def test_slots_are_given_in_turn_and_never_more_than_there_are() -> None:
    most, running, peak, order = 2, 0, 0, []
    slots = Slots(lambda: most)
    step = asyncio.Event()

    async def use(number: int) -> None:
        nonlocal running, peak
        async with slots:
            running += 1
            peak = max(peak, running)
            order.append(number)
            await step.wait()
            running -= 1

    tasks = [asyncio.create_task(use(i)) for i in range(6)]
    await asyncio.sleep(0)
    assert order == [0, 1]
    tasks[2].cancel()  # while it waits
    step.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (order, peak) == ([0, 1, 3, 4, 5], 2)
    async with slots, slots:
        pass


def test_an_output_line_is_one_line() -> None:
    text = output_line("batch_req_1", "ü", 200, "r", b'{\n "a": "x\\ny"\n}')
    assert b"\n" not in text
    assert json.loads(text)["response"]["body"] == {"a": "x\ny"}
