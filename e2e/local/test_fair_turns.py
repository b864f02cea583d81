"""Turns of tenants on one busy worker that serves one request at a time: by weight, by priority, whoever sends more.

Told by the order in which answers end, never by the clock. A first request keeps the worker busy until all others wait.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from running_naru import RunningNaru, chat_body, eventually, small_model, stream_events
from tenants import TIMEOUT_S, Tenant, model_stats, write_tenants

from naru_proto import names

pytestmark = pytest.mark.smollm2
MANIFEST = small_model("engine: {maxNumSeqs: 1}", num_workers=1)
TENANTS = {
    "blocker": {"topPriority": -100},
    "even": {},
    "other": {},
    "heavy": {"weight": 3},
    "urgent": {"topPriority": -10},
}
ANSWER_TOKENS = 12


class Counter:
    """Sends requests and notes in which order they end."""

    def __init__(self, naru: RunningNaru, tenants: dict[str, Tenant]) -> None:
        self.naru = naru
        self.tenants = tenants
        self.ended: list[str] = []
        self._lock = threading.Lock()

    def ask(self, tenant: str, priority: int = 0, label: str = "") -> httpx.Response:
        """One answer; its label, or its tenant, is noted when it has come."""
        headers = {names.HEADER_PRIORITY: str(priority)}
        reply = self.tenants[tenant].chat(
            self.naru.url, "Count up from one.", max_tokens=ANSWER_TOKENS, ignore_eos=True, headers=headers
        )
        with self._lock:
            self.ended.append(label or tenant)
        return reply

    def are_waiting(self, count: int) -> bool:
        """Whether so many requests wait on the worker."""
        return sum(stats.num_waiting for stats in model_stats(self.naru, "smollm2")) == count

    @contextlib.contextmanager
    def behind_another(self) -> Iterator[None]:
        """While it lasts, the worker serves another request; at its end, those that came meanwhile have their turns."""
        body = {**chat_body("Tell a long story.", max_tokens=1800, ignore_eos=True), "stream": True}
        headers = self.tenants["blocker"].headers(**{names.HEADER_PRIORITY: "-100"})
        with (
            httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", f"{self.naru.url}/v1/chat/completions", json=body, headers=headers) as stream,
        ):
            assert stream.status_code == 200, stream.read()
            events = stream_events(stream.iter_lines())
            next(events)
            yield
            assert next(events) is not None, "it has not ended meanwhile"


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningNaru, dict[str, Tenant]]]:
    folder = tmp_path_factory.mktemp("town")
    (folder / "models.yaml").write_text(MANIFEST)
    tenants = write_tenants(folder / "tenants.yaml", TENANTS)
    with RunningNaru(["--tenants", str(folder / "tenants.yaml"), str(folder / "models.yaml")], folder / "home") as naru:
        yield naru, tenants


@pytest.fixture
def counter(town: tuple[RunningNaru, dict[str, Tenant]]) -> Counter:
    return Counter(*town)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def assert_served(replies: Sequence[Future[httpx.Response]]) -> None:
    answers = [reply.result(TIMEOUT_S) for reply in replies]
    assert [answer.status_code for answer in answers] == [200] * len(answers), {answer.text for answer in answers}
    lengths = {answer.json()["usage"]["completion_tokens"] for answer in answers}
    assert lengths == {ANSWER_TOKENS}


def test_one_request_is_answered_in_the_middle_of_another_tenants_flood(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    with counter.behind_another():
        replies = [pool.submit(counter.ask, "even") for _ in range(40)]
        eventually(lambda: counter.are_waiting(40), 20, "the flood waits on the worker")
    eventually(lambda: len(counter.ended) >= 5, 30, "the flood is being answered")
    num_before = len(counter.ended)
    replies.append(pool.submit(counter.ask, "other"))
    assert_served(replies)
    place = counter.ended.index("other")
    assert place <= num_before + 8, "about one turn after it came"
    assert counter.ended[place + 1 :].count("even") >= 20


def test_backlogged_tenants_are_served_by_their_weights(counter: Counter, pool: ThreadPoolExecutor) -> None:
    with counter.behind_another():
        # Who came first, and sends more, has no more of it.
        replies = [pool.submit(counter.ask, "even") for _ in range(28)]
        eventually(lambda: counter.are_waiting(28), 20, "the first tenant's requests wait")
        replies += [pool.submit(counter.ask, "heavy") for _ in range(21)]
        eventually(lambda: counter.are_waiting(49), 20, "all requests wait")
    assert_served(replies)
    both_wait = counter.ended[:24]
    assert both_wait.count("heavy") == pytest.approx(18, abs=2)
    for start in range(0, 24, 8):
        assert both_wait[start : start + 8].count("heavy") == pytest.approx(6, abs=2), "at any time, not on the whole"


def test_a_lower_priority_number_goes_first_as_far_as_the_tenant_may(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    order = [("even", 10, "late"), ("even", 0, "normal"), ("other", -10, "not allowed"), ("urgent", -10, "soon")]
    with counter.behind_another():
        replies = []
        for num_waiting, request in enumerate(order, 1):
            replies.append(pool.submit(counter.ask, *request))
            eventually(functools.partial(counter.are_waiting, num_waiting), 10, "it waits")
    assert_served(replies)
    assert counter.ended == ["soon", "normal", "not allowed", "late"]


def test_what_can_wait_least_is_refused_first_and_told_when_to_come_again(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    texts = [" ".join(f"{word} {number} is closed." for number in range(80)) for word in ("Platform", "Track", "Gate")]
    ask_long = functools.partial(counter.tenants["even"].chat, counter.naru.url, max_tokens=1)
    for text in texts[:2]:
        assert ask_long(text).status_code == 200  # now the worker's speed has been measured
    with counter.behind_another():
        waiting = pool.submit(ask_long, texts[2])
        eventually(lambda: counter.are_waiting(1), 10, "a long prompt waits")
        refused = counter.ask("even", 100)
        served = pool.submit(counter.ask, "even", 0)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "at priority 100" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert waiting.result(TIMEOUT_S).status_code == served.result(TIMEOUT_S).status_code == 200


def test_a_stream_that_waits_for_its_turn_says_so_where_that_is_asked(counter: Counter) -> None:
    body = chat_body("Count up from one.", max_tokens=ANSWER_TOKENS, ignore_eos=True, stream=True)
    headers = counter.tenants["even"].headers(**{names.HEADER_KEEPALIVE: "1"})
    url = f"{counter.naru.url}/v1/chat/completions"
    with contextlib.ExitStack() as busy, httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        busy.enter_context(counter.behind_another())
        with client.stream("POST", url, json=body, headers=headers) as stream:
            lines = stream.iter_lines()
            assert (stream.status_code, next(lines), next(lines)) == (200, ": waiting", "")
            assert counter.are_waiting(1)
            busy.close()
            told = [line for line in lines if line and not line.startswith(":")]
    assert told[-1] == "data: [DONE]"
    assert len(told) > 2


def test_a_tenants_flood_has_no_other_one_refused(counter: Counter, pool: ThreadPoolExecutor) -> None:
    flooder, priority = counter.tenants["even"], {names.HEADER_PRIORITY: "5"}

    def flood(number: int) -> httpx.Response:
        text = " ".join(f"Train {number} stops at platform {other}." for other in range(40))
        return flooder.chat(counter.naru.url, text, max_tokens=1, headers=priority)

    assert flood(100).status_code == 200  # now the worker's speed has been measured
    with counter.behind_another():
        waiting: list[Future[httpx.Response]] = []

        def is_refused() -> bool:
            """Whether the last one was not taken."""
            eventually(lambda: waiting[-1].done() or counter.are_waiting(len(waiting)), 20, "it waits or is refused")
            return waiting[-1].done()

        while not waiting or not is_refused():
            waiting.append(pool.submit(flood, len(waiting)))
        assert waiting.pop().result().status_code == 429
        quiet = pool.submit(counter.ask, "other", 5)
        eventually(lambda: quiet.done() or counter.are_waiting(len(waiting) + 1), 20, "it waits or is refused")
        assert not quiet.done(), quiet.result().text
        assert flood(101).status_code == 429
    assert_served([quiet])
    assert {reply.result(TIMEOUT_S).status_code for reply in waiting} == {200}
