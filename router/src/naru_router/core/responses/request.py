"""The body of POST /v1/responses, checked. Unknown fields are ignored; what would change the answer is not.

What was stored before is not known here: the chat is made once it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.chat_request import ChatCall, Tool, ToolChoice, read_model, read_stream_options
from naru_router.core.checked_json import check_metadata
from naru_router.core.fields import Fields, refuse, shown
from naru_router.core.responses.conversation import messages_of
from naru_router.core.responses.items import Object, read_items
from naru_router.core.responses.tools import read_text, read_tool_choice, read_tools, shown_tool
from naru_router.core.sampling import INT32_MAX, MAX_LOGPROBS
from naru_router.core.sampling_fields import read_common_sampling
from naru_router.core.template_options import effort_options

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    LOGPROBS,
)
"""But for log probabilities nothing of it is ever made here."""
_SUMMARIES = ("auto", "concise", "detailed")
_NOT_BUILT = ("conversation", "prompt", "context_management", "moderation")


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """What a client of the Responses API asked for."""

    model: str
    items: tuple[Object, ...]
    """Of this call's own input."""
    instructions: str
    sampling: SamplingParams
    """Never changed after it is built."""
    tools: tuple[Tool, ...]
    """That are offered to the model."""
    tool_choice: ToolChoice
    is_parallel: bool
    template_options: Object
    stream: bool
    is_stored: bool
    previous_id: str
    """Of the stored response that it goes on from; empty: none."""
    told: Object
    """What the response repeats of the call."""

    @property
    def has_logprobs(self) -> bool:
        """Whether texts come with the log probabilities of their tokens."""
        return self.sampling.HasField("logprobs")

    def chat(self, earlier: Sequence[Object] = ()) -> ChatCall:
        """The chat, after the items of earlier responses.

        Raises:
            InvalidRequest: an output of a call that was not made, or nothing to answer.
        """
        messages = messages_of(self.instructions, [*earlier, *self.items])
        if not messages:
            raise InvalidRequest("input is missing; send a string or an array of items", param="input")
        return ChatCall(
            self.model,
            messages,
            self.sampling,
            stream=self.stream,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.is_parallel,
            template_options=self.template_options,
        )


def parse_response(body: dict[str, object], answer_id: str) -> ResponseCall:
    """Reads a body; `answer_id` makes the ids of items that have none.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    _refuse_unbuilt(fields)
    previous_id = fields.text("previous_response_id") or ""
    items = [] if previous_id and fields.get("input") is None else read_items(fields.get("input"), answer_id)
    sampling = read_common_sampling(body, fields.integer("max_output_tokens", 1, INT32_MAX))
    tools = read_tools(fields)
    offered, choice, told_choice = read_tool_choice(fields, tools)
    reasoning, options = _read_reasoning(fields)
    _read_logprobs(fields, sampling)
    parallel = fields.boolean("parallel_tool_calls") is not False
    told: Object = {
        **_told_plainly(fields),
        "parallel_tool_calls": parallel,
        "reasoning": reasoning,
        "text": read_text(fields, sampling),
        "tool_choice": told_choice,
        "tools": [shown_tool(tool) for tool in tools],
        "top_logprobs": sampling.logprobs,
    }
    return ResponseCall(
        model,
        tuple(items),
        fields.text("instructions") or "",
        sampling,
        offered,
        choice,
        parallel,
        options,
        stream=read_stream_options(fields)[0],
        is_stored=fields.boolean("store") or False,
        previous_id=previous_id,
        told=told,
    )


def _told_plainly(fields: Fields) -> Object:
    """What is told as it was sent, or as its default."""
    return {
        "instructions": fields.text("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.integer("max_tool_calls", 1, INT32_MAX),
        "metadata": _read_metadata(fields),
        "previous_response_id": fields.text("previous_response_id") or None,
        "store": fields.boolean("store") or False,
        "temperature": _number(fields, "temperature"),
        "top_p": _number(fields, "top_p"),
        "truncation": "disabled",
        **{name: fields.text(name) for name in ("user", "safety_identifier", "prompt_cache_key")},
    }


def _refuse_unbuilt(fields: Fields) -> None:
    for name in _NOT_BUILT:
        value = fields.get(name)
        if value not in (None, [], {}):
            raise InvalidRequest(f"{name} is {shown(value)}; this server does not support it: leave it out", param=name)
    if fields.boolean("background"):
        refuse("background", True, "false: no response is made in the background; use a batch, or stream it")
    truncation = fields.get("truncation")
    if truncation not in (None, "disabled"):
        refuse("truncation", truncation, "disabled: nothing is dropped from a conversation; shorten it yourself")
    tier = fields.get("service_tier")
    if tier not in (None, "auto", "default"):
        refuse("service_tier", tier, "auto or default")


def _read_metadata(fields: Fields) -> dict[str, str]:
    value = fields.get("metadata")
    return {} if value is None else check_metadata("metadata", value)


def _read_reasoning(fields: Fields) -> tuple[Object, Object]:
    """As the response tells it, and for the template."""
    reasoning = fields.object("reasoning")
    told: Object = {"effort": None, "summary": None}
    options: Object = {}
    if reasoning is None:
        return told, options
    for name in ("summary", "generate_summary"):
        value = reasoning.get(name)
        if value is not None and value not in _SUMMARIES:
            refuse(reasoning.path(name), value, f"one of {', '.join(_SUMMARIES)}")
    effort = reasoning.get("effort")
    told = {"effort": effort, "summary": reasoning.get("summary") or reasoning.get("generate_summary")}
    if effort is not None:
        options |= effort_options(effort, reasoning.path("effort"))
    return told, options


def _read_logprobs(fields: Fields, sampling: SamplingParams) -> None:
    included = fields.array("include") or []
    for index, value in enumerate(included):
        if value not in _INCLUDABLE:
            refuse(f"include[{index}]", value, f"one of {', '.join(_INCLUDABLE)}")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top or LOGPROBS in included:
        sampling.logprobs = top or 0


def _number(fields: Fields, name: str) -> object:
    """As it was sent, checked before; its default where it was not."""
    value = fields.get(name)
    return 1.0 if value is None else value
