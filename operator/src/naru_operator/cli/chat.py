"""`naru chat`: a talk with a model, from a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click

from naru_operator.adapters.run_state import naru_home, running
from naru_operator.cli.chat_client import ChatClient, Message
from naru_proto import names
from naru_proto.errors import NaruError, Unavailable

_HELP = """/reset  forget the talk so far
/exit   leave (Ctrl-D does, too)
/help   this text
Ctrl-C  stop the answer that is being written"""
_PROMPT = ">>> "


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command line asks for; None leaves it to the router."""

    model: str | None
    url: str | None
    system: str | None
    max_tokens: int | None
    temperature: float | None
    api_key: str | None = None


class Talk:
    """The turns so far, and the next answer."""

    def __init__(self, client: ChatClient, model: str, options: ChatOptions) -> None:
        self._client = client
        self._model = model
        self._system = [Message("system", options.system)] if options.system else []
        self._sampling: dict[str, float | int] = {}
        if options.max_tokens is not None:
            self._sampling["max_tokens"] = options.max_tokens
        if options.temperature is not None:
            self._sampling["temperature"] = options.temperature
        self.turns: list[Message] = []

    def reset(self) -> None:
        """Forgets the turns; the system prompt stays."""
        self.turns.clear()

    def answer(self, text: str) -> bool:
        """Asks, writes the answer as it comes; what was written is remembered even if it was cut short.

        Returns whether it ended by itself.

        Raises:
            NaruError: the question was refused or the answer broke; the question is forgotten if nothing came.
        """
        question = Message("user", text)
        pieces: list[str] = []
        try:
            for piece in self._client.stream(self._model, [*self._system, *self.turns, question], self._sampling):
                pieces.append(piece)
                _write(printable(piece))
        except KeyboardInterrupt:
            _write(" [stopped]" if pieces else "[stopped]\n")
            return False
        finally:
            if pieces:
                self.turns += [question, Message("assistant", "".join(pieces))]
                _write("\n")
        return True


def run_chat(options: ChatOptions) -> int:
    """Talks until the end of input; 1 if a question could not be answered.

    Raises:
        NaruError: nothing to talk to.
    """
    return run_chat_with(ChatClient(options.url or _running_url(), api_key=options.api_key), options)


def run_chat_with(client: ChatClient, options: ChatOptions) -> int:
    """Talks over a connection, and closes it; see `run_chat`.

    Raises:
        NaruError: nothing to talk to.
    """
    try:
        model = options.model or _first_model(client)
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal:
            click.echo(f"{model} · /help for commands", err=True)
        return _loop(Talk(client, model, options), _terminal_lines() if is_terminal else _piped_lines())
    finally:
        client.close()


def _loop(talk: Talk, lines: Iterator[str]) -> int:
    exit_code = 0
    for line in lines:
        text = line.strip()
        if not text:
            continue
        if text in ("/exit", "/quit"):
            break
        if text == "/reset":
            talk.reset()
        elif text == "/help":
            click.echo(_HELP, err=True)
        elif text.startswith("/") and " " not in text:
            click.echo(f"{text!r} is no command; /help lists them", err=True)
        else:
            try:
                talk.answer(text)
            except NaruError as exc:
                click.echo(f"error: {exc.message}", err=True)
                exit_code = 1
    return exit_code


def _terminal_lines() -> Iterator[str]:
    # Imported for its effect: input() then has line editing and history.
    import readline  # noqa: F401

    while True:
        try:
            yield input(_PROMPT)
        except KeyboardInterrupt:
            click.echo("\n/exit or Ctrl-D leaves", err=True)
        except EOFError:
            click.echo("", err=True)
            return


def _piped_lines() -> Iterator[str]:
    for raw in sys.stdin.buffer:
        yield raw.decode("utf-8", "replace")


def printable(text: str) -> str:
    """Text without control characters but line feeds and tabs: a model must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _running_url() -> str:
    states = running(naru_home())
    return states[-1].http_url if states else f"http://127.0.0.1:{names.PORT_ROUTER_HTTP}"


def _first_model(client: ChatClient) -> str:
    served = client.models()
    if not served:
        raise Unavailable("no model is served there; apply a ModelDeployment first")
    return served[0]
