"""Chat and completions over HTTP against a stub worker: the shapes of whole and streamed answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, simple
from stub_worker import LENGTH, STOP, play, say, usage

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])


def text_of(path: str, choice: dict[str, Any]) -> str:
    """The text of a whole choice or of a chunk's."""
    if path == COMPLETION:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content") or "")


def joined(path: str, events: list[Any], index: int = 0) -> str:
    chunks = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(text_of(path, c) for c in chunks)


@BOTH
async def test_a_whole_answer_has_every_field(rig: Rig, path: str) -> None:
    await simple(rig, say("Hel", "lo", cached=3))
    response = await rig.post(path, body(path))
    assert response.status_code == 200
    answer = response.json()
    assert answer["model"] == MODEL and isinstance(answer["created"], int)
    assert answer["object"] == ("chat.completion" if path == CHAT else "text_completion")
    choice = answer["choices"][0]
    assert (text_of(path, choice), choice["finish_reason"], choice["index"]) == ("Hello", "stop", 0)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert response.headers["x-naru-route"].startswith("w0;")


@BOTH
async def test_a_stream_has_the_right_chunks_in_order(rig: Rig, path: str) -> None:
    await simple(rig, say("Hel", "", "lo", finish=LENGTH))
    *chunks, done = await rig.stream(path, body(path))
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == ("chat.completion.chunk" if path == CHAT else "text_completion")
    choices = [c["choices"][0] for c in chunks]
    if path == CHAT:
        assert choices.pop(0)["delta"] == {"role": "assistant", "content": ""}
        assert [c["delta"] for c in choices] == [{"content": "Hel"}, {"content": "lo"}, {}]
    else:
        assert [c["text"] for c in choices] == ["Hel", "lo", ""]
    assert [c["finish_reason"] for c in choices] == [None, None, "length"]
    assert all("usage" not in c for c in chunks)


@BOTH
async def test_withheld_text_makes_no_chunks(rig: Rig, path: str) -> None:
    withheld = [wire.Delta(num_tokens=1) for _ in range(5)]
    end = [wire.Delta(text="all at once", num_tokens=1, finish_reason=STOP, usage=usage(), request_done=True)]
    await simple(rig, play(withheld + end))
    chunks = (await rig.stream(path, body(path)))[:-1]
    empty = [
        c
        for c in chunks
        for choice in c["choices"]
        if choice["finish_reason"] is None and not text_of(path, choice) and not choice.get("delta", {}).get("role")
    ]
    assert empty == []
    assert joined(path, chunks) == "all at once"
    # Text and reason came in one delta; they leave in two chunks, the last one without text.
    assert text_of(path, chunks[-1]["choices"][0]) == "" and chunks[-1]["choices"][0]["finish_reason"] == "stop"


@BOTH
async def test_usage_comes_only_when_asked_for(rig: Rig, path: str) -> None:
    await simple(rig)
    plain = await rig.stream(path, body(path))
    declined = await rig.stream(path, body(path, stream_options={"include_usage": False}))
    asked = await rig.stream(path, body(path, stream_options={"include_usage": True}))
    assert all(e["choices"] for e in plain[:-1]) and all(e["choices"] for e in declined[:-1])
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"] == (await rig.post(path, body(path))).json()["usage"]
    assert all(e["usage"] is None for e in asked[:-2])
    assert len(asked) == len(plain) + 1


