"""Renders chats with the models' own templates. Called by the request's life; knows nothing of HTTP.

Templates are compiled once and kept. Short chats are rendered at once, within a budget that no other request would
feel; what is longer, or takes more, goes to threads of its own with a bound on time, so that a bad template costs its
own request alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jinja2 import Template
from jinja2.exceptions import TemplateError

from naru_proto.errors import InvalidRequest
from naru_proto.registry import ModelInfoRecord
from naru_router.adapters.template_budget import NODE_CHARS, Budget, BudgetExceeded, budget_of_thread
from naru_router.adapters.template_flow import is_opaque
from naru_router.adapters.template_sandbox import ChatEnvironment
from naru_router.adapters.template_skeletons import Skeletons
from naru_router.core.chat_request import ChatMessage
from naru_router.core.template_options import ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE
from naru_router.core.tools.prompting import call_values

MAX_TEMPLATE_CHARS = 512 * 1024
MAX_CACHED_TEMPLATES = 256
MAX_REASON_CHARS = 500
NUM_THREADS = 2
"""Rendering holds the interpreter; more threads would not be faster, one would let a slow template block all."""

INLINE_MESSAGE_CHARS = 16 * 1024
"""Chats up to this size are rendered without a thread: handing one over costs more than rendering it."""
INLINE_STEPS = 4_000
INLINE_CHARS = 64 * 1024
INLINE_TIMEOUT_S = 0.005
INLINE_PAUSE = 256
"""A template that was too slow for it goes to a thread so many times before it is tried again."""

WALL_FACTOR = 4
"""Clock time over processor time: waiting for a thread, other work of the machine, one slow operation."""

_ABSENT: Mapping[str, object] = {ADD_GENERATION_PROMPT: True, "tools": None, "documents": None}
"""What every template is given, where a chat has nothing else for it."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may use."""

    max_steps: int = 500_000
    """Loop turns, calls, filters and operators."""
    max_chars: int = 8 * 1024 * 1024
    """Of the rendered prompt and of any value on the way."""
    timeout_s: float = 2.0
    """Of processor time; four times as much may pass on the clock, waiting for a thread included."""


class _TooSlow(Exception):
    """More than a rendering without a thread may take."""


