"""Whole answers: collects the deltas of one prompt, then builds OpenAI's objects. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from naru_proto.errors import InternalError
from naru_proto.v1.inference_pb2 import PositionLogprobs
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.chat_answer import read_message
from naru_router.core.chat_parts import OutputReader
from naru_router.core.chunks_completion import add_echo_logprobs, echo_text
from naru_router.core.completion_request import Prompt
from naru_router.core.finish import finish_name
from naru_router.core.logprobs import LegacyLogprobs, chat_content, prompt_values
from naru_router.core.search import best_first
from naru_router.core.sse import dump
from naru_router.core.usage import TokenUsage


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """What one prompt's choices came to."""

    def __init__(self, n: int) -> None:
        self._choices = [_Choice() for _ in range(n)]
        self._prompt_logprobs: Sequence[PositionLogprobs] = ()
        self.usage = TokenUsage()

    def feed(self, deltas: Sequence[Delta]) -> None:
        """Takes more output.

        Raises:
            InternalError: a choice ended twice or oddly.
        """
        for delta in deltas:
            choice = self._choices[delta.index]
            text = delta.text
            if text:
                choice.texts.append(text)
            if delta.logprobs:
                choice.logprobs.extend(delta.logprobs)
            if delta.prompt_logprobs:
                self._prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason:
                if choice.finish_reason is not None:
                    raise InternalError("the worker ended a choice twice; send the request again")
                choice.finish_reason = finish_name(delta.finish_reason)
        last = deltas[-1]
        if last.HasField("usage"):
            self.usage = TokenUsage.from_wire(last.usage)

    def check_finished(self) -> None:
        """Checks that nothing is missing after the last delta.

        Raises:
            InternalError: a choice has not finished.
        """
        if any(choice.finish_reason is None for choice in self._choices):
            raise InternalError("the worker ended the request before all of its choices; send it again")

    def keep_best(self, n: int) -> None:
        """Of more choices than were asked for, keeps the `n` whose tokens were the most likely, best first."""
        order = best_first([choice.logprobs for choice in self._choices])
        self._choices = [self._choices[index] for index in order[:n]]

    def prompt_logprobs(self) -> list[dict[str, dict[str, object]] | None]:
        """Of the prompt's tokens: by token id, its log probability, rank and text."""
        return prompt_values(self._prompt_logprobs)

    def chat_choices(
        self,
        *,
        has_logprobs: bool,
        make_reader: Callable[[], OutputReader] | None = None,
        writes_function_call: bool = False,
    ) -> list[dict[str, object]]:
        """`choices` of a chat completion. `make_reader`: reads their texts; None: all of them is text."""
        choices: list[dict[str, object]] = []
        for index, choice in enumerate(self._choices):
            text, reason = "".join(choice.texts), choice.finish_reason
            message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
            if make_reader is not None:
                message, reason = read_message(text, reason, make_reader, writes_function_call=writes_function_call)
            logprobs = {"content": chat_content(choice.logprobs), "refusal": None} if has_logprobs else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return choices

    def completion_choices(
        self, *, first_index: int, has_logprobs: bool, echo: Prompt | None, tells_prompt_logprobs: bool = False
    ) -> list[dict[str, object]]:
        """`choices` of this prompt's part of a completion."""
        head = "" if echo is None else echo_text(echo, self._prompt_logprobs)
        choices: list[dict[str, object]] = []
        for index, choice in enumerate(self._choices):
            logprobs = None
            if has_logprobs:
                builder = LegacyLogprobs()
                if echo is not None:
                    add_echo_logprobs(builder, echo, self._prompt_logprobs, head)
                builder.add(choice.logprobs)
                logprobs = builder.take() or _NO_LOGPROBS
            choices.append(
                {
                    "index": first_index + index,
                    "text": head + "".join(choice.texts),
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
            if tells_prompt_logprobs:
                choices[-1]["prompt_logprobs"] = self.prompt_logprobs()
        return choices


_NO_LOGPROBS: dict[str, object] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def answer_body(
    *,
    answer_id: str,
    kind: str,
    created_s: int,
    model: str,
    choices: list[dict[str, object]],
    usage: TokenUsage,
    more: Mapping[str, object] = MappingProxyType({}),
) -> bytes:
    """The whole reply; `kind` is ``chat.completion`` or ``text_completion``; `more`: further fields."""
    return dump(
        {
            "id": answer_id,
            "object": kind,
            "created": created_s,
            "model": model,
            "choices": choices,
            "usage": usage.to_openai(),
            **more,
        }
    )
