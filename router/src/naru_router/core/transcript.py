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
        self._num_tokens = 0
        """As the worker counts them."""
        self._is_continued = False
        self.cached_tokens = 0
        """Of the prompt, found in the prefix cache of the first worker."""
        self.prompt_tokens = 0
        """Of the usage; 0: it has not come."""

    @property
    def can_go_on(self) -> bool:
        """Whether there is output, and all of it is known."""
        num_known = sum(map(len, self._token_ids))
        return self._is_whole and num_known > 0 and num_known == self._num_tokens

    def num_tokens_used(self, num_prompt_tokens: int) -> int:
        """Of prompt and output so far; `num_prompt_tokens`: the prompt's as estimated, where its usage has not come."""
        return (self.prompt_tokens or num_prompt_tokens) + self._num_tokens if self._is_begun else 0

    def add(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Takes checked deltas. Once the request goes on elsewhere, the usage is made the one of the whole request."""
        if not deltas:
            return
        if not self._is_begun:
            self._begin(deltas)
        token_ids, num_tokens = self._token_ids, 0
        for delta in deltas:
            count = delta.num_tokens
            if count:
                token_ids[delta.index].extend(delta.token_ids)
                num_tokens += count
            elif delta.token_ids or (delta.text and not delta.finish_reason):
                # Text after the last token is what its end brings about, and comes with the finish reason.
                self._is_whole = False
            if delta.finish_reason:
                self._finished[delta.index] = True
        self._num_tokens += num_tokens
        last = deltas[-1]
        if last.HasField("usage"):
            self.prompt_tokens = last.usage.prompt_tokens
            if self._is_continued:
                last.usage.cached_tokens = self.cached_tokens

    def _begin(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        self._is_begun = True
        first = deltas[0]
        self._revision, self.cached_tokens = first.revision, first.cached_tokens
        self._has_prompt_logprobs = any(delta.prompt_logprobs for delta in deltas)

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
