"""Turns checked calls into jobs for workers: finds the model, and for a chat its template, and renders that.

Called by both edges. What tells where the job goes is made here, too: its route keys, its sizes, its place on the ring.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from naru_proto.errors import Cancelled, DeadlineExceeded, InvalidRequest, LoadError, NaruError, Overloaded, Unavailable
from naru_proto.names import base_name
from naru_proto.registry import ModelInfoRecord
from naru_proto.route_keys import ID_BYTES, boundaries, key_root, keys_of_ids, keys_of_text, pack_keys, shared_key_root
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.course import Job, Readers
from naru_router.adapters.facts import ModelFacts
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.system_parts import SystemParts
from naru_router.adapters.templates import TemplateRenderer
from naru_router.adapters.worker_requests import ask_for, new_request, num_choices
from naru_router.core.chat_request import ChatCall, ChatMessage
from naru_router.core.completion_request import Prompt
from naru_router.core.envelope import NO_ENVELOPE, Envelope
from naru_router.core.model_tasks import check_task
from naru_router.core.prompt_size import check_prompt_size
from naru_router.core.route_map import Service
from naru_router.core.routing.ring import KEY_PREFIX_CHARS, route_key
from naru_router.core.search import sampling_of_best
from naru_router.core.tenancy.cache_scope import cache_scope
from naru_router.core.tenancy.picking import pick_of
from naru_router.core.token_sizes import TokenSizes
from naru_router.core.tools.plan import PLAIN_OUTPUT, OutputPlan, plan_output, plan_prompt
from naru_router.core.tools.styles import GENERIC, Style, style_of

logger = logging.getLogger(__name__)

_NOWHERE = (Unavailable, LoadError, Overloaded)
"""Of a model that cannot be served, or that as many wait for as may: another one that stands in for it may be asked."""
_key_root = functools.lru_cache(maxsize=4096)(key_root)
_shared_key_root = functools.lru_cache(maxsize=4096)(shared_key_root)
NO_SAMPLING = inference_pb2.SamplingParams()
"""Of requests that generate nothing; never changed."""
_OVER = (Cancelled, DeadlineExceeded)
"""Nobody waits for an answer any more."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a call asks, but for its prompt."""

    name: str
    sampling: inference_pb2.SamplingParams
    envelope: Envelope
    deadline_s: float
    ring_parts: Sequence[str]
    """Equal for requests that belong together: what the keys for ring and split are made of."""
    pick: float
    """See RouteMap.resolve."""
    readers: Readers = field(default_factory=Readers)


