"""Turns checked calls into jobs for workers: finds the model, and for a chat its template, and renders that.

Called by both edges.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.dispatcher import Job
from naru_router.adapters.facts import ModelFacts
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.templates import TemplateRenderer
from naru_router.core.chat_request import ChatMessage
from naru_router.core.completion_request import Prompt
from naru_router.core.prompt_size import check_prompt_size
from naru_router.core.routing import KEY_PREFIX_CHARS, route_key


class JobMaker:
    """Makes jobs for models of the route map."""

    def __init__(self, fleet: Fleet, facts: ModelFacts, renderer: TemplateRenderer, metrics: Metrics) -> None:
        self._fleet = fleet
        self._facts = facts
        self._renderer = renderer
        self._metrics = metrics

    async def chat(self, name: str, messages: Sequence[ChatMessage], sampling: inference_pb2.SamplingParams) -> Job:
        """The job of a chat.

        Raises:
            ModelNotFound: no such model.
            NaruError: its template is not known, and it could not be loaded in time.
            InvalidRequest: the template is absent, refuses the messages or takes too much.
        """
        model = self._fleet.route_map.resolve(name).name
        info = await self._facts.of(model)
        try:
            text = await self._renderer.render(model, info, messages)
        except InvalidRequest:
            self._metrics.template_failures.labels(model).inc()
            raise
        check_prompt_size(text, info.max_model_len, param="messages")
        request = worker_pb2.GenerateRequest(model=model, text=text, add_special_tokens=False, sampling=sampling)
        return Job(model, request, _chat_key(model, messages), _num_choices(sampling))

    def completions(self, name: str, prompts: Sequence[Prompt], sampling: inference_pb2.SamplingParams) -> list[Job]:
        """The jobs of a completion, one a prompt.

        Raises:
            ModelNotFound: no such model.
            ContextLengthExceeded: a prompt that no tokenizer could make fit.
        """
        model = self._fleet.route_map.resolve(name).name
        info = self._fleet.route_map.info(model)
        jobs = []
        for prompt in prompts:
            if info is not None:
                check_prompt_size(prompt, info.max_model_len, param="prompt")
            request = worker_pb2.GenerateRequest(model=model, add_special_tokens=True, sampling=sampling)
            if isinstance(prompt, str):
                request.text = prompt
                key = route_key(model, [prompt[:KEY_PREFIX_CHARS]])
            else:
                request.token_ids.ids.extend(prompt)
                key = route_key(model, [str(prompt[:KEY_PREFIX_CHARS])])
            jobs.append(Job(model, request, key, _num_choices(sampling)))
        return jobs


def _num_choices(sampling: inference_pb2.SamplingParams) -> int:
    return sampling.n if sampling.HasField("n") else 1


def _chat_key(model: str, messages: Sequence[ChatMessage]) -> bytes:
    """Up to the first message of the user: it stays as the conversation grows, and differs between conversations."""
    parts: list[str] = []
    for message in messages:
        parts += (message.role, message.content)
        if message.role == "user":
            break
    return route_key(model, parts)
