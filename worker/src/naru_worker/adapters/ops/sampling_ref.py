"""The reference sampler: plain numpy in double precision, the same steps as the native one.

Called by the `ref` backend and by tests, which compare it with the native sampler draw by draw. Order of work: see
`naru_worker.core.sampling.SamplingParams`.

Numbers that are none: a NaN logit counts as -inf, +inf as the largest float. When no token is possible the lowest one
that is not banned is taken; of a row with a mask, one of the mask. Candidates are ordered by logit, lower id first on
ties; a cut keeps the first ones.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.ops.protocol import FloatArray, SampleOutput, SamplingBatch, TokenMasks

Float64Array = npt.NDArray[np.float64]

LOWEST_LOGPROB = -9999.0
GREEDY_BELOW = 1e-5
_LIGHTEST = -700.0
"""Exponents below this count as probability 0, so that double precision does not underflow."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample(logits: FloatArray, batch: SamplingBatch) -> SampleOutput:
    """Samples, or scores the given target of, each row of (R, vocab) raw logits."""
    num_rows, width = len(logits), max(0, batch.max_logprobs)
    output = SampleOutput(
        token_ids=np.zeros(num_rows, np.int32),
        logprobs=np.zeros(num_rows, np.float32),
        ranks=np.zeros(num_rows, np.int32),
        top_ids=np.full((num_rows, width), -1, np.int32),
        top_logprobs=np.full((num_rows, width), LOWEST_LOGPROB, np.float32),
    )
    for row in range(num_rows):
        clean = clean_logits(logits[row, : batch.vocab_limit])
        target = int(batch.target[row])
        if target < 0 and batch.masks is not None and batch.masks.rows[row] >= 0 and not await_masks(batch.masks):
            output.token_ids[row] = -1
            continue
        output.token_ids[row] = target if target >= 0 else choose(clean, batch, row)
        if target >= 0 or batch.num_logprobs[row] >= 0:
            _score(clean, batch, row, output)
    return output


