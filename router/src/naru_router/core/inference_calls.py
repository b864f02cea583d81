"""Requests of naru.v1.Inference, checked, and its replies. Called by the gRPC service; does no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import inference_pb2 as wire
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.chat_messages import check_conversation, read_messages
from naru_router.core.chat_parts import ChoiceEvent, OutputReader, PartFeed, ReasoningPart, TextPart, ToolCallPart
from naru_router.core.chat_request import ChatCall
from naru_router.core.fields import Fields, check_integer, refuse
from naru_router.core.json_body import parse_object
from naru_router.core.sampling import INT32_MAX, check_sampling
from naru_router.core.template_options import read_template_options
from naru_router.core.tools.declared import read_tool_choice, read_tools

MAX_TEXTS = 2048
"""Of which vectors are asked at once."""
MAX_DIMENSIONS = 1_000_000
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_STRUCTURED = "sampling.structured"
_REASONS = {
    "stop": wire.FINISH_REASON_STOP,
    "length": wire.FINISH_REASON_LENGTH,
    "tool_calls": wire.FINISH_REASON_TOOL_CALLS,
}


def check_request_id(request_id: str) -> None:
    """Checks the id that a client gives a request; empty: it gives none.

    Raises:
        InvalidRequest: other characters than ids have.
    """
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(f"request_id is {request_id[:40]!r}; use letters, digits and ._:/+=-", param="request_id")


def checked_sampling(sampling: wire.SamplingParams) -> wire.SamplingParams:
    """The parameters of a request, which may be sent on as they are.

    Raises:
        InvalidRequest: naming the field.
    """
    check_sampling(sampling)
    if sampling.HasField("structured") and not sampling.structured.param:
        sampling.structured.param = _STRUCTURED
    return sampling


def chat_call(request: wire.InferenceChatRequest) -> ChatCall:
    """What a chat asks.

    Raises:
        InvalidRequest: naming the field.
    """
    sampling = checked_sampling(request.sampling)
    messages = read_messages([_message(message) for message in request.messages])
    if any(message.role == "tool" for message in messages):
        check_conversation(messages)
    fields = Fields({"tools": [_tool(i, tool) for i, tool in enumerate(request.tools)], **_choice(request.tool_choice)})
    tools = read_tools(fields)
    options: dict[str, object] = {}
    if request.template_options:
        options["chat_template_kwargs"] = _json("template_options", request.template_options)
    return ChatCall(
        request.model,
        messages,
        sampling,
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
        template_options=read_template_options(Fields(options), messages[-1].role),
    )


def _message(message: wire.ChatMessage) -> dict[str, object]:
    """In OpenAI's form: one parser for all."""
    found: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


def _tool(index: int, tool: wire.Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters:
        function["parameters"] = _json(f"tools[{index}].parameters", tool.parameters)
    return {"type": "function", "function": function}


def _choice(choice: wire.ToolChoice) -> dict[str, object]:
    if choice.mode == "named":
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {"tool_choice": choice.mode or None}


def _json(path: str, text: str) -> dict[str, object]:
    try:
        return parse_object(text.encode())
    except InvalidRequest as exc:
        raise InvalidRequest(f"{path} is no text of a JSON object: {exc.message}", param=path) from exc


def check_embed(request: wire.InferenceEmbedRequest) -> None:
    """Checks what vectors are asked.

    Raises:
        InvalidRequest: naming the field.
    """
    if not 1 <= len(request.texts) <= MAX_TEXTS:
        refuse("texts", list(request.texts), f"of 1 to {MAX_TEXTS} texts")
    check_integer("dimensions", request.dimensions, 0, MAX_DIMENSIONS)
    check_integer("truncate_tokens", request.truncate_tokens, -1, INT32_MAX)


class InferenceReplies:
    """Makes the replies of one request of its deltas. Mutable."""

    def __init__(self, request_id: str, n: int, make_reader: Callable[[], OutputReader] | None = None) -> None:
        """`make_reader`: reads a choice's output; None: all of it is text."""
        self._request_id = request_id
        self._parts = PartFeed(n, make_reader)

    def feed(self, deltas: Sequence[Delta]) -> list[wire.InferenceReply]:
        """The replies of the deltas, possibly none.

        Raises:
            InternalError: a choice ended twice or oddly.
        """
        replies = [
            wire.InferenceReply(request_id=self._request_id, index=delta.index, prompt_logprobs=delta.prompt_logprobs)
            for delta in deltas
            if delta.prompt_logprobs
        ]
        replies += [self._reply(event) for event in self._parts.feed(deltas)]
        last = deltas[-1]
        if last.HasField("usage"):
            if not replies:
                replies.append(wire.InferenceReply(request_id=self._request_id))
            replies[-1].usage.CopyFrom(last.usage)
        return replies

    def check_finished(self) -> None:
        """Checks that nothing is missing after the last delta.

        Raises:
            InternalError: a choice has not finished.
        """
        self._parts.check_finished()

    def _reply(self, event: ChoiceEvent) -> wire.InferenceReply:
        reply = wire.InferenceReply(request_id=self._request_id, index=event.index, logprobs=event.logprobs)
        part = event.part
        if isinstance(part, TextPart):
            reply.text = part.text
        elif isinstance(part, ReasoningPart):
            reply.reasoning = part.text
        elif isinstance(part, ToolCallPart):
            call = reply.tool_call
            call.index, call.id, call.name, call.arguments = part.index, part.call_id, part.name, part.arguments
        if event.finish_reason:
            reply.finish_reason = _REASONS[event.finish_reason]
        return reply