class JobMaker:
    """Makes jobs for models of the route map."""

    def __init__(
        self, fleet: Fleet, facts: ModelFacts, renderer: TemplateRenderer, sizes: TokenSizes, metrics: Metrics
    ) -> None:
        self._fleet = fleet
        self._facts = facts
        self._renderer = renderer
        self._sizes = sizes
        self._metrics = metrics
        self._system_parts = SystemParts(renderer)

    async def chat(self, call: ChatCall, envelope: Envelope = NO_ENVELOPE) -> Job:
        """The job of a chat.

        Raises:
            ModelNotFound: no such model.
            NaruError: its template is not known, and it could not be loaded in time.
            InvalidRequest: the template is absent, refuses the messages or takes too much.
        """
        sampling = sampling_of_best(call.sampling, call.best_of)
        asked = self._asked(call.model, sampling, envelope, _chat_parts(call.messages))
        return await self._made(asked, lambda service: self._chat(asked, call, service))

    def can_render(self, name: str, messages: Sequence[ChatMessage], envelope: Envelope = NO_ENVELOPE) -> bool:
        """Whether a chat's job can be made without bringing its model up first.

        Raises:
            ModelNotFound: no such model.
            Unavailable: its target is not there.
        """
        asked = self._asked(name, inference_pb2.SamplingParams(), envelope, _chat_parts(messages))
        service = self._fleet.route_map.resolve(name, envelope.caller, asked.pick)
        return self._fleet.route_map.info(service.model.name) is not None

    async def _chat(self, asked: _Asked, call: ChatCall, service: Service | None) -> Job:
        service, info = await self._facts_of(asked, service)
        check_task(asked.name, info, "generate")
        model = base_name(service.model.name)
        style = style_of(info.chat_template)
        planned = plan_prompt(style, call, info.chat_template)
        messages, values = planned.messages, planned.values
        try:
            text = await self._renderer.render(model, info, messages, values)
        except InvalidRequest:
            self._metrics.template_failures.labels(model).inc()
            raise
        output = plan_output(style, call, text)
        text += output.tail
        check_prompt_size(text, info.max_model_len, param="messages")
        shared = ""
        if cache_scope(asked.envelope.caller, service.entry)[1]:
            shared = await self._system_parts.of(model, info, messages, text, values)

        async def remake(other: Service | None) -> Job:
            return await self._chat(asked, call, other)

        return self._job(
            asked,
            service,
            text,
            remake,
            is_rendered=True,
            shared=shared,
            output=output,
            style=style,
        )

    def completions(
        self,
        name: str,
        prompts: Sequence[Prompt],
        sampling: inference_pb2.SamplingParams,
        envelope: Envelope = NO_ENVELOPE,
    ) -> list[Job]:
        """The jobs of a completion, one a prompt.

        Raises:
            ModelNotFound: no such model.
            Unavailable: its target is not there.
            ContextLengthExceeded: a prompt that no tokenizer could make fit.
        """
        jobs = []
        for prompt in prompts:
            begin = prompt[:KEY_PREFIX_CHARS]
            parts = [begin if isinstance(begin, str) else str(begin)]
            jobs.append(self._completion_or_stand_in(self._asked(name, sampling, envelope, parts), prompt))
        return jobs

    async def _made(self, asked: _Asked, make: Callable[[Service | None], Awaitable[Job]]) -> Job:
        """The job for what was asked for, or where that is nowhere for the first that can stand in."""
        try:
            return await make(None)
        except _NOWHERE as error:
            for other in self._stand_ins(asked):
                try:
                    return dataclasses.replace(await make(other), first_error=error)
                except _OVER:
                    raise
                except NaruError as failed:
                    logger.info("%s cannot stand in: %s", other.entry.name, failed.message)
            raise

    def _completion_or_stand_in(self, asked: _Asked, prompt: Prompt) -> Job:
        try:
            return self._completion(asked, prompt, None)
        except _NOWHERE as error:
            for other in self._stand_ins(asked):
                try:
                    return dataclasses.replace(self._completion(asked, prompt, other), first_error=error)
                except NaruError as failed:
                    logger.info("%s cannot stand in: %s", other.entry.name, failed.message)
            raise

    def _stand_ins(self, asked: _Asked) -> list[Service]:
        return self._fleet.route_map.stand_ins(asked.name, asked.envelope.caller, asked.pick)

    def _completion(self, asked: _Asked, prompt: Prompt, service: Service | None) -> Job:
        if service is None:
            service = self._fleet.route_map.resolve(asked.name, asked.envelope.caller, asked.pick)
        info = self._fleet.route_map.info(service.model.name)
        if info is not None:
            check_task(asked.name, info, "generate")
            check_prompt_size(prompt, info.max_model_len, param="prompt")

        async def remake(other: Service | None) -> Job:
            return self._completion(asked, prompt, other)

        return self._job(asked, service, prompt, remake, is_rendered=False)

    async def task(
        self,
        name: str,
        task: str,
        fill: Callable[[worker_pb2.GenerateRequest, ModelInfoRecord], None],
        ring_parts: Sequence[str],
        num_tokens: int,
        envelope: Envelope = NO_ENVELOPE,
        split_parts: Sequence[str] = (),
    ) -> Job:
        """The job of a request that generates nothing: vectors, scores, tensors, tokens.

        Args:
            name: of the model.
            task: that the model has to be able to do, see ModelInfoRecord.tasks; empty: any model can do it.
            fill: sets the task of the request; may refuse what the model cannot do.
            ring_parts: equal for requests that belong together.
            num_tokens: it computes, about.
            envelope: who asks, and how.
            split_parts: equal for the jobs of one call, so that a split gives them to one model; empty: the ring's.

        Raises:
            ModelNotFound: no such model.
            InvalidRequest: the model cannot do that.
            NaruError: what it can do is not known, and it could not be loaded in time.
        """
        asked = self._asked(name, NO_SAMPLING, envelope, ring_parts, split_parts)
        return await self._made(asked, lambda service: self._task(asked, task, fill, num_tokens, service))

    async def _task(
        self,
        asked: _Asked,
        task: str,
        fill: Callable[[worker_pb2.GenerateRequest, ModelInfoRecord], None],
        num_tokens: int,
        service: Service | None,
    ) -> Job:
        service, info = await self._facts_of(asked, service)
        check_task(asked.name, info, task)

        async def remake(other: Service | None) -> Job:
            return await self._task(asked, task, fill, num_tokens, other)

        envelope, model, caller = asked.envelope, service.model.name, asked.envelope.caller
        request = worker_pb2.GenerateRequest(
            model=model, priority=envelope.priority, tenant=caller.tenant, tenant_weight=caller.weight
        )
        if caller.tenant:
            request.cache_salt = cache_scope(caller, service.entry)[0]
        fill(request, info)
        return Job(
            model,
            request,
            route_key(model, asked.ring_parts),
            1,
            name=asked.name,
            service=service,
            max_wait_s=service.max_wait_s,
            max_depth=service.max_depth,
            num_tokens=max(1, num_tokens),
            caller=caller,
            priority=envelope.priority,
            deadline_s=asked.deadline_s,
            request_id=envelope.request_id,
            remake=remake,
        )

    def _asked(
        self,
        name: str,
        sampling: inference_pb2.SamplingParams,
        envelope: Envelope,
        ring_parts: Sequence[str],
        split_parts: Sequence[str] = (),
    ) -> _Asked:
        parts = [envelope.session] if envelope.session else ring_parts
        deadline_s = time.monotonic() + envelope.timeout_s if envelope.timeout_s else math.inf
        pick = 0.0
        if self._fleet.route_map.has_splits:
            alike = parts if envelope.session else split_parts or parts
            pick = pick_of(route_key("", alike), self._fleet.seed)
        return _Asked(name, sampling, envelope, deadline_s, parts, pick)

    def _job(
        self,
        asked: _Asked,
        service: Service,
        prompt: Prompt,
        remake: Callable[[Service | None], Awaitable[Job]],
        *,
        is_rendered: bool,
        shared: str = "",
        output: OutputPlan = PLAIN_OUTPUT,
        style: Style = GENERIC,
    ) -> Job:
        envelope, model, caller = asked.envelope, service.model.name, asked.envelope.caller
        salt = cache_scope(caller, service.entry)[0]
        root = _key_root(salt, model)
        request = new_request(model, asked.sampling, add_special_tokens=not is_rendered)
        make_reader = None if output is PLAIN_OUTPUT else ask_for(output, style, request)
        if isinstance(prompt, str):
            request.text = prompt
            data, unit = prompt.encode(), self._sizes.bytes_per_token(model)
            num_bytes = len(data)
            if shared:
                request.shared_prefix_bytes = num_shared = len(shared.encode())
                shared_root = _shared_key_root(model)
                keys = keys_of_text(data, root, shared_root=shared_root, shared_prefix_bytes=num_shared)
            else:
                keys = keys_of_text(data, root)
        else:
            request.token_ids.ids.extend(prompt)
            num_bytes, unit = len(prompt) * ID_BYTES, float(ID_BYTES)
            keys = keys_of_ids(prompt, root)
        if keys:
            request.route_keys = pack_keys(keys)
        if envelope.priority:
            request.priority = envelope.priority
        if caller.tenant:
            request.cache_salt, request.tenant = salt, caller.tenant
        request.tenant_weight = caller.weight
        asked.readers.make = make_reader
        return Job(
            model,
            request,
            route_key(model, asked.ring_parts),
            num_choices(asked.sampling),
            name=asked.name,
            service=service,
            max_wait_s=service.max_wait_s,
            max_depth=service.max_depth,
            route_keys=keys,
            key_tokens=tuple([int(end / unit) for end in boundaries(num_bytes)]) if keys else (),
            num_tokens=max(1, round(num_bytes / unit)),
            num_bytes=num_bytes if isinstance(prompt, str) else 0,
            caller=caller,
            priority=envelope.priority,
            deadline_s=asked.deadline_s,
            request_id=envelope.request_id,
            readers=asked.readers,
            remake=remake,
        )

    async def _facts_of(self, asked: _Asked, service: Service | None) -> tuple[Service, ModelInfoRecord]:
        """What serves a name, and its facts; while they are waited for, another model may come to serve it.

        Raises:
            DeadlineExceeded: the request's time is over.
        """
        is_given, name = service is not None, asked.name if service is None else service.entry.name
        while True:
            if not is_given:
                service = self._fleet.route_map.resolve(asked.name, asked.envelope.caller, asked.pick)
            assert service is not None
            try:
                info = await self._facts.of(service, name, _rest_s(asked.deadline_s))
            except Unavailable as error:
                if time.monotonic() >= asked.deadline_s:
                    raise DeadlineExceeded(f"the time that the request was given is over; {error.message}") from error
                if is_given or not self._fleet.route_map.has_moved(asked.name, service.model.name):
                    raise
                continue
            if info is not None:
                return service, info
            if is_given:
                raise Unavailable(f"the model {name!r} has just changed; send the request again")


def _rest_s(deadline_s: float) -> float:
    """Seconds until a deadline, above 0; 0: there is none."""
    return 0.0 if math.isinf(deadline_s) else max(0.001, deadline_s - time.monotonic())


def _chat_parts(messages: Sequence[ChatMessage]) -> list[str]:
    """What a chat begins with, up to its first message of a user: it stays as the conversation grows.

    No more of it than of a plain prompt, as questions on one long document belong together.
    """
    parts: list[str] = []
    rest = KEY_PREFIX_CHARS
    for message in messages:
        parts += (message.role, message.content[:rest])
        rest -= len(message.content)
        if rest <= 0 or message.role == "user":
            break
    return parts
