"""`naru chat`: the stream it reads, the talk it keeps, what it does with bad answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from naru_operator.cli import chat
from naru_operator.cli.chat import ChatOptions, printable, run_chat
from naru_operator.cli.chat_client import ChatClient, Message, server_sent_data
from naru_proto.errors import InternalError, InvalidRequest, NaruError, Unavailable

Handler = Callable[[httpx.Request], httpx.Response]


def chunk(text: str | None = None, **fields: Any) -> bytes:
    delta = {"content": text} if text is not None else {"role": "assistant"}
    return b"data: " + json.dumps({"choices": [{"delta": delta}], **fields}, ensure_ascii=False).encode() + b"\n\n"


def streaming(*parts: bytes) -> Handler:
    return lambda _: httpx.Response(200, content=iter(parts))


def client(handler: Handler) -> ChatClient:
    return ChatClient("http://router/v1/", httpx.MockTransport(handler))


def answer(handler: Handler) -> str:
    return "".join(client(handler).stream("m", [Message("user", "hi")], {}))


def test_pieces_come_as_they_are_sent() -> None:
    whole = (
        chunk()
        + chunk("a")
        + chunk("\u2028\u0085b\r")
        + b'data: {"choices": [], "usage": {}}\n\n'
        + b"data: [DONE]\n\n"
    )
    for size in (1, 7, len(whole)):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert answer(streaming(*parts)) == "a\u2028\u0085b\r"


def test_the_request_is_the_openai_form() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=b"data: [DONE]\n\n")

    list(client(handler).stream("m", [Message("system", "s"), Message("user", "u")], {"max_tokens": 5}))
    assert str(seen[0].url) == "http://router/v1/chat/completions"
    assert json.loads(seen[0].content) == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "stream": True,
        "max_tokens": 5,
    }


def test_comments_and_other_fields_of_events_are_passed_over() -> None:
    assert list(server_sent_data(iter([b": keep-alive\n\nevent: x\nid: 3\ndata:a\n", b"data: b\n"]))) == [b"a", b"b"]


def refuse(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (refuse, Unavailable, "no answer from 'http://router' .* start `naru up`"),
        (lambda _: httpx.Response(404, json={"error": {"message": "no model m"}}), InvalidRequest, "^no model m$"),
        (lambda _: httpx.Response(502, content=b"<html>\xff"), InternalError, "HTTP 502"),
        (streaming(chunk("a"), b'data: {"error": {"message": "worker lost"}}\n\n'), InvalidRequest, "worker lost"),
        (streaming(chunk("a")), Unavailable, "broke off"),
        (streaming(b"data: {\n\n"), InternalError, "no chunk"),
        (streaming(b"data: [1]\n\n"), InternalError, "no chunk"),
        (streaming(b"data: " + b"x" * (17 << 20)), InternalError, "without end"),
    ],
)
def test_what_goes_wrong_is_a_sentence(handler: Handler, kind: type[NaruError], message: str) -> None:
    with pytest.raises(kind, match=message):
        answer(handler)


def test_models_are_listed() -> None:
    assert client(lambda _: httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]})).models() == ["a", "b"]
    with pytest.raises(InternalError, match="no OpenAI API"):
        client(lambda _: httpx.Response(200, content=b"<html>")).models()


def test_a_key_goes_along_where_no_proxy_takes_it_for_its_own() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": []})

    ChatClient("http://router", httpx.MockTransport(handler), api_key="nk-one").models()
    client(handler).models()
    assert [request.headers.get("x-api-key") for request in seen] == ["nk-one", None]
    with pytest.raises(InvalidRequest, match="characters that no header may carry"):
        ChatClient("http://router", api_key="nk-é\n")


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9b\x7f\tc\nd\u00e9\r") == "a[2Jb\tc\nd\u00e9"


class Router:
    """Answers each question with how many turns it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.interrupt_after = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "first"}]})
        self.bodies.append(json.loads(request.content))
        if self.bodies[-1]["messages"][-1]["content"] == "fail":
            return httpx.Response(400, json={"error": {"message": "refused"}})
        return httpx.Response(200, content=self._stream())

    def _stream(self) -> Iterator[bytes]:
        yield chunk(f"answer {len(self.bodies)}")
        if self.interrupt_after == len(self.bodies):
            raise KeyboardInterrupt
        yield b"data: [DONE]\n\n"

    def turns(self, index: int) -> list[str]:
        return [message["content"] for message in self.bodies[index]["messages"]]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch, home: Path) -> Router:
    made = Router()
    monkeypatch.setattr(chat, "ChatClient", lambda url, api_key: ChatClient(url, httpx.MockTransport(made)))
    return made


def talk(monkeypatch: pytest.MonkeyPatch, stdin: bytes, **options: Any) -> int:
    given = {"model": None, "url": None, "system": None, "max_tokens": None, "temperature": None, **options}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    return run_chat(ChatOptions(**given))


def test_a_talk_is_remembered_until_reset_and_ends_at_exit(
    router: Router, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, b"one\n\ntwo\n/reset\nthree\n/exit\nnever\n", system="be kind", temperature=0.0) == 0
    assert router.turns(0) == ["be kind", "one"]
    assert router.turns(1) == ["be kind", "one", "answer 1", "two"]
    assert router.turns(2) == ["be kind", "three"]
    assert len(router.bodies) == 3
    assert router.bodies[0]["temperature"] == 0.0
    assert router.bodies[0]["model"] == "first"
    assert capsys.readouterr().out == "answer 1\nanswer 2\nanswer 3\n"


def test_a_refused_question_is_told_and_forgotten_and_the_talk_goes_on(
    router: Router, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, b"fail\ntwo\n", model="m") == 1
    assert router.turns(1) == ["two"]
    assert "error: refused" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_not_the_program(
    router: Router, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router.interrupt_after = 1
    assert talk(monkeypatch, b"one\ntwo\n", model="m") == 0
    assert router.turns(1) == ["one", "answer 1", "two"]
    assert capsys.readouterr().out == "answer 1 [stopped]\nanswer 2\n"


def test_bytes_that_are_no_text_do_not_end_it(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, b"\xff\xfe?\n", model="m") == 0
    assert router.turns(0) == ["\ufffd\ufffd?"]


def test_help_and_unknown_commands_ask_nothing(
    router: Router, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, b"/help\n/nonsense\n/path like text\n", model="m") == 0
    assert [body["messages"][-1]["content"] for body in router.bodies] == ["/path like text"]
    err = capsys.readouterr().err
    assert "forget the talk" in err
    assert "'/nonsense' is no command" in err


def test_lines_of_a_terminal_end_with_ctrl_d_and_survive_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    events: Iterator[Any] = iter(["one", KeyboardInterrupt(), "two", EOFError()])

    def read(prompt: str) -> str:
        event = next(events)
        if isinstance(event, BaseException):
            raise event
        return str(event)

    monkeypatch.setattr("builtins.input", read)
    assert list(chat._terminal_lines()) == ["one", "two"]
