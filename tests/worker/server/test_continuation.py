"""A worker goes on with output that another one made, as if it had made all of it."""

from __future__ import annotations

from typing import Any

import pytest
from toy_worker import ask, ids, running_worker, text

from naru_proto.v1 import worker_pb2

STOP_TEXT = "ab"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.3, "seed": 11},
    "broken characters": {"temperature": 100.0, "seed": 3, "max_tokens": 40},
    "penalties": {"temperature": 0.9, "seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 3.0, "max_tokens": 24},
    "end of sequence": {"temperature": 2.0, "seed": 1, "ignore_eos": False, "logit_bias": {256: 6.0}, "max_tokens": 60},
    "min tokens": {"temperature": 2.0, "seed": 1, "ignore_eos": False, "logit_bias": {256: 50.0}, "min_tokens": 9},
    "stop token": {"temperature": 1.0, "seed": 2, "stop_token_ids": list(range(97, 101)), "max_tokens": 60},
    "logprobs": {"temperature": 1.0, "seed": 9, "logprobs": 2},
    "what is left": {"max_tokens": 240},
    "choices": {"temperature": 1.2, "seed": 4, "n": 3, "logit_bias": {256: 3.0}, "ignore_eos": False},
}


def prior(deltas: list[worker_pb2.Delta], n: int = 1) -> list[worker_pb2.PriorOutput]:
    """What a router has of an answer after these deltas."""
    finished = {d.index for d in deltas if d.finish_reason}
    return [worker_pb2.PriorOutput(token_ids=ids(deltas, i), is_finished=i in finished) for i in range(n)]


def rest_of(
    request: worker_pb2.GenerateRequest, deltas: list[worker_pb2.Delta], request_id: str
) -> worker_pb2.GenerateRequest:
    """The request for whoever goes on after these deltas."""
    rest = worker_pb2.GenerateRequest()
    rest.CopyFrom(request)
    rest.request_id = request_id
    rest.prior.extend(prior(deltas, request.sampling.n or 1))
    rest.prior_revision = deltas[0].revision
    return rest


def shape(deltas: list[worker_pb2.Delta], n: int) -> list[Any]:
    """All that a client sees of each choice; how it was cut into deltas is no part of it."""
    told = []
    for i in range(n):
        mine = [d for d in deltas if d.index == i]
        ends = [(d.finish_reason, d.stop_reason) for d in mine if d.finish_reason]
        told.append((text(mine, i), ids(mine, i), ends, [p.SerializeToString() for d in mine for p in d.logprobs]))
    return told


@pytest.mark.parametrize("case", CASES)
async def test_an_answer_cut_anywhere_goes_on_to_the_same_end(case: str) -> None:
    request = ask("whole", **CASES[case])
    n = request.sampling.n or 1
    async with running_worker(None, None, "toy") as first, running_worker(None, None, "toy") as second:
        whole = await first.generate(request)
        assert whole[-1].request_done and not whole[-1].HasField("error"), whole[-1]
        assert whole[0].revision == "digest of toy://a" and not any(d.revision for d in whole[1:])
        cuts = range(1, len(whole)) if len(whole) < 60 else range(1, len(whole), len(whole) // 12)
        for cut in cuts:
            rest = await second.generate(rest_of(request, whole[:cut], f"after {cut}"))
            assert shape(whole[:cut] + rest, n) == shape(whole, n), cut
            assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
            assert rest[-1].usage.prompt_tokens == whole[-1].usage.prompt_tokens
            assert rest[-1].usage.cached_tokens <= rest[-1].usage.prompt_tokens


async def test_a_stop_string_is_found_though_it_spans_the_cut() -> None:
    async with running_worker(None, None, "toy") as worker:
        free = text(await worker.generate(ask("free", max_tokens=30)))
        stop = free[14:19]
        request = ask("whole", max_tokens=30, stop=[stop])
        whole = await worker.generate(request)
        assert text(whole) == free[: free.index(stop)] and whole[-1].stop_reason == stop
        for cut in range(1, len(whole)):
            rest = await worker.generate(rest_of(request, whole[:cut], f"after {cut}"))
            assert text(whole[:cut]) + text(rest) == text(whole)
            assert (rest[-1].stop_reason, rest[-1].usage.completion_tokens) == (stop, whole[-1].usage.completion_tokens)


def odd(**fields: Any) -> worker_pb2.GenerateRequest:
    """A request with prior output that makes no sense in some way."""
    sampling = fields.pop("sampling", {})
    request = ask("odd", **sampling)
    request.prior.extend(worker_pb2.PriorOutput(**each) for each in fields["prior"])
    return request


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (odd(prior=[{"token_ids": [1]}, {}]), "2 items for 1 choices"),
        (odd(prior=[{"token_ids": [1]}], sampling={"n": 2}), "1 items for 2 choices"),
        (odd(prior=[{"token_ids": [97], "is_finished": True}]), "every choice of prior is finished"),
        (odd(prior=[{"token_ids": [264]}]), "token id 264"),
        (odd(prior=[{"token_ids": [-1]}]), "token id -1"),
        (odd(prior=[{"token_ids": [97] * 12}]), "prior has 12 tokens, and the output ends at 12"),
        (odd(prior=[{}], sampling={"max_tokens": 0}), "the output ends at 0"),
        (odd(prior=[{"token_ids": list(b"cabc")}], sampling={"stop": [STOP_TEXT]}), "the stop string 'ab'"),
        (odd(prior=[{"token_ids": [97]}], sampling={"prompt_logprobs": 1}), "prompt_logprobs is set"),
    ],
)
async def test_prior_output_that_makes_no_sense_is_refused(request_: worker_pb2.GenerateRequest, words: str) -> None:
    async with running_worker(None, None, "toy") as worker:
        (delta,) = await worker.generate(request_)
        assert delta.error.code == "invalid_request_error" and words in delta.error.message
        assert (await worker.generate(ask("next")))[-1].request_done


async def test_output_of_another_revision_is_not_gone_on_with() -> None:
    async with running_worker(None, None, "toy") as worker:
        request = ask("whole")
        whole = await worker.generate(request)
        rest = rest_of(request, whole[:3], "rest")
        rest.prior_revision = "digest of another"
        (delta,) = await worker.generate(rest)
        assert delta.error.code == "service_unavailable" and "'digest of another'" in delta.error.message


async def test_a_request_that_waits_for_its_model_goes_on_when_it_is_there() -> None:
    async with running_worker(None, None, "toy") as worker:
        request = ask("whole")
        whole = await worker.generate(request)
        await worker.load("late", "toy://a", tier=worker_pb2.TIER_COLD)
        rest = rest_of(request, whole[:5], "rest")
        rest.model = "late"
        assert ids(whole[:5]) + ids(await worker.generate(rest)) == ids(whole)
