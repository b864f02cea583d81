"""What a router knows of workers by their frames, by what it sent, and after frames that cannot be."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.v1 import worker_pb2
from naru_router.adapters.news import NO_NEWS, News

K = [bytes([65 + i]) * 16 for i in range(6)]


def load_frame(last_id: str = "", *, others: int = 0, **tokens: int) -> worker_pb2.WorkerFrame:
    models = [worker_pb2.ModelLoad(model=name, waiting_tokens=count, num_running=1) for name, count in tokens.items()]
    load = worker_pb2.Load(num_others=others, models=models, last_request_id=last_id)
    return worker_pb2.WorkerFrame(epoch="e", load=load)


def keys_frame(*keys: bytes, epoch: int = 1, is_snapshot: bool = True, process: str = "e") -> worker_pb2.WorkerFrame:
    update = worker_pb2.RouteKeyUpdate(model="m", epoch=epoch, is_snapshot=is_snapshot, added=b"".join(keys))
    return worker_pb2.WorkerFrame(epoch=process, route_keys=[update])


def test_nothing_is_known_of_a_worker_that_has_said_nothing() -> None:
    news = News()
    assert news.load("w", "m") is NO_NEWS
    assert (news.num_others("w"), news.epoch("w"), news.matches("m", K)) == (0, "", {})


def test_models_that_a_frame_does_not_name_stay_as_they_were_told() -> None:
    news = News()
    news.take("w", load_frame(others=7, m=100, n=50))
    news.take("w", load_frame(others=2, n=40))
    assert (news.load("w", "m").waiting_tokens, news.load("w", "n").waiting_tokens, news.num_others("w")) == (
        100,
        40,
        2,
    )
    gone = worker_pb2.WorkerFrame(epoch="e", load=worker_pb2.Load(models=[worker_pb2.ModelLoad(model="m")]))
    news.take("w", gone)
    assert news.load("w", "m") is NO_NEWS


def test_what_was_sent_counts_until_a_frame_counts_it_in() -> None:
    news = News()
    news.take("w", load_frame(m=10))
    for number in range(4):
        news.sent("w", f"r{number}", "m", 100)
    news.sent("w", "r4", "n", 5)
    assert (news.load("w", "m").waiting_tokens, news.load("w", "n").waiting_tokens) == (410, 5)
    news.take("w", load_frame(m=20))  # output alone: its numbers are older than the requests
    assert news.load("w", "m").waiting_tokens == 420
    news.take("w", load_frame("r1", m=210))
    assert news.load("w", "m").waiting_tokens == 410
    news.take("w", load_frame("r1", m=210))
    assert news.load("w", "m").waiting_tokens == 410
    news.settled("w", "r3")  # taken back before it was written
    news.take("w", load_frame("r4", m=310, n=5))
    assert (news.load("w", "m").waiting_tokens, news.load("w", "n").waiting_tokens) == (310, 5)
    news.settled("w", "r4")
    assert news.load("w", "n").waiting_tokens == 5


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 50)),
            st.tuples(st.just("settle"), st.integers(0, 30)),
            st.tuples(st.just("count"), st.integers(0, 30)),
            st.tuples(st.just("lost"), st.just(0)),
        ),
        max_size=40,
    )
)
def test_own_counts_never_drift_whatever_ends_when(actions: list[tuple[str, int]]) -> None:
    news = News()
    pending: dict[str, int] = {}
    num_sent = 0
    for action, number in actions:
        if action == "send":
            pending[f"r{num_sent}"] = number
            news.sent("w", f"r{num_sent}", "m", number)
            num_sent += 1
        elif action == "settle":
            pending.pop(f"r{number}", None)
            news.settled("w", f"r{number}")
        elif action == "count":
            if f"r{number}" in pending:
                pending = {k: v for k, v in pending.items() if int(k[1:]) > number}
            news.take("w", load_frame(f"r{number}", m=1000))
        else:
            pending = {}
            news.lost("w")
        told = 1000 if news.epoch("w") else 0
        assert news.load("w", "m").waiting_tokens == told + sum(pending.values())


def test_a_broken_stream_voids_all_that_was_told() -> None:
    news = News()
    news.take("w", keys_frame(*K))
    news.take("w", load_frame(others=3, m=10))
    news.sent("w", "r", "m", 10)
    assert news.matches("m", K) == {"w": 6}
    news.lost("w")
    assert (news.matches("m", K), news.load("w", "m"), news.num_others("w"), news.epoch("w")) == ({}, NO_NEWS, 0, "")
    news.take("w", keys_frame(*K[:2]))
    assert news.matches("m", K) == {"w": 2}
    news.take("w", keys_frame(K[0], process="another life"))
    assert (news.matches("m", K), news.epoch("w")) == ({"w": 1}, "another life")


def test_damage_is_left_out_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    news = News()
    news.take("w", keys_frame(*K[:3]))
    with caplog.at_level(logging.WARNING):
        news.take("w", keys_frame(b"half a key", is_snapshot=False))
        news.take("w", keys_frame(K[3], is_snapshot=False))
        long_name = worker_pb2.RouteKeyUpdate(model="m" * 2000, is_snapshot=True)
        news.take("w", worker_pb2.WorkerFrame(epoch="e", route_keys=[long_name]))
        news.take("w", object())  # type: ignore[arg-type]
    assert news.num_damaged == 4
    assert len(caplog.records) == 1
    assert news.matches("m", K) == {}, "keys that may be wrong are not used"
    news.take("w", keys_frame(*K))
    assert news.matches("m", K) == {"w": 6}


def test_numbers_that_are_none_count_as_unknown() -> None:
    news = News()
    odd = worker_pb2.ModelLoad(
        model="m",
        num_running=-4,
        num_waiting=3,
        waiting_tokens=-1,
        prefill_tokens_per_s=math.nan,
        decode_step_s=math.inf,
        kv_usage=7.0,
    )
    news.take("w", worker_pb2.WorkerFrame(epoch="e", load=worker_pb2.Load(num_others=-1, models=[odd])))
    load = news.load("w", "m")
    assert (load.num_running, load.num_waiting, load.waiting_tokens, load.kv_usage) == (0, 3, 0, 1.0)
    assert (load.prefill_tokens_per_s, load.decode_step_s, news.num_others("w")) == (0.0, 0.0, 0)