def clean_logits(logits: FloatArray) -> FloatArray:
    """A copy without NaN and +inf."""
    clean = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    return np.minimum(clean, np.finfo(np.float32).max)


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) with 53 bits, a function of seed and counter alone.

    Source: SplitMix64 (Steele, Lea and Flood, 2014) used as a counter-based generator: element `counter` of the stream
    whose start is the mixed seed.
    """
    start = _mix((seed + _GOLDEN) & _MASK)
    return float(_mix((start + (counter + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def await_masks(masks: TokenMasks) -> bool:
    """Waits until the masks are written; False: it took too long, for this row and for all that ask later."""
    deadline_s = time.monotonic() + masks.wait_s
    while masks.gate[0] == 0:
        if time.monotonic() > deadline_s:
            masks.gate[0] = -1
            break
        time.sleep(0.0001)
    return bool(masks.gate[0] > 0)


def mask_of(batch: SamplingBatch, row: int) -> npt.NDArray[np.bool_] | None:
    """Which ids below `vocab_limit` a row may draw; None: all."""
    if batch.masks is None or batch.masks.rows[row] < 0:
        return None
    words = batch.masks.words[batch.masks.rows[row]].astype("<u4")
    return np.unpackbits(words.view(np.uint8), bitorder="little")[: batch.vocab_limit].astype(np.bool_)


def choose(clean: FloatArray, batch: SamplingBatch, row: int) -> int:
    """Draws one token from clean logits."""
    edited = _edited(clean, batch, row)
    best = int(np.argmax(edited))
    if edited[best] == -np.inf:
        return _first_allowed(batch, row)
    is_greedy = (
        batch.temperature[row] < np.float32(GREEDY_BELOW)
        or batch.top_k[row] == 1
        or batch.top_p[row] == 0.0
        or batch.min_p[row] == 1.0
    )
    if is_greedy:
        return best
    order, weights = candidates(
        edited,
        float(batch.temperature[row]),
        int(batch.top_k[row]),
        float(batch.top_p[row]),
        float(batch.min_p[row]),
    )
    running = np.cumsum(weights)
    goal = uniform(int(batch.seed[row]), int(batch.counter[row])) * running[-1]
    place = int(np.searchsorted(running, goal, side="right"))
    return int(order[min(place, len(order) - 1)])


def candidates(
    edited: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[npt.NDArray[np.int64], Float64Array]:
    """Ids that may be drawn, best first, and their weights relative to the best one."""
    exponents = (edited.astype(np.float64) - float(edited.max())) / temperature
    order = np.argsort(-edited.astype(np.float64), kind="stable")
    order = order[exponents[order] > _LIGHTEST]
    if top_k > 0:
        order = order[:top_k]
    weights: Float64Array = np.exp(exponents[order])
    before = np.cumsum(weights) - weights
    is_kept = weights >= min_p
    if top_p < 1.0:
        is_kept &= before < top_p * weights.sum()
    is_kept[0] = True
    count = len(order) if is_kept.all() else int(np.argmin(is_kept))
    return order[:count], weights[:count]


def _edited(clean: FloatArray, batch: SamplingBatch, row: int) -> FloatArray:
    """Mask, penalties, bias and bans, in float32 as the native code computes them."""
    mask = mask_of(batch, row)
    logits = clean.copy() if mask is None else np.where(mask, clean, np.float32(-np.inf))
    limit = batch.vocab_limit
    repetition = batch.repetition_penalty[row]
    presence, frequency = batch.presence_penalty[row], batch.frequency_penalty[row]
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(batch.penalty_start[row], batch.penalty_start[row + 1]):
            token, count = int(batch.penalty_ids[i]), int(batch.penalty_output_counts[i])
            if token >= limit:
                continue
            value = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
            if count > 0:
                value = value - (presence + frequency * np.float32(count))
            logits[token] = value
        for i in range(batch.bias_start[row], batch.bias_start[row + 1]):
            if batch.bias_ids[i] < limit:
                logits[batch.bias_ids[i]] += batch.bias_values[i]
    for token in _banned(batch, row):
        if token < limit:
            logits[token] = -np.inf
    return clean_logits(logits)


def _banned(batch: SamplingBatch, row: int) -> list[int]:
    ids: list[int] = batch.banned_ids[batch.banned_start[row] : batch.banned_start[row + 1]].tolist()
    return ids


def _first_allowed(batch: SamplingBatch, row: int) -> int:
    banned, mask = set(_banned(batch, row)), mask_of(batch, row)
    allowed = list(range(batch.vocab_limit)) if mask is None else np.flatnonzero(mask).tolist()
    masked = allowed[0] if mask is not None and allowed else 0
    return next((token for token in allowed if token not in banned), masked)


def _score(clean: FloatArray, batch: SamplingBatch, row: int, output: SampleOutput) -> None:
    """Raw log-probabilities of the chosen token and the best k, and the chosen one's rank."""
    top = float(clean.max())
    exact = clean.astype(np.float64)
    if top == -np.inf:
        logprobs: Any = np.full(len(clean), LOWEST_LOGPROB)
    else:
        shifted = exact - top
        log_sum = top + np.log(np.exp(shifted[shifted > _LIGHTEST]).sum())
        logprobs = np.maximum(exact - log_sum, LOWEST_LOGPROB)
    chosen = int(output.token_ids[row])
    if chosen >= len(clean):
        output.ranks[row], output.logprobs[row] = len(clean), LOWEST_LOGPROB
    else:
        is_better = (clean > clean[chosen]) | ((clean == clean[chosen]) & (np.arange(len(clean)) < chosen))
        output.ranks[row], output.logprobs[row] = 1 + int(is_better.sum()), logprobs[chosen]
    count = min(max(0, int(batch.num_logprobs[row])), len(clean), output.top_ids.shape[1])
    best = np.argsort(-exact, kind="stable")[:count]
    output.top_ids[row, :count] = best
    output.top_logprobs[row, :count] = logprobs[best]


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
