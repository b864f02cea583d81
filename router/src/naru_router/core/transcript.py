"""What the choices of one request have said so far, so that another worker can go on where one was lost.

Kept by the dispatcher beside the consumer: it sees the deltas that the client is about to see. A request can go on when
every token of its output is known by its id; the worker that goes on is told them, and draws the next ones from the
same seed at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.v1 import worker_pb2


class Transcript:
    """The output of one request. Mutable."""

    def __init__(self, n: int) -> None:
        self._token_ids: list[list[int]] = [[] for _ in range(n)]
        self._finished = [False] * n
        self._is_whole = True
        self._has_prompt_logprobs = False
        self._is_begun = False
        self._revision = ""
        self._cached_tokens = 0
        self._is_continued = False

    @property
    def can_go_on(self) -> bool:
        """Whether there is output, and all of it is known."""
        return self._is_whole and any(self._token_ids)

    def add(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Takes checked deltas. Once the request goes on elsewhere, the usage is made the one of the whole request."""
        for delta in deltas:
            if not self._is_begun:
                self._is_begun = True
                self._revision, self._cached_tokens = delta.revision, delta.cached_tokens
            self._token_ids[delta.index].extend(delta.token_ids)
            # Text after the last token is what its end brings about, and comes with the finish reason.
            is_covered = delta.num_tokens > 0 or delta.finish_reason or not delta.text
            if len(delta.token_ids) != delta.num_tokens or not is_covered:
                self._is_whole = False
            if delta.finish_reason:
                self._finished[delta.index] = True
            if delta.prompt_logprobs:
                self._has_prompt_logprobs = True
            if self._is_continued and delta.HasField("usage"):
                delta.usage.cached_tokens = self._cached_tokens

    def request_from_here(self, request: worker_pb2.GenerateRequest) -> worker_pb2.GenerateRequest:
        """The request for the worker that goes on."""
        self._is_continued = True
        rest = worker_pb2.GenerateRequest()
        rest.CopyFrom(request)
        for token_ids, is_finished in zip(self._token_ids, self._finished, strict=True):
            rest.prior.add(token_ids=token_ids, is_finished=is_finished)
        rest.prior_revision = self._revision
        if self._has_prompt_logprobs:
            rest.sampling.ClearField("prompt_logprobs")
        return rest
