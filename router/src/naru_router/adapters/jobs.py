"""Turns checked calls into jobs for workers: finds the model, and for a chat its template, and renders that.

Called by both edges.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence

from naru_proto.errors import InvalidRequest, Unavailable
from naru_proto.names import base_name
from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.course import Job
from naru_router.adapters.facts import ModelFacts
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.templates import TemplateRenderer
from naru_router.core.chat_request import ChatMessage
from naru_router.core.completion_request import Prompt
from naru_router.core.prompt_size import check_prompt_size
from naru_router.core.route_map import Service
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
        service, info = await self._facts_of(name)
        model = service.model.name
        try:
            text = await self._renderer.render(base_name(model), info, messages)
        except InvalidRequest:
            self._metrics.template_failures.labels(base_name(model)).inc()
            raise
        check_prompt_size(text, info.max_model_len, param="messages")
        request = _request(model, sampling, add_special_tokens=False)
        request.text = text

        async def remake() -> Job:
            return await self.chat(name, messages, sampling)

        return _job(name, service, request, _chat_key(model, messages), remake)

    def completions(self, name: str, prompts: Sequence[Prompt], sampling: inference_pb2.SamplingParams) -> list[Job]:
        """The jobs of a completion, one a prompt.

        Raises:
            ModelNotFound: no such model.
            Unavailable: its target is not there.
            ContextLengthExceeded: a prompt that no tokenizer could make fit.
        """
        return [self._completion(name, prompt, sampling) for prompt in prompts]

    def _completion(self, name: str, prompt: Prompt, sampling: inference_pb2.SamplingParams) -> Job:
        service = self._fleet.route_map.resolve(name)
        model = service.model.name
        info = self._fleet.route_map.info(model)
        if info is not None:
            check_prompt_size(prompt, info.max_model_len, param="prompt")
        request = _request(model, sampling, add_special_tokens=True)
        if isinstance(prompt, str):
            request.text = prompt
            key = route_key(model, [prompt[:KEY_PREFIX_CHARS]])
        else:
            request.token_ids.ids.extend(prompt)
            key = route_key(model, [str(prompt[:KEY_PREFIX_CHARS])])

        async def remake() -> Job:
            return self._completion(name, prompt, sampling)

        return _job(name, service, request, key, remake)

    async def _facts_of(self, name: str) -> tuple[Service, ModelInfoRecord]:
        """What serves a name, and its facts; while they are waited for, another model may come to serve it."""
        while True:
            service = self._fleet.route_map.resolve(name)
            try:
                info = await self._facts.of(service, name)
            except Unavailable:
                if not self._fleet.route_map.has_moved(name, service.model.name):
                    raise
                continue
            if info is not None:
                return service, info


def _request(
    model: str, sampling: inference_pb2.SamplingParams, *, add_special_tokens: bool
) -> worker_pb2.GenerateRequest:
    """A request without its prompt, that another worker can go on with: seeded, and told in token ids."""
    request = worker_pb2.GenerateRequest(
        model=model, add_special_tokens=add_special_tokens, sampling=sampling, return_token_ids=True
    )
    if not sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)
    return request


def _job(
    name: str,
    service: Service,
    request: worker_pb2.GenerateRequest,
    key: bytes,
    remake: Callable[[], Awaitable[Job]],
) -> Job:
    return Job(
        service.model.name,
        request,
        key,
        _num_choices(request.sampling),
        name=name,
        max_wait_s=service.max_wait_s,
        max_depth=service.max_depth,
        remake=remake,
    )


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
