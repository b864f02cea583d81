"""OpenAI's chat completions: what its clients, and vLLM's, may send."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from compatibility.known_worker import CHAT
from compatibility.row import Outcome, Row, Status

PATH = "/v1/chat/completions"
API = "OpenAI chat completions"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TURN = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "found it"},
]
SCHEMA = {"name": "city", "strict": True, "schema": {"type": "object"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT, "messages": [{"role": "user", "content": "hi"}], **fields}


def message(content: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": content}]


def row(feature: str, status: Status, what: str, fields: dict[str, Any], **more: Any) -> Row:
    if status == "refused":
        more.setdefault("param", feature.strip("`"))
    return Row(API, feature, status, what, PATH, body(**fields), **more)


def sends(field: str, value: Any) -> Callable[[Outcome], None]:
    """The worker gets this sampling parameter."""

    def check(outcome: Outcome) -> None:
        sent = getattr(outcome.sent.sampling, field)
        if isinstance(value, float):
            assert abs(sent - value) < 1e-6
        else:
            assert (list(sent) if isinstance(value, list) else sent) == value

    return check


def prompts(words: str) -> Callable[[Outcome], None]:
    """The worker gets these words in its prompt."""

    def check(outcome: Outcome) -> None:
        assert words in outcome.sent.text

    return check


def bound_by(kind: str, words: str = "") -> Callable[[Outcome], None]:
    """The answer is held to a form."""

    def check(outcome: Outcome) -> None:
        structured = outcome.sent.sampling.structured
        assert structured.WhichOneof("kind") == kind and words in str(getattr(structured, kind))

    return check


def answers(outcome: Outcome) -> None:
    answer = outcome.json
    assert answer["object"] == "chat.completion" and answer["model"] == CHAT
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Paris is it." and choice["finish_reason"] == "stop"


def check_stream(outcome: Outcome) -> None:
    deltas = [event["choices"][0]["delta"] for event in outcome.events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[:-1]) == "Paris is it."
    assert outcome.events[-1] == "[DONE]"


def check_stream_usage(outcome: Outcome) -> None:
    assert outcome.events[-2]["choices"] == [] and outcome.events[-2]["usage"]["total_tokens"] == 8


def check_usage(outcome: Outcome) -> None:
    assert outcome.json["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def check_n(outcome: Outcome) -> None:
    assert [choice["index"] for choice in outcome.json["choices"]] == [0, 1, 2]


def check_best_of(outcome: Outcome) -> None:
    assert outcome.sent.sampling.n == 3 and len(outcome.json["choices"]) == 2


def check_logprobs(outcome: Outcome) -> None:
    content = outcome.json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Paris", " is", " it."]
    assert outcome.sent.sampling.logprobs == 2 and content[0]["top_logprobs"]


def check_biases(outcome: Outcome) -> None:
    assert dict(outcome.sent.sampling.logit_bias) == {5: -100.0}


def check_priority(outcome: Outcome) -> None:
    assert outcome.sent.priority == 7


def check_no_tools(outcome: Outcome) -> None:
    answers(outcome)
    assert "look" not in outcome.sent.text and not outcome.sent.sampling.HasField("structured")


def check_forced(outcome: Outcome) -> None:
    assert '"look' in outcome.sent.sampling.structured.grammar.replace("\\", "")


def check_schema(outcome: Outcome) -> None:
    assert json.loads(outcome.sent.sampling.structured.json_schema) == {"type": "object"}


def check_continued(outcome: Outcome) -> None:
    assert outcome.sent.text.endswith("assistant\nIt is")


ROWS: list[Row] = [
    row("`messages`", "yes", "system, developer, user, assistant and tool; texts and arrays of text parts", {
        "messages": [*message("s", "developer"), *message([{"type": "text", "text": text} for text in "ab"])],
    }, check=prompts("user\nab")),
    row("image, audio and file parts", "refused", "text parts only", {
        "messages": message([{"type": "image_url", "image_url": {"url": "x"}}]),
    }, param="messages[0].content[0].type"),
    row("`messages[].name`", "yes", "given to the template, which may print it", {
        "messages": [{**message("hi")[0], "name": "bob"}],
    }, check=answers),
    row("whole answers", "yes", "choices, message, finish reason, usage", {}, check=answers),
    row("`stream`", "yes", "a role chunk, chunks that are never empty, a last one with the reason", {"stream": True},
        check=check_stream),
    row("`stream_options.include_usage`", "yes", "one more chunk with usage", {
        "stream": True, "stream_options": {"include_usage": True},
    }, check=check_stream_usage),
    row("`stream_options.include_obfuscation`", "refused", "true is refused", {
        "stream": True, "stream_options": {"include_obfuscation": True},
    }),
    row("`usage.prompt_tokens_details.cached_tokens`", "yes", "found in the prefix cache", {}, check=check_usage),
    row("`temperature`", "yes", "0 to 100; 0 is greedy", {"temperature": 0.5}, check=sends("temperature", 0.5)),
    row("`top_p`", "yes", "0 to 1", {"top_p": 0.5}, check=sends("top_p", 0.5)),
    row("`top_k`", "yes", "-1 and 0 keep all", {"top_k": 5}, check=sends("top_k", 5)),
    row("`min_p`", "yes", "0 to 1", {"min_p": 0.25}, check=sends("min_p", 0.25)),
    row("`presence_penalty`", "yes", "-2 to 2", {"presence_penalty": 0.5}, check=sends("presence_penalty", 0.5)),
    row("`frequency_penalty`", "yes", "-2 to 2", {"frequency_penalty": 0.5}, check=sends("frequency_penalty", 0.5)),
    row("`repetition_penalty`", "yes", "above 0", {"repetition_penalty": 1.5}, check=sends("repetition_penalty", 1.5)),
    row("`logit_bias`", "yes", "by token id, -100 to 100", {"logit_bias": {"5": -100}}, check=check_biases),
    row("`seed`", "yes", "the same answer in any batch", {"seed": 7}, check=sends("seed", 7)),
    row("`max_tokens`", "yes", "absent: what is left of the context", {"max_tokens": 9}, check=sends("max_tokens", 9)),
    row("`max_completion_tokens`", "yes", "the same", {"max_completion_tokens": 9}, check=sends("max_tokens", 9)),
    row("`min_tokens`", "yes", "", {"min_tokens": 2}, check=sends("min_tokens", 2)),
    row("`stop`", "yes", "one text or up to 16", {"stop": ["a", "b"]}, check=sends("stop", ["a", "b"])),
    row("`stop_token_ids`", "yes", "", {"stop_token_ids": [3]}, check=sends("stop_token_ids", [3])),
    row("`ignore_eos`", "yes", "", {"ignore_eos": True}, check=sends("ignore_eos", True)),
    row("`n`", "yes", "1 to 128", {"n": 3}, check=check_n),
    row("`best_of`", "yes", "the best n by mean log probability; not with stream", {"best_of": 3, "n": 2},
        check=check_best_of),
    row("`best_of` with `stream`", "refused", "the best are known at the end", {"best_of": 3, "stream": True},
        param="best_of"),
    row("`use_beam_search`", "yes", "with best_of, n or beam_width as number of beams", {
        "use_beam_search": True, "best_of": 3,
    }, check=sends("beam_width", 3)),
    row("`beam_width`", "yes", "beam search over so many beams", {"beam_width": 4}, check=sends("beam_width", 4)),
    row("`length_penalty`", "yes", "of a beam search", {"beam_width": 4, "length_penalty": 0.5},
        check=sends("length_penalty", 0.5)),
    row("`logprobs`, `top_logprobs`", "yes", "up to 20", {"logprobs": True, "top_logprobs": 2}, check=check_logprobs),
    row("`prompt_logprobs`", "yes", "as vLLM tells them; not with stream", {"prompt_logprobs": 1},
        check=sends("prompt_logprobs", 1)),
    row("`prompt_logprobs` with `stream`", "refused", "", {"prompt_logprobs": 1, "stream": True},
        param="prompt_logprobs"),
    row("`priority`", "yes", "-100 to 100, lower is sooner", {"priority": 7}, check=check_priority),
    row("`tools`", "yes", "functions; in the template's own form, or told in the system message", {"tools": [LOOK]},
        check=prompts('"name": "look"')),
    row("other tools than functions", "refused", "custom, web_search and others", {"tools": [{"type": "custom"}]},
        param="tools[0].type"),
    row("`tool_choice`: none", "yes", "the template sees no tools, no call is read", {
        "tools": [LOOK], "tool_choice": "none",
    }, check=check_no_tools),
    row("`tool_choice`: auto", "yes", "free", {"tools": [LOOK], "tool_choice": "auto"}, check=answers),
    row("`tool_choice`: required", "yes", "kept by a grammar", {"tools": [LOOK], "tool_choice": "required"},
        check=check_forced),
    row("`tool_choice`: a function", "yes", "one call of it, by a grammar", {"tools": [LOOK], "tool_choice": NAMED},
        check=check_forced),
    row("`tool_choice`: an unknown function", "refused", "", {
        "tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "other"}},
    }, param="tool_choice"),
    row("`tool_choice`: allowed_tools", "refused", "send those tools alone", {
        "tools": [LOOK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [LOOK]}},
    }, param="tool_choice"),
    row("`parallel_tool_calls`", "yes", "false: one call at most, further ones are left out", {
        "tools": [LOOK], "parallel_tool_calls": False,
    }, check=prompts("one function at most")),
    row("`tools[].function.strict`", "yes", "all of them: a grammar keeps the schemas, where the marks allow it", {
        "tools": [{**LOOK, "function": {**LOOK["function"], "strict": True}}],  # type: ignore[dict-item]
    }, check=bound_by("grammar", "[lazy]")),
    row("`tool_calls` and tool messages", "yes", "a result has to answer a call before it", {"messages": TURN},
        check=prompts("found it")),
    row("a tool message that answers no call", "refused", "", {"messages": TURN[2:]}, param="messages[0].tool_call_id"),
    row("`functions`, `function_call`", "yes", "answered in the same older form", {
        "functions": [LOOK["function"]], "function_call": {"name": "look"},
    }, check=check_forced),
    row("`response_format`: text", "yes", "", {"response_format": {"type": "text"}}, check=answers),
    row("`response_format`: json_object", "yes", "always a JSON object", {"response_format": {"type": "json_object"}},
        check=bound_by("json_object")),
    row("`response_format`: json_schema", "yes", "kept whether strict or not", {
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    }, check=check_schema),
    row("`guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`", "yes", "as vLLM has them; Lark grammars", {
        "guided_choice": ["a", "b"],
    }, check=bound_by("choice")),
    row("`structured_outputs`", "yes", "json, regex, choice, grammar or json_object", {
        "structured_outputs": {"regex": "a+"},
    }, check=bound_by("regex", "a+")),
    row("`structured_outputs.structural_tag`", "refused", "", {"structured_outputs": {"structural_tag": "{}"}}),
    row("several forms at once", "refused", "", {"guided_regex": "a", "response_format": {"type": "json_object"}},
        param="guided_regex"),
    row("`reasoning_effort`", "yes", "given to the template; none also sets enable_thinking false", {
        "reasoning_effort": "low",
    }, check=answers),
    row("`include_reasoning`", "yes", "false: reasoning is left out of the answer", {"include_reasoning": False},
        check=answers),
    row("`chat_template_kwargs`", "yes", "values for the template, by name", {
        "chat_template_kwargs": {"add": 1},
    }, check=answers),
    row("`documents`", "yes", "given to the template", {"documents": [{"text": "t"}]}, check=answers),
    row("`add_generation_prompt`", "yes", "", {"add_generation_prompt": False}, check=prompts("hi<|im_end|>")),
    row("`continue_final_message`", "yes", "the last message of the assistant goes on", {
        "messages": [*message("q"), *message("It is", "assistant")], "continue_final_message": True,
    }, check=check_continued),
    row("`user`, `safety_identifier`, `metadata`", "ignored", "checked, not kept", {
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"},
    }),
    row("`prompt_cache_key`", "yes", "requests of one key go to one worker", {"prompt_cache_key": "k"}, check=answers),
    row("`service_tier`: auto, default", "ignored", "there is one", {"service_tier": "auto"}),
    row("`service_tier`: others", "refused", "send priority", {"service_tier": "flex"}, param="service_tier"),
    row("`store`: false", "ignored", "nothing is stored", {"store": False}),
    row("`store`: true", "refused", "chats are not stored", {"store": True}, param="store"),
    row("`modalities`: text", "ignored", "the only one", {"modalities": ["text"]}),
    row("`modalities`: others", "refused", "", {"modalities": ["text", "audio"]}, param="modalities"),
    row("`audio`", "refused", "", {"audio": {"voice": "alloy", "format": "wav"}}),
    row("`prediction`", "refused", "", {"prediction": {"type": "content", "content": "x"}}),
    row("`verbosity`", "refused", "medium, the default, is accepted", {"verbosity": "low"}),
    row("`web_search_options`", "refused", "", {"web_search_options": {}}),
    row("`chat_template`", "refused", "the model's own is used", {"chat_template": "x"}),
    row("`truncate_prompt_tokens`", "refused", "prompts are never cut", {"truncate_prompt_tokens": 5}),
    row("unknown fields", "ignored", "as vLLM does; OpenAI refuses them", {"no_such_field": 1}),
    row("null", "ignored", "the same as an absent field", {"temperature": None, "tools": None, "stop": None}),
]  # fmt: skip
