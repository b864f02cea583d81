"""Pages that say where requests went and why, and where one would go now; for `naru explain request`.

A tenant sees its own requests alone. No page shows content.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from naru_proto.errors import NaruError, Unavailable
from naru_router.adapters.course import Job
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.http.body import read_object
from naru_router.adapters.http.page_replies import JSON, json_page, refusal_page
from naru_router.adapters.jobs import JobMaker
from naru_router.core.caller import Caller
from naru_router.core.chat_request import parse_chat
from naru_router.core.completion_request import parse_completion
from naru_router.core.envelope import Envelope, read_envelope
from naru_router.core.errors import openai_error
from naru_router.core.traces import RequestTrace, Traces, trace_json


class RequestPages:
    """Handlers that explain requests."""

    def __init__(
        self,
        traces: Traces,
        jobs: JobMaker,
        dispatcher: Dispatcher,
        caller_of: Callable[[Callable[[str], str | None]], Caller],
        max_body_bytes: int,
    ) -> None:
        self._traces = traces
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._caller_of = caller_of
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            Route("/v1/naru/requests/{request_id:path}", self.request),
            Route("/v1/naru/route", self.route, methods=["POST"]),
        ]

    async def request(self, request: Request) -> Response:
        """GET /v1/naru/requests/{id}: the course of one of the last requests."""
        try:
            caller = self._caller_of(request.headers.get)
            request_id = request.path_params["request_id"]
        except NaruError as exc:
            return refusal_page(exc)
        trace = self._traces.get(request_id, caller.tenant)
        if trace is None:
            text = f"this router remembers no request {request_id[:130]!r}; it keeps its last ones"
            body = openai_error(text, "invalid_request_error", None, None)
            return Response(body, 404, media_type=JSON)
        return json_page(trace_json(trace))

    async def route(self, request: Request) -> Response:
        """POST /v1/naru/route: where a request with this model and prompt or messages would go now."""
        try:
            caller = self._caller_of(request.headers.get)
            body = read_object(request.scope["naru.request"], self._max_body_bytes)
            envelope = read_envelope(
                request.headers.get,
                caller,
                request.scope["naru.request_id"],
                priority=body.get("priority"),
                cache_key=body.get("prompt_cache_key"),
            )
            job = await self._job(body, envelope)
            trace = self._look(job)
        except NaruError as exc:
            return refusal_page(exc)
        return json_page(trace_json(trace))

    async def _job(self, body: dict[str, object], envelope: Envelope) -> Job:
        if "messages" in body:
            chat = parse_chat(body)
            if not self._jobs.can_render(chat.model, chat.messages, envelope):
                raise Unavailable(
                    f"the chat template of {chat.model[:200]!r} is known once a worker has loaded it, and to ask loads "
                    "nothing; send a request first, or ask with a plain prompt"
                )
            return await self._jobs.chat(chat, envelope)
        call = parse_completion(body)
        return self._jobs.completions(call.model, call.prompts, call.sampling, envelope)[0]

    def _look(self, job: Job) -> RequestTrace:
        now_s = time.monotonic()
        trace = RequestTrace(
            request_id="",
            tenant=job.caller.tenant,
            model=job.label,
            num_tokens=job.num_tokens,
            num_keys=len(job.route_keys),
            priority=job.priority,
            began_s=now_s,
        )
        placement = self._dispatcher.look(job)
        if placement is None:
            raise Unavailable(f"no worker could take a request for {job.label!r} now; `naru explain model` says why")
        attempt = trace.add(placement.decision, is_held=placement.is_held, now_s=now_s)
        attempt.outcome = trace.outcome = "not sent"
        return trace
