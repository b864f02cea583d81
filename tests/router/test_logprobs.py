"""Logprobs and echo: OpenAI's shapes on both endpoints, streamed and whole, and nothing that JSON cannot carry."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, simple
from stub_worker import LENGTH, STOP, Script, play, usage

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire
from naru_router.core.logprobs import FLOOR, LegacyLogprobs, chat_content, finite


def token(text: str | bytes, logprob: float = -0.5) -> inf.TokenLogprob:
    data = text.encode() if isinstance(text, str) else text
    return inf.TokenLogprob(token_id=1, token=data.decode("utf-8", "replace"), bytes=data, logprob=logprob, rank=1)


def position(text: str | bytes, logprob: float = -0.5, top: tuple[tuple[str | bytes, float], ...] = ()) -> Any:
    return inf.PositionLogprobs(chosen=token(text, logprob), top=[token(t, p) for t, p in top])


def scored(*texts: str) -> Script:
    deltas = [wire.Delta(text=t, num_tokens=1, logprobs=[position(t, -1.0, ((t, -1.0), ("zz", -3.0)))]) for t in texts]
    end = wire.Delta(finish_reason=LENGTH, usage=usage(completion=len(texts)), request_done=True)
    return play([*deltas, end])


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf, -1e30, 0.001])
def test_every_number_is_finite_and_no_probability_above_one(bad: float) -> None:
    assert FLOOR <= finite(bad) <= 0.0
    entry = chat_content([position("a", bad, (("b", bad),))])
    json.dumps(entry, allow_nan=False)


async def test_chat_logprobs_list_each_token(rig: Rig) -> None:
    await simple(rig, scored("Hé", "llo"))
    asked = body(CHAT, logprobs=True, top_logprobs=2)
    content = (await rig.post(CHAT, asked)).json()["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content] == ["Hé", "llo"]
    assert content[0]["bytes"] == list("Hé".encode()) and content[0]["logprob"] == -1.0
    assert [(t["token"], t["logprob"]) for t in content[0]["top_logprobs"]] == [("Hé", -1.0), ("zz", -3.0)]
    events = (await rig.stream(CHAT, asked))[:-1]
    streamed = [e for c in events for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_logprobs_are_null_when_not_asked_for(rig: Rig) -> None:
    await simple(rig)
    for path in (CHAT, COMPLETION):
        assert (await rig.post(path, body(path))).json()["choices"][0]["logprobs"] is None


async def test_logprobs_of_withheld_text_come_with_the_next_chunk(rig: Rig) -> None:
    deltas = [
        wire.Delta(num_tokens=1, logprobs=[position("a")]),
        wire.Delta(text="ab", num_tokens=1, logprobs=[position("b")]),
        wire.Delta(num_tokens=1, logprobs=[position("<stop>")]),
        wire.Delta(finish_reason=STOP, usage=usage(), request_done=True),
    ]
    await simple(rig, play(deltas))
    choices = [e["choices"][0] for e in (await rig.stream(CHAT, body(CHAT, logprobs=True)))[:-1]]
    tokens = [[e["token"] for e in (c["logprobs"] or {"content": []})["content"]] for c in choices]
    assert tokens == [[], ["a", "b"], ["<stop>"]]
    choices = [e["choices"][0] for e in (await rig.stream(COMPLETION, body(COMPLETION, logprobs=0)))[:-1]]
    assert [c["logprobs"]["tokens"] for c in choices] == [["a", "b"], ["<stop>"]]


async def test_completion_logprobs_have_the_older_shape(rig: Rig) -> None:
    await simple(rig, scored("Hé", "llo", "!"))
    asked = body(COMPLETION, logprobs=2)
    logprobs = (await rig.post(COMPLETION, asked)).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["Hé", "llo", "!"],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "top_logprobs": [{"Hé": -1.0, "zz": -3.0}, {"llo": -1.0, "zz": -3.0}, {"!": -1.0, "zz": -3.0}],
        "text_offset": [0, 2, 5],
    }
    chunks = [e["choices"][0]["logprobs"] for e in (await rig.stream(COMPLETION, asked))[:-1]]
    for name, whole in logprobs.items():
        assert [x for chunk in chunks if chunk for x in chunk[name]] == whole


PROMPT = "Thé sky"


def echoing(prompt_positions: list[inf.PositionLogprobs], *texts: str) -> Script:
    deltas = [wire.Delta(prompt_logprobs=prompt_positions, num_tokens=0)]
    deltas += [wire.Delta(text=t, num_tokens=1, logprobs=[position(t, -1.0)]) for t in texts]
    end = wire.Delta(finish_reason=LENGTH, usage=usage(3, len(texts)), request_done=True)
    return play([*deltas, end])


NAMED_FIRST = [inf.PositionLogprobs(chosen=token("Thé", 0.0)), position(" s", -2.0), position("ky", -3.0)]
UNNAMED_FIRST = [inf.PositionLogprobs(), *NAMED_FIRST[1:]]


@pytest.mark.parametrize("positions", [NAMED_FIRST, UNNAMED_FIRST], ids=["named", "unnamed"])
@pytest.mark.parametrize("texts", [(), (" is",)], ids=["scored", "continued"])
async def test_echo_scores_the_prompt(rig: Rig, positions: list[Any], texts: tuple[str, ...]) -> None:
    worker = await simple(rig, echoing(positions, *texts))
    asked = body(COMPLETION, prompt=PROMPT, echo=True, logprobs=1, max_tokens=len(texts), temperature=0)
    answer = (await rig.post(COMPLETION, asked)).json()
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT + "".join(texts) and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["Thé", " s", "ky", *texts]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -3.0, *[-1.0] * len(texts)]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 3, 5, *[7] * len(texts)]
    assert answer["usage"]["completion_tokens"] == len(texts)
    assert worker.requests[-1].sampling.prompt_logprobs == 1 and worker.requests[-1].sampling.HasField("max_tokens")
    events = await rig.stream(COMPLETION, asked)
    chunks = [e["choices"][0] for e in events[:-1]]
    assert "".join(c["text"] for c in chunks) == choice["text"]
    for name, whole in choice["logprobs"].items():
        assert [x for c in chunks if c["logprobs"] for x in c["logprobs"][name]] == whole


async def test_a_token_before_the_text_takes_no_room_in_it(rig: Rig) -> None:
    positions = [inf.PositionLogprobs(chosen=token("<s>", 0.0)), position("hi", -2.0)]
    await simple(rig, echoing(positions, "!"))
    logprobs = (await rig.post(COMPLETION, body(COMPLETION, echo=True, logprobs=0))).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "hi", "!"] and logprobs["text_offset"] == [0, 0, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_echoed_as_the_workers_text(rig: Rig, stream: bool) -> None:
    worker = await simple(rig, echoing(NAMED_FIRST, "!"))
    asked = body(COMPLETION, prompt=[1, 2, 3], echo=True)
    if stream:
        text = "".join(e["choices"][0]["text"] for e in (await rig.stream(COMPLETION, asked))[:-1])
    else:
        choice = (await rig.post(COMPLETION, asked)).json()["choices"][0]
        text = choice["text"]
        assert choice["logprobs"] is None
    assert text == PROMPT + "!"
    assert list(worker.requests[0].token_ids.ids) == [1, 2, 3]


async def test_echo_of_text_needs_nothing_from_the_worker(rig: Rig) -> None:
    worker = await simple(rig)
    asked = body(COMPLETION, echo=True, n=2)
    assert [c["text"] for c in (await rig.post(COMPLETION, asked)).json()["choices"]] == ["hiHello", "hiHello"]
    assert not worker.requests[0].sampling.HasField("prompt_logprobs")


def test_offsets_count_characters_though_tokens_cut_them() -> None:
    data = "🧑é".encode()
    builder = LegacyLogprobs()
    builder.add([position(data[:2]), position(data[2:5]), position(data[5:])])
    arrays = builder.take()
    assert arrays is not None
    assert arrays["text_offset"] == [0, 0, 1]
    assert arrays["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\xa7\\x91\\xc3", "bytes:\\xa9"]


async def test_scores_that_json_cannot_carry_still_answer(rig: Rig) -> None:
    hostile = [position("a", -math.inf, (("b", -math.inf), ("c", math.nan)))]
    deltas = [
        wire.Delta(text="a", num_tokens=1, logprobs=hostile, prompt_logprobs=[inf.PositionLogprobs(), *hostile]),
        wire.Delta(finish_reason=STOP, usage=usage(), request_done=True),
    ]
    await simple(rig, play(deltas))
    for path, fields in ((CHAT, {"logprobs": True}), (COMPLETION, {"logprobs": 5, "echo": True})):
        response = await rig.post(path, body(path, **fields))
        assert response.status_code == 200
        json.loads(response.text, parse_constant=pytest.fail)
        for event in (await rig.client.post(path, json=body(path, stream=True, **fields))).text.split("\n\n")[:-2]:
            json.loads(event[6:], parse_constant=pytest.fail)


async def test_the_official_client_reads_logprobs(rig: Rig) -> None:
    await simple(rig, scored("a", "b"))
    url = f"http://127.0.0.1:{rig.app.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1
        )
        plain = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[1].token == "b"
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.text_offset == [0, 1]
