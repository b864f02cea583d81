"""Requests that can never be served: 400 (404 for the model) in OpenAI's form, naming the field; never 500."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_rig import CHAT, COMPLETION, Rig, body, simple
from stub_worker import fail

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import parse_chat
from naru_router.core.completion_request import parse_completion
from naru_router.core.errors import error_body
from naru_router.core.json_body import parse_object

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
PARSERS: dict[str, Callable[[dict[str, object]], object]] = {CHAT: parse_chat, COMPLETION: parse_completion}


def each(name: str, *values: Any) -> list[tuple[str, Any]]:
    """One case a value."""
    return [(name, value) for value in values]


BAD_SCHEMAS: list[Any] = [
    {}, {"name": "t"}, {"schema": {}}, {"name": "t", "schema": 5}, {"name": "", "schema": {}}, "x",
    {"name": "t", "schema": {"a": 1e999}}, {"name": "t", "schema": {}, "strict": "yes"},
]  # fmt: skip
BAD_FUNCTIONS: list[Any] = [
    {}, {"name": ""}, {"name": "a b"}, {"name": "x" * 129}, {"name": 5}, {"name": "f", "parameters": []},
    {"name": "f", "parameters": {"type": "array"}}, {"name": "f", "description": 5}, {"name": "f", "strict": 1},
    {"name": "f", "parameters": {"a": 1e999}},
]  # fmt: skip
BAD_CALLS: list[tuple[Any, str]] = [
    (5, ""),
    ({"function": {"name": "f"}}, ".id"),
    ({"id": "1"}, ".function"),
    ({"id": 1}, ".id"),
    ({"id": "1", "type": "custom", "function": {"name": "f"}}, ".type"),
    ({"id": "1", "function": {"name": "a b"}}, ".function.name"),
    ({"id": "1", "function": {"name": "f", "arguments": {}}}, ".function.arguments"),
]

# field, bad value; both endpoints refuse it under the field's name
SHARED: list[tuple[str, Any]] = [
    *each("temperature", "hot", -0.1, 101, True, [], 1e999, 10**400),
    *each("top_p", -0.01, 1.01, "1", False),
    *each("min_p", -0.01, 1.01),
    *each("presence_penalty", -2.1, 2.1, "x"),
    *each("frequency_penalty", -2.1, 2.1, {}),
    *each("repetition_penalty", 0, -1, 101),
    *each("top_k", -2, 1.5, 2**31, True),
    *each("seed", -1, 2**64, 1.5, "7", True),
    *each("max_tokens", -5, 1.5, True, "9", 2**31, 10**30),
    *each("min_tokens", -1, 1.0),
    *each("n", 0, -1, 129, 1.0, True, "2"),
    *each("stop", "", [""], ["a", 1], 5, {}, ["x"] * 17, "x" * 1025, [None]),
    *each("stop_token_ids", [-1], ["a"], [1.0], 5, [True], [2**31]),
    *each("logit_bias", {"cat": -50}, {"-1": 5}, {"5": "x"}, {"5": 1e9}, {"99999999999": 1}, [], {"١": 1}),
    *each("logit_bias", {"5": True}, {"5": None}, {" 5": 1}, {"5": -100.5}, {"5": 1, "05": 2}, 7),
    *each("ignore_eos", 1, "true"),
    *each("stream", 1, "yes", []),
    *each("stream_options", {"include_usage": True}, 5, [], "x"),
    *each("user", 5, {}, True),
    *each("model", None, "", 5, []),
    *each("response_format", {"type": "yaml"}, {"type": "json_schema"}, {}, "text", [], {"type": ["text"]}),
    *each("response_format", *[{"type": "json_schema", "json_schema": schema} for schema in BAD_SCHEMAS]),
    *each("store", True, 1),
    *each("service_tier", "flex", 1, []),
    *each("guided_json", 5, "{", [], True),
    *each("guided_regex", "", 5, ["a"]),
    *each("guided_choice", [], "a", [1], ["a", None]),
    *each("guided_grammar", "", {}),
    *each("structured_outputs", {}, [], {"json": 5}, {"regex": 1}, {"choice": []}, {"json_object": "yes"}),
    *each("structured_outputs", {"json": {}, "regex": "a"}, {"structural_tag": {}}),
    *each("prompt_logprobs", 21, -1, "1", True),
    *each("use_beam_search", 1, "yes"),
    *each("beam_width", 0, 33, True, 1.5),
    *each("length_penalty", 0.5, "x"),
    *each("metadata", [], "x", {"a": 1}, {str(i): "" for i in range(17)}),
    ("truncate_prompt_tokens", 5),
    ("skip_special_tokens", False),
    ("return_token_ids", True),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    *each("messages", "hi", None, [], {}, 5, []),
    *each("logprobs", 1, "true"),
    *each("top_logprobs", 1, 21, -1, True),
    ("max_completion_tokens", -1),
    *each("tools", {}, "f", [5], [{"type": "web_search"}], [{"function": {"name": "f"}}], [{"type": "function"}]),
    *each("tools", *[[{"type": "function", "function": function}] for function in BAD_FUNCTIONS]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    *each("tool_choice", "required", {"type": "function", "function": {"name": "f"}}, 1, "any", {}, {"type": "tool"}),
    *each("functions", {}, [5], [{}], [{"name": "f"}] * 2),
    *each("function_call", {"name": "f"}, "required", 5),
    *each("parallel_tool_calls", "no", 1),
    *each("chat_template_kwargs", [], {"a b": 1}, {"messages": []}, {"tools": 1}, {"a": 1e999}),
    *each("documents", {}, ["x"]),
    *each("continue_final_message", True, 1),
    ("add_generation_prompt", "no"),
    ("include_reasoning", 1),
    ("chat_template", "{{ messages }}"),
    ("verbosity", "high"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy"}),
    ("prediction", {"type": "content", "content": "x"}),
    *each("reasoning_effort", "much", 1, []),
]
COMPLETION_ONLY: list[tuple[str, Any]] = [
    *each("prompt", None, [], 5, {}, True, [1.5], [True]),
    *each("logprobs", -1, 21, True, 1.5),
    *each("echo", 1, "yes"),
    *each("best_of", 0, True, "1", [], 129),
    ("suffix", "the end"),
]


def check_refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, after its shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@BOTH
async def test_a_bad_field_is_refused_by_its_name(rig: Rig, path: str, stream: bool) -> None:
    worker = await simple(rig)
    cases = SHARED + (CHAT_ONLY if path == CHAT else COMPLETION_ONLY)
    for name, value in cases:
        fields = {"stream": stream, name: value}
        if name == "stream_options":
            fields["stream"] = False if isinstance(value, dict) else True
        text = json.dumps(body(path, **fields)).replace("Infinity", "1e999")
        response = await rig.client.post(path, content=text, headers={"content-type": "application/json"})
        error = check_refusal(response)
        assert error["param"].startswith(name), (name, value, error)
        assert name in error["message"], (name, value, error)
    assert worker.requests == []
    assert (await rig.post(path, body(path))).status_code == 200


MESSAGES: list[tuple[Any, str]] = [
    (["hi"], "messages[0]"),
    ([{"role": "alien", "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    (
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [{}]}],
        "messages[1].tool_",
    ),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ([{"role": "tool", "content": "x", "tool_call_id": "nobody's"}], "messages[0].tool_call_id"),
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    *[([{"role": "assistant", "tool_calls": [call]}], f"messages[0].tool_calls[0]{at}") for call, at in BAD_CALLS],
]


async def test_a_bad_message_is_refused_by_its_place(rig: Rig) -> None:
    await simple(rig)
    for messages, param in MESSAGES:
        error = check_refusal(await rig.post(CHAT, body(CHAT, messages=messages)))
        assert error["param"].startswith(param), (messages, error)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        (["a", None], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([[1, 2**31]], "prompt[0][1]"),
        (["a"] * 257, "prompt"),
        (["a\ud800"], "prompt[0]"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_place(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(body(COMPLETION, prompt=prompt))
    assert caught.value.param == param


@BOTH
async def test_a_bad_body_is_refused(rig: Rig, path: str) -> None:
    await simple(rig)
    good = json.dumps(body(path))
    bodies: dict[str, bytes] = {
        "empty": b"",
        "array": b"[]",
        "null": b"null",
        "string": b'"x"',
        "cut": b"{",
        "trailing": good.encode() + b"x",
        "duplicate key": b'{"model": "a",' + good[1:].encode(),
        "nested duplicate": good[:-1].encode() + b', "logit_bias": {"1": 2, "1": 3}}',
        "NaN": good[:-1].encode() + b', "temperature": NaN}',
        "Infinity": good[:-1].encode() + b', "temperature": -Infinity}',
        "broken UTF-8": good.encode().replace(b"hi", b"\xff\xfe"),
        "cut UTF-8": good.encode().replace(b"hi", b"\xe2\x82"),
        "UTF-16": good.encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + good.encode(),
        "half a surrogate": good.encode().replace(b"hi", b"\\ud800"),
        "deep": good[:-1].encode() + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "huge integer": good[:-1].encode() + b', "seed": ' + b"9" * 10_000 + b"}",
    }
    for name, data in bodies.items():
        response = await rig.client.post(path, content=data, headers={"content-type": "application/json"})
        assert check_refusal(response), name
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
        response = await rig.client.post(path, content=good, headers={"content-type": content_type})
        assert "c" in check_refusal(response)["message"]
    for content_type in ("application/json; charset=UTF-8", "Application/JSON", "application/vnd.x+json"):
        response = await rig.client.post(path, content=good, headers={"content-type": content_type})
        assert response.status_code == 200


@BOTH
async def test_unknown_fields_are_ignored(rig: Rig, path: str) -> None:
    await simple(rig)
    assert (await rig.post(path, body(path, foo=1, bar={"baz": [None]}))).status_code == 200


@BOTH
async def test_values_that_ask_for_nothing_are_accepted(rig: Rig, path: str) -> None:
    await simple(rig)
    nothing: dict[str, Any] = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": False, "response_format": {"type": "text"},
        "store": False, "service_tier": "auto", "stop": [], "logit_bias": {}, "user": "u", "modalities": ["text"],
        "metadata": {"a": "b"}, "stream_options": None,
    }  # fmt: skip
    if path == COMPLETION:
        nothing |= {"best_of": 1, "suffix": "", "echo": False}
    assert (await rig.post(path, body(path, **nothing))).status_code == 200


@BOTH
async def test_an_unknown_model_is_404_with_the_known_ones(rig: Rig, path: str) -> None:
    await rig.publish_model("tiny-b", aliases=("small",))
    await simple(rig)
    response = await rig.post(path, {**body(path), "model": "gpt-9"})
    error = check_refusal(response, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-9'" in error["message"] and "small, tiny-a, tiny-b" in error["message"]
    await rig.publish_worker("w0", models=("tiny-a", "tiny-b"))
    await rig.until(lambda: rig.app.fleet.is_ready("w0", "tiny-b"))
    response = await rig.post(path, {**body(path), "model": "small"})
    assert response.status_code == 200 and response.json()["model"] == "small"
    assert rig.workers["w0"].requests[-1].model == "tiny-b"


@BOTH
async def test_a_prompt_no_tokenizer_could_fit_is_refused_before_it_travels(rig: Rig, path: str) -> None:
    worker = await simple(rig)
    fields = body(path, prompt="x" * 2_000_000, messages=[{"role": "user", "content": "x" * 2_000_000}])
    error = check_refusal(await rig.post(path, fields))
    assert error["code"] == "context_length_exceeded" and "2048" in error["message"]
    assert worker.requests == []


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_the_workers_refusal_reaches_the_client(rig: Rig, path: str, stream: bool) -> None:
    script = fail("context_length_exceeded", "the prompt has 3000 tokens, the context 2048", param="messages")
    await simple(rig, script)
    error = check_refusal(await rig.post(path, body(path, stream=stream)))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "3000" in error["message"]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": " hi"}]
    call = parse_chat(body(CHAT, messages=[{"role": r, "content": parts} for r in ("system", "user")]))
    assert [m.content for m in call.messages] == ["Say hi", "Say hi"]


def test_both_names_of_the_token_limit_are_read() -> None:
    assert parse_chat(body(CHAT, max_completion_tokens=5)).sampling.max_tokens == 5
    assert parse_chat(body(CHAT, max_completion_tokens=5, max_tokens=5)).sampling.max_tokens == 5
    for fields in ({"max_completion_tokens": 5, "max_tokens": 6}, {"max_completion_tokens": 5, "min_tokens": 6}):
        with pytest.raises(InvalidRequest):
            parse_chat(body(CHAT, **fields))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)) | st.just(2**70),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)
NAMES = sorted({name for name, _ in SHARED + CHAT_ONLY + COMPLETION_ONLY} | {"stream_options", "echo", "x"})
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4)


@BOTH
@settings(max_examples=400, deadline=None)
@given(fields=BODIES)
def test_any_json_is_either_read_or_refused(path: str, fields: dict[str, Any]) -> None:
    try:
        PARSERS[path]({**body(path), **fields})
    except InvalidRequest as exc:
        assert exc.message
        json.loads(error_body(exc))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=40) | st.text(alphabet='{}[]",:0123456789eE+-. \\untrfals', max_size=40).map(str.encode))
def test_any_bytes_are_either_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_object(data), dict)
    except InvalidRequest as exc:
        assert exc.message


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nested_values_never_crash_the_parsers(data: st.DataObject) -> None:
    message = st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"]),
        JSON | st.just("user"),
        max_size=4,
    )
    messages = data.draw(st.lists(message | JSON, max_size=3))
    prompt = data.draw(st.lists(JSON, max_size=3))
    for path in (CHAT, COMPLETION):
        try:
            PARSERS[path](body(path, messages=messages, prompt=prompt))
        except InvalidRequest as exc:
            json.loads(error_body(exc))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=BODIES)
def test_sampling_that_is_read_is_within_the_wires_ranges(fields: dict[str, Any]) -> None:
    from naru_router.core.sampling import check_sampling

    try:
        call = parse_completion({**body(COMPLETION), **fields})
    except InvalidRequest:
        return
    check_sampling(call.sampling)