class TemplateRenderer:
    """Compiles, keeps and runs chat templates."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._environment = ChatEnvironment()
        self._inline_limits = TemplateLimits(
            max_steps=min(INLINE_STEPS, limits.max_steps),
            max_chars=min(INLINE_CHARS, limits.max_chars),
            timeout_s=min(INLINE_TIMEOUT_S, limits.timeout_s),
        )
        self._pauses: dict[str, int] = {}
        """Templates that were too slow, and how often they still go to a thread."""
        self._opaque: dict[str, bool] = {}
        """Whether a template only puts contents where they belong."""
        self._skeletons: dict[tuple[str, str, str], Skeletons] = {}
        """By template and the tokens at both ends."""
        self._cache: OrderedDict[str, Template] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="template")

    def close(self) -> None:
        """Ends the threads; renderings in progress end by their own budget."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def render(
        self,
        model: str,
        info: ModelInfoRecord,
        messages: Sequence[ChatMessage],
        values: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt of a chat, ready for the assistant to speak.

        `values`: what the template is given beside the messages, by name, such as tools; checked JSON.

        Raises:
            InvalidRequest: no template, a broken one, one that refuses the messages, or one that takes too much.
        """
        if not info.chat_template:
            message = f"the model {model!r} has no chat template; use /v1/completions or a chat model"
            raise InvalidRequest(message, param="model")
        skeletons = self._skeletons.get((info.chat_template, info.bos_token, info.eos_token))
        if skeletons is not None and not values:
            filled = skeletons.fill(messages)
            if filled is not None and len(filled) <= self._limits.max_chars:
                return filled
        if self._may_be_inline(info.chat_template, messages, values):
            try:
                text = self._render(info, messages, self._inline_limits, values)
                if not values:
                    self._learn(info, messages, text)
                return text
            except _TooSlow:
                self._pauses[info.chat_template] = INLINE_PAUSE
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        work = loop.run_in_executor(self._threads, context.run, self._render, info, messages, self._limits, values)
        try:
            async with asyncio.timeout(self._limits.timeout_s * WALL_FACTOR):
                return await work
        except TimeoutError as exc:
            message = f"the chat template of {model!r} takes longer than {self._limits.timeout_s:g} s"
            raise InvalidRequest(message, param="messages") from exc

    def _learn(self, info: ModelInfoRecord, messages: Sequence[ChatMessage], text: str) -> None:
        """Keeps what a template that never looks at contents prints around them."""
        template = info.chat_template
        if template not in self._opaque:
            self._opaque[template] = is_opaque(self._environment.parse(template))
        if not self._opaque[template]:
            return
        key = (template, info.bos_token, info.eos_token)
        skeletons = self._skeletons.setdefault(key, Skeletons())
        with contextlib.suppress(InvalidRequest, _TooSlow):  # marks may be longer than what they stand for
            skeletons.learn(messages, text, lambda marked: self._render(info, marked, self._inline_limits))
        if len(self._skeletons) > MAX_CACHED_TEMPLATES:
            del self._skeletons[next(iter(self._skeletons))]

    def _may_be_inline(
        self, template: str, messages: Sequence[ChatMessage], values: Mapping[str, object] | None
    ) -> bool:
        if template not in self._cache:
            return False  # compiling takes milliseconds
        pause = self._pauses.get(template, 0)
        if pause:
            if pause > 1:
                self._pauses[template] = pause - 1
            else:
                del self._pauses[template]
            return False
        num_chars = sum([_num_chars(message) for message in messages])
        return num_chars <= INLINE_MESSAGE_CHARS and (not values or _is_small(values))

    def _render(
        self,
        info: ModelInfoRecord,
        messages: Sequence[ChatMessage],
        limits: TemplateLimits,
        more: Mapping[str, object] | None = None,
    ) -> str:
        budget = Budget(
            max_steps=limits.max_steps,
            max_chars=limits.max_chars,
            timeout_s=limits.timeout_s,
        )
        budget_of_thread.set(budget)
        values = [_message_dict(message, info.chat_template) for message in messages]
        budget.know(values)
        given = {**_ABSENT, **more} if more else dict(_ABSENT)
        budget.know(given)
        given |= {"messages": values, "bos_token": info.bos_token, "eos_token": info.eos_token}
        try:
            text = self._compiled(info.chat_template).render(given)
        except BudgetExceeded as exc:
            if limits is self._inline_limits:
                raise _TooSlow from exc
            raise InvalidRequest(f"the chat template failed: {_reason(exc)}", param="messages") from exc
        except TemplateError as exc:
            raise InvalidRequest(f"the chat template failed: {_reason(exc)}", param="messages") from exc
        except Exception as exc:
            # The template is foreign code: whatever it raises is its own fault, and never this process's.
            name = type(exc).__name__
            raise InvalidRequest(f"the chat template failed: {name}: {_reason(exc)}", param="messages") from exc
        if len(text) > self._limits.max_chars:
            message = f"the rendered chat has {len(text)} characters; at most {self._limits.max_chars} are allowed"
            raise InvalidRequest(message, param="messages")
        return _cut_after(text, messages[-1].content) if more and more.get(CONTINUE_FINAL_MESSAGE) else text

    def _compiled(self, source: str) -> Template:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"it has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed")
        template = self._cache.get(source)
        if template is None:
            template = self._environment.from_string(source)
            self._cache[source] = template
            while len(self._cache) > MAX_CACHED_TEMPLATES:
                oldest, _ = self._cache.popitem(last=False)
                self._pauses.pop(oldest, None)
                self._opaque.pop(oldest, None)
        return template


def _message_dict(message: ChatMessage, template: str) -> dict[str, object]:
    # Most templates know `system` only; the two roles mean the same to a model.
    is_unknown_developer = message.role == "developer" and "developer" not in template
    data: dict[str, object] = {
        "role": "system" if is_unknown_developer else message.role,
        "content": message.content,
    }
    if message.name is not None:
        data["name"] = message.name
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        data["tool_calls"] = call_values(message.tool_calls)
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
        if "thinking" in template:
            data["thinking"] = message.reasoning
    return data


def _num_chars(message: ChatMessage) -> int:
    size = len(message.content)
    if message.tool_calls:
        size += sum([len(call.arguments) for call in message.tool_calls])
    return size + len(message.reasoning)


def _is_small(values: object) -> bool:
    """Whether values print to no more than a rendering without a thread may have; large ones are not looked through."""
    num_chars = 0
    pending = [values]
    while pending and num_chars <= INLINE_MESSAGE_CHARS:
        value = pending.pop()
        num_chars += NODE_CHARS
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return num_chars <= INLINE_MESSAGE_CHARS


def _cut_after(text: str, content: str) -> str:
    """The prompt up to the end of its last message's content, so that the model goes on with it."""
    content = content.strip()
    at = text.rfind(content)
    if at < 0:
        message = "the chat template does not print the last message as it is, so that it cannot go on"
        raise InvalidRequest(message, param=CONTINUE_FINAL_MESSAGE)
    return text[: at + len(content)]


def _reason(exc: BaseException) -> str:
    text = str(exc)
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"
