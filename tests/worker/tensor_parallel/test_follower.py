"""What a rank does with its orders, in a thread: answers, refuses, or stops and says why."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from batches import batch_of, lanes_for  # noqa: E402
from tiny_models import TinySpec  # noqa: E402

from naru_worker.adapters.ops.protocol import RunnerOptions  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.errors import CollectiveFailed  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.follower import Follower  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.heartbeat import answer_pulses, ask  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.wire import (  # noqa: E402
    MAX_HEADER_BYTES,
    Frame,
    pack_batch,
    receive,
    send,
    unpack_batch,
)

OPTIONS = RunnerOptions(
    block_size=16, num_blocks=8, max_num_tokens=64, max_num_seqs=4, max_model_len=128, kv_format="f32"
)


class Alone:
    """Exchanges of one rank with itself; they fail when told to."""

    def __init__(self) -> None:
        self.rank, self.size, self.num_begun = 0, 1, 0
        self.is_broken = False

    def add(self, partial: Any, residual: Any) -> Any:
        self.num_begun += 1
        if self.is_broken:
            raise CollectiveFailed("Connection closed by peer")
        return partial + residual

    def gather_columns(self, columns: Any, num_columns: int) -> Any:
        assert columns.shape[1] == num_columns
        return columns


class Boss:
    """Rank 0's side of one follower."""

    def __init__(self, connection: socket.socket, collectives: Alone, path: Path) -> None:
        self.connection, self.collectives, self.path = connection, collectives, path

    def tell(self, tail: bytes = b"", **header: Any) -> dict[str, Any]:
        send(self.connection, Frame({"order": 1, **header}, tail))
        frame = receive(self.connection)
        assert frame is not None
        return frame.header

    def load(self, **changes: Any) -> dict[str, Any]:
        header: dict[str, Any] = {
            "path": str(self.path),
            "size": 2,
            "backend": "ref",
            "options": dataclasses.asdict(OPTIONS),
        }
        return self.tell(do="load", model=1, **(header | changes))


@pytest.fixture
def boss(tiny_model: Callable[[TinySpec], Path], request: pytest.FixtureRequest) -> Iterator[Boss]:
    mine, its = socket.socketpair()
    collectives, statuses = Alone(), []
    mine.settimeout(60)
    thread = threading.Thread(target=lambda: statuses.append(Follower(its, {2: collectives}).serve()))
    thread.start()
    yield Boss(mine, collectives, tiny_model(TinySpec()))
    mine.close()
    thread.join()
    its.close()
    assert statuses == [getattr(request, "param", 0)], "the exit status"


def step() -> bytes:
    [lane] = lanes_for([[1, 2, 3]], 16, 0)
    return pack_batch(batch_of([(lane, 3)], 16))


def test_a_rank_loads_steps_releases_and_closes_and_ends_when_rank_0_is_gone(boss: Boss) -> None:
    assert boss.load() == {"done": 1}
    assert boss.tell(step(), do="step", model=1, order=7) == {"done": 7}
    assert boss.collectives.num_begun == 4, "two sums a layer"
    assert boss.tell(do="release", model=1, first_block=1, num_blocks=2) == {"done": 1}
    refused = boss.tell(do="release", model=1, first_block=7, num_blocks=2)
    assert refused["error"].startswith("blocks [7, 9) lie outside the 8"), "nobody waits for memory: the rank goes on"
    assert boss.tell(do="close", model=1) == {"done": 1}


def test_a_model_that_cannot_be_loaded_is_an_answer_and_no_end(boss: Boss) -> None:
    assert "does not exist" in boss.load(path="/nowhere")["error"]
    assert boss.load(backend="cpu")["error"].startswith(
        "backend 'cpu' cannot split a model over ranks; use one of cuda, ref"
    )
    assert boss.load(options={**dataclasses.asdict(OPTIONS), "kv_format": "f99"})["error"] == "KeyError('f99')"
    assert boss.tell(do="close", model=1) == {"done": 1}


@pytest.mark.parametrize("boss", [4], indirect=True)
def test_a_step_that_fails_by_itself_stops_the_rank_with_its_reason(
    boss: Boss, capsys: pytest.CaptureFixture[str]
) -> None:
    assert boss.tell(step(), do="step", model=5) == {"failed": "KeyError: 5", "is_own": True}


@pytest.mark.parametrize("boss", [3], indirect=True)
def test_a_step_that_fails_with_an_exchange_blames_nobody_yet(boss: Boss) -> None:
    boss.load()
    boss.collectives.is_broken = True
    answer = boss.tell(step(), do="step", model=1)
    assert answer == {"failed": "an exchange with other ranks failed: Connection closed by peer", "is_own": False}


def test_inputs_of_a_step_arrive_as_they_were_sent() -> None:
    lanes = lanes_for([[1, 2, 3], [4] * 20], 16, 4)
    lanes[0].num_prompt_tokens = 0
    batch = dataclasses.replace(
        batch_of([(lanes[0], 3), (lanes[1], 20)], 16), copies=np.array([[3, 1], [4, 2]], np.int32)
    )
    got = unpack_batch(pack_batch(batch))
    assert got.num_generated_tokens == 3
    arrays = [field.name for field in dataclasses.fields(batch)][:8]
    assert "copies" in arrays and "num_generated_tokens" not in arrays
    for name in arrays:
        sent, arrived = getattr(batch, name), getattr(got, name)
        assert (arrived.dtype, arrived.shape) == (np.int32, sent.shape), name
        assert np.array_equal(arrived, sent), name
    assert got.table_lines is None


def test_what_is_no_frame_is_refused_and_half_a_frame_is_none() -> None:
    mine, its = socket.socketpair()
    with mine, its:
        mine.sendall((MAX_HEADER_BYTES + 1).to_bytes(4, "little") + bytes(4))
        with pytest.raises(OSError, match="does not speak this protocol"):
            receive(its)
        mine.sendall(b"\x05\0\0\0")
        mine.close()
        assert receive(its) is None


def test_a_rank_tells_how_many_exchanges_it_has_begun_while_it_is_in_one() -> None:
    mine, its = socket.socketpair()
    with mine, its:
        assert ask(mine, 0.0) is None, "nobody answers yet"
        counted = SimpleNamespace(num_begun=41)
        has_ended = threading.Event()
        answer_pulses(its, lambda: counted.num_begun, has_ended.set)
        assert ask(mine, 60.0) == 41, "of the question before, which came too late for its asker"
        counted.num_begun = 42
        while ask(mine, 60.0) != 42:
            pass
        mine.shutdown(socket.SHUT_RDWR)
        assert has_ended.wait(60.0), "a rank whose boss is gone hears of it at once"
        assert ask(mine, 1.0) is None
