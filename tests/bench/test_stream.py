from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from bench.stream import StreamError, parse
from hypothesis import given
from hypothesis import strategies as st

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def event(message: dict[str, Any] | str) -> bytes:
    return f"data: {message if isinstance(message, str) else json.dumps(message)}\n\n".encode()


def token(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


END = event({"choices": [], "usage": USAGE}) + event("[DONE]")
ANSWER = chunked(token("ab"), token(""), token("ç"), token("d"), END)


def test_times_are_those_of_the_pieces_that_completed_each_event() -> None:
    first = HEAD + b"\r\n" + token("a")[:10]
    timing = parse([(0.1, first), (0.5, token("a")[10:]), (0.7, token("b") + token("c")), (0.9, END)])
    assert timing.ttft_s == 0.5
    assert timing.gaps_s == pytest.approx((0.2, 0.0))
    assert timing.total_s == 0.9
    assert (timing.prompt_tokens, timing.completion_tokens, timing.cached_tokens) == (7, 3, 4)


def test_a_chunk_without_text_is_no_token() -> None:
    timing = parse([(1.0, ANSWER)])
    assert timing.num_chunks == 3
    assert timing.gaps_s == (0.0, 0.0)


@given(st.lists(st.integers(1, len(ANSWER) - 1), unique=True).map(sorted))
def test_the_reading_does_not_depend_on_how_the_network_cut_the_answer(cuts: list[int]) -> None:
    borders = [0, *cuts, len(ANSWER)]
    pieces = [(float(i), ANSWER[a:b]) for i, (a, b) in enumerate(itertools.pairwise(borders))]
    timing = parse(pieces)
    assert (timing.completion_tokens, timing.num_chunks) == (3, 3)
    assert 0 <= timing.ttft_s <= timing.total_s <= len(cuts)
    assert timing.ttft_s + sum(timing.gaps_s) <= timing.total_s


def test_the_client_may_hang_up_before_the_closing_chunk() -> None:
    cut = ANSWER[: ANSWER.index(b"[DONE]") + len(b"[DONE]\n")]
    assert parse([(1.0, cut)]).completion_tokens == 3


def test_the_first_token_of_an_answer_without_text_is_its_end() -> None:
    assert parse([(0.2, HEAD + b"\r\n" + token("")), (0.4, END)]).ttft_s == 0.4


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"", "no HTTP answer", id="nothing came"),
        pytest.param(b"HTTP/1.1 404 Not Found\r\n\r\nno such model", "404 Not Found: no such model", id="refused"),
        pytest.param(HEAD + b"\r\n" + token("a"), r"before \[DONE\].*text", id="cut short"),
        pytest.param(HEAD + b"\r\n" + event("[DONE]"), "no usage", id="no usage"),
        pytest.param(HEAD + b"\r\n" + event("{oops") + END, "not JSON", id="broken event"),
        pytest.param(HEAD + b"\r\n" + event({"error": {"message": "worker lost"}}) + END, "worker lost", id="error"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "no hexadecimal", id="bad chunk size"),
    ],
)
def test_what_is_not_a_whole_answer_is_an_error_that_says_why(raw: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        parse([(0.0, raw)])
