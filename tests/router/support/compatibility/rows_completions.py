"""OpenAI's text completions: what its clients, and vLLM's, may send."""

from __future__ import annotations

from typing import Any

from compatibility.known_worker import CHAT
from compatibility.row import Outcome, Row, Status
from compatibility.rows_chat import bound_by, check_biases, check_n, check_priority, sends

PATH = "/v1/completions"
API = "OpenAI completions"
TEXT = "Paris is it."


def row(feature: str, status: Status, what: str, fields: dict[str, Any], **more: Any) -> Row:
    if status == "refused":
        more.setdefault("param", feature.strip("`"))
    return Row(API, feature, status, what, PATH, {"model": CHAT, "prompt": "hi", **fields}, **more)


def texts(*expected: str) -> Any:
    def check(outcome: Outcome) -> None:
        assert [choice["text"] for choice in outcome.json["choices"]] == list(expected)
        assert outcome.json["object"] == "text_completion"

    return check


def check_ids(outcome: Outcome) -> None:
    assert list(outcome.sent.token_ids.ids) == [5, 6]


def check_stream(outcome: Outcome) -> None:
    *chunks, done = outcome.events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT and done == "[DONE]"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


def check_stream_usage(outcome: Outcome) -> None:
    assert outcome.events[-2]["choices"] == [] and outcome.events[-2]["usage"]["total_tokens"] == 8


def check_logprobs(outcome: Outcome) -> None:
    logprobs = outcome.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Paris", " is", " it."] and logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 5, 8]


def check_best_of(outcome: Outcome) -> None:
    assert outcome.sent.sampling.n == 3 and len(outcome.json["choices"]) == 2


def check_prompt_logprobs(outcome: Outcome) -> None:
    assert outcome.sent.sampling.prompt_logprobs == 1 and "prompt_logprobs" in outcome.json["choices"][0]


ROWS: list[Row] = [
    row("`prompt`: text", "yes", "", {}, check=texts(TEXT)),
    row("`prompt`: texts", "yes", "up to 256; choice p × n + i is the i-th answer to prompt p", {"prompt": ["a", "b"]},
        check=texts(TEXT, TEXT)),
    row("`prompt`: token ids", "yes", "or arrays of them", {"prompt": [5, 6]}, check=check_ids),
    row("`stream`", "yes", "chunks that are never empty, a last one with the reason", {"stream": True},
        check=check_stream),
    row("`stream_options.include_usage`", "yes", "one more chunk with usage", {
        "stream": True, "stream_options": {"include_usage": True},
    }, check=check_stream_usage),
    row("`echo`", "yes", "the prompt comes first, with its logprobs", {"echo": True}, check=texts("hi" + TEXT)),
    row("`suffix`", "refused", "models that fill in are not served", {"suffix": "the end"}),
    row("`temperature`", "yes", "0 to 100; 0 is greedy", {"temperature": 0.5}, check=sends("temperature", 0.5)),
    row("`top_p`", "yes", "0 to 1", {"top_p": 0.5}, check=sends("top_p", 0.5)),
    row("`top_k`", "yes", "-1 and 0 keep all", {"top_k": 5}, check=sends("top_k", 5)),
    row("`min_p`", "yes", "0 to 1", {"min_p": 0.25}, check=sends("min_p", 0.25)),
    row("`presence_penalty`", "yes", "-2 to 2", {"presence_penalty": 0.5}, check=sends("presence_penalty", 0.5)),
    row("`frequency_penalty`", "yes", "-2 to 2", {"frequency_penalty": 0.5}, check=sends("frequency_penalty", 0.5)),
    row("`repetition_penalty`", "yes", "above 0", {"repetition_penalty": 1.5}, check=sends("repetition_penalty", 1.5)),
    row("`logit_bias`", "yes", "by token id, -100 to 100", {"logit_bias": {"5": -100}}, check=check_biases),
    row("`seed`", "yes", "the same answer in any batch", {"seed": 7}, check=sends("seed", 7)),
    row("`max_tokens`", "yes", "absent: what is left of the context, not 16; 0 computes the prompt alone", {
        "max_tokens": 9,
    }, check=sends("max_tokens", 9)),
    row("`min_tokens`", "yes", "", {"min_tokens": 2}, check=sends("min_tokens", 2)),
    row("`stop`", "yes", "one text or up to 16", {"stop": "a"}, check=sends("stop", ["a"])),
    row("`stop_token_ids`", "yes", "", {"stop_token_ids": [3]}, check=sends("stop_token_ids", [3])),
    row("`ignore_eos`", "yes", "", {"ignore_eos": True}, check=sends("ignore_eos", True)),
    row("`n`", "yes", "1 to 128", {"n": 3}, check=check_n),
    row("`best_of`", "yes", "the best n by mean log probability; not with stream", {"best_of": 3, "n": 2},
        check=check_best_of),
    row("`best_of` with `stream`", "refused", "the best are known at the end", {"best_of": 3, "stream": True},
        param="best_of"),
    row("`best_of` below `n`", "refused", "", {"best_of": 1, "n": 2}, param="best_of"),
    row("`use_beam_search`", "yes", "with best_of, n or beam_width as number of beams", {
        "use_beam_search": True, "n": 2,
    }, check=sends("beam_width", 2)),
    row("`length_penalty`", "yes", "of a beam search", {"beam_width": 2, "length_penalty": 0.5},
        check=sends("length_penalty", 0.5)),
    row("`logprobs`", "yes", "up to 20", {"logprobs": 1}, check=check_logprobs),
    row("`prompt_logprobs`", "yes", "as vLLM tells them; not with stream", {"prompt_logprobs": 1},
        check=check_prompt_logprobs),
    row("`priority`", "yes", "-100 to 100, lower is sooner", {"priority": 7}, check=check_priority),
    row("`response_format`", "yes", "as of chats", {"response_format": {"type": "json_object"}},
        check=bound_by("json_object")),
    row("`guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`", "yes", "as of chats", {
        "guided_regex": "a+",
    }, check=bound_by("regex", "a+")),
    row("`structured_outputs`", "yes", "as of chats", {"structured_outputs": {"choice": ["a"]}},
        check=bound_by("choice")),
    row("`tools`", "refused", "chats have them", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    row("`user`, `metadata`", "ignored", "checked, not kept", {"user": "u", "metadata": {"a": "b"}}),
    row("`store`: true", "refused", "", {"store": True}, param="store"),
    row("`add_special_tokens`", "refused", "the model's own are added to texts; send token ids", {
        "add_special_tokens": False,
    }),
    row("unknown fields", "ignored", "as vLLM does; OpenAI refuses them", {"no_such_field": 1}),
]  # fmt: skip
