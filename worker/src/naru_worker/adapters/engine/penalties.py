"""Which tokens a sequence has seen, kept up token by token for the sampler's penalties.

One `TokenCounts` for each sequence whose request has a penalty; counts follow `Sequence.token_ids`, so that preemption
and prefix hits change nothing.
"""

from __future__ import annotations

import numpy as np

from naru_worker.adapters.ops.protocol import Int32Array
from naru_worker.core.request import Sequence


class TokenCounts:
    """Distinct tokens of a sequence with their occurrences in its output. Arrays grow by doubling."""

    def __init__(self, sequence: Sequence, *, with_prompt: bool) -> None:
        self._sequence = sequence
        self._num_seen = sequence.num_prompt_tokens
        prompt = sorted(set(sequence.request.prompt_token_ids)) if with_prompt else []
        self._places = {token_id: place for place, token_id in enumerate(prompt)}
        capacity = max(64, 2 * len(prompt))
        self._ids = np.zeros(capacity, np.int32)
        self._counts = np.zeros(capacity, np.int32)
        self._ids[: len(prompt)] = prompt

    def refresh(self, drafts: tuple[int, ...] = ()) -> tuple[Int32Array, Int32Array]:
        """(token ids, occurrences in the output) of this instant; views, valid until tokens are appended.

        `drafts`: counted as if they had been appended, for this answer alone.
        """
        tokens = self._sequence.token_ids
        for i in range(self._num_seen, len(tokens)):
            place = self._places.get(tokens[i])
            if place is None:
                place = self._add(tokens[i])
            self._counts[place] += 1
        self._num_seen = len(tokens)
        count = len(self._places)
        if drafts:
            return self._with(drafts, count)
        return self._ids[:count], self._counts[:count]

    def _with(self, drafts: tuple[int, ...], count: int) -> tuple[Int32Array, Int32Array]:
        new = [token_id for token_id in dict.fromkeys(drafts) if token_id not in self._places]
        places = {token_id: count + offset for offset, token_id in enumerate(new)}
        ids = np.concatenate([self._ids[:count], np.array(new, np.int32)])
        counts = np.concatenate([self._counts[:count], np.zeros(len(new), np.int32)])
        for token_id in drafts:
            place = self._places.get(token_id)
            counts[places[token_id] if place is None else place] += 1
        return ids, counts

    def _add(self, token_id: int) -> int:
        place = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._places[token_id] = place
        self._ids[place] = token_id
        return place