@BOTH
async def test_n_choices_keep_apart(rig: Rig, path: str) -> None:
    deltas = [wire.Delta(index=i, text=t, num_tokens=1) for i, t in ((2, "c"), (0, "a"), (1, "b"), (0, "A"), (2, "C"))]
    deltas += [wire.Delta(index=i, finish_reason=STOP) for i in (1, 2)]
    deltas += [wire.Delta(index=0, finish_reason=LENGTH, usage=usage(completion=5), request_done=True)]
    await simple(rig, play(deltas))
    whole = (await rig.post(path, body(path, n=3))).json()
    assert [(c["index"], text_of(path, c), c["finish_reason"]) for c in whole["choices"]] == [
        (0, "aA", "length"),
        (1, "b", "stop"),
        (2, "cC", "stop"),
    ]
    events = await rig.stream(path, body(path, n=3))
    assert [joined(path, events, i) for i in range(3)] == ["aA", "b", "cC"]
    finished = [c["index"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    if path == CHAT:
        roles = [c["index"] for e in events[:-1] for c in e["choices"] if c["delta"].get("role")]
        assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_one_completion_answer_in_their_places(rig: Rig, stream: bool) -> None:
    async def script(request: wire.GenerateRequest) -> Any:
        for index in range(2):
            yield wire.Delta(index=index, text=f"<{request.text}{index}>", num_tokens=1, finish_reason=STOP)
        yield wire.Delta(index=0, usage=usage(prompt=3, completion=2), request_done=True)

    await simple(rig, script)
    asked = body(COMPLETION, prompt=["p", "q", "r"], n=2, echo=True)
    expected = [f"{p}<{p}{i}>" for p in "pqr" for i in range(2)]
    if stream:
        events = await rig.stream(COMPLETION, {**asked, "stream_options": {"include_usage": True}})
        assert [joined(COMPLETION, events, i) for i in range(6)] == expected
        total = events[-2]["usage"]
    else:
        answer = (await rig.post(COMPLETION, asked)).json()
        assert [c["text"] for c in answer["choices"]] == expected
        total = answer["usage"]
    assert (total["prompt_tokens"], total["completion_tokens"]) == (9, 6)


async def test_the_worker_gets_what_was_asked(rig: Rig) -> None:
    worker = await simple(rig)
    asked = dict(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1, frequency_penalty=-1, seed=2**64 - 1,
        repetition_penalty=1.1, max_tokens=7, min_tokens=2, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, n=2,
        logit_bias={"5": -100, "7": 1.5},
    )  # fmt: skip
    await rig.post(CHAT, body(CHAT, **asked, logprobs=True, top_logprobs=4))
    await rig.post(COMPLETION, body(COMPLETION, **asked, logprobs=4))
    for request in worker.requests:
        s = request.sampling
        assert (s.seed, s.max_tokens, s.min_tokens, s.n, s.top_k, s.logprobs) == (2**64 - 1, 7, 2, 2, 40, 4)
        assert (list(s.stop), list(s.stop_token_ids), s.ignore_eos) == (["a", "b"], [3], True)
        assert dict(s.logit_bias) == {5: -100.0, 7: 1.5}
        assert s.temperature == 0.5 and s.top_p == pytest.approx(0.9) and s.frequency_penalty == -1
    chat, completion = worker.requests
    assert chat.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" and not chat.add_special_tokens
    assert completion.text == "hi" and completion.add_special_tokens
    assert chat.request_id != completion.request_id


@BOTH
async def test_nulls_count_as_absent(rig: Rig, path: str) -> None:
    worker = await simple(rig)
    names = (
        "max_tokens temperature top_p n stop seed logprobs logit_bias stream stream_options presence_penalty "
        "frequency_penalty response_format tools tool_choice user top_logprobs max_completion_tokens echo best_of "
        "suffix parallel_tool_calls service_tier store metadata stop_token_ids ignore_eos min_p top_k functions "
        "function_call guided_json guided_regex guided_choice guided_grammar structured_outputs use_beam_search "
        "beam_width length_penalty prompt_logprobs reasoning_effort chat_template_kwargs documents modalities audio "
        "continue_final_message add_generation_prompt include_reasoning verbosity prediction web_search_options"
    ).split()
    for fields in [*({name: None} for name in names), dict.fromkeys(names)]:
        response = await rig.post(path, body(path, **fields))
        assert response.status_code == 200, (fields, response.text)
        seed = worker.requests[-1].sampling.seed
        assert worker.requests[-1].sampling == inf.SamplingParams(seed=seed)
    assert len({request.sampling.seed for request in worker.requests}) == len(worker.requests)


@BOTH
async def test_an_answer_of_no_tokens_is_empty_text(rig: Rig, path: str) -> None:
    await simple(rig, say())
    whole = (await rig.post(path, body(path))).json()["choices"][0]
    assert (text_of(path, whole), whole["finish_reason"]) == ("", "stop")
    if path == CHAT:
        assert whole["message"]["content"] == ""
    chunks = (await rig.stream(path, body(path)))[:-1]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == ([None, "stop"] if path == CHAT else ["stop"])


TRICKY = 'a\n\nb\r\ndata: {"x"}\n\u2028\u2029\u0085\x00"\\ čaj 🧑‍🚀'


@BOTH
async def test_any_text_survives_the_stream(rig: Rig, path: str) -> None:
    await simple(rig, say(*TRICKY, TRICKY))
    response = await rig.client.post(path, json=body(path, stream=True))
    # A client that splits lines the Unicode way sees the same events.
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert joined(path, events) == TRICKY * 2
    assert joined(path, [{"choices": (await rig.post(path, body(path))).json()["choices"]}]) == TRICKY * 2


@BOTH
@pytest.mark.parametrize("finish", [STOP, LENGTH])
@pytest.mark.parametrize("texts", [(), ("Paris",)])
async def test_the_official_client_reads_every_kind_of_answer(
    rig: Rig, path: str, finish: inf.FinishReason, texts: tuple[str, ...]
) -> None:
    await simple(rig, say(*texts, finish=finish))
    url = f"http://127.0.0.1:{rig.app.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create if path == CHAT else client.completions.create
        prompt: dict[str, Any] = {k: v for k, v in body(path).items() if k != "model"}
        whole = await create(model=MODEL, **prompt)
        stream = await create(model=MODEL, stream=True, stream_options={"include_usage": True}, **prompt)
        chunks = [chunk async for chunk in stream]
        assert [m.id async for m in client.models.list()] == [MODEL]
    reason = "stop" if finish == STOP else "length"
    assert whole.choices[0].finish_reason == reason
    pieces = [c.choices[0] for c in chunks if c.choices]
    assert pieces[-1].finish_reason == reason
    if path == CHAT:
        assert whole.choices[0].message.content == "".join(texts)
        assert "".join(p.delta.content or "" for p in pieces) == "".join(texts)
    else:
        assert whole.choices[0].text == "".join(p.text for p in pieces) == "".join(texts)
    assert chunks[-1].usage is not None and chunks[-1].usage == whole.usage
