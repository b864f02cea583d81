"""A model that is a hash: its logits depend on every token before them, as read back through the block table.

It computes nothing a language model would, but everything an engine can get wrong shows in its output: a wrong slot, a
stale block, a copy that did not happen, a position off by one, another row's seed or penalties.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.memory.kv_space import KVSpace
from naru_worker.adapters.ops.protocol import (
    BatchInputs,
    FloatArray,
    KVConfig,
    RunnerOptions,
    SampleOutput,
    SamplingBatch,
)
from naru_worker.adapters.ops.sampling_ref import await_masks, mask_of
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.scheduler_config import SchedulerConfig

EOS = 256
VOCAB_SIZE = 264
"""256 bytes, EOS, one more special token, and six ids that the tokenizer does not know."""
NUM_TOKENS = 258
HIDDEN_SIZE = 8


class ToyTokenizer:
    """A byte is a token."""

    bos_token = ""
    eos_token = "<eos>"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def encode_input(
        self, text: str, pair: str | None, *, add_special_tokens: bool, max_tokens: int | None
    ) -> EncoderInput:
        first, second = list(text.encode()), [] if pair is None else [*pair.encode()]
        middle = [] if pair is None else [257]
        return EncoderInput(
            tuple([*first, *middle, *second][:max_tokens]),
            tuple(([0] * (len(first) + len(middle)) + [1] * len(second))[:max_tokens]),
        )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts = [b"" if i >= 256 and skip_special_tokens else self.token_bytes(i) for i in token_ids]
        return b"".join(parts).decode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    def special_text(self, token_id: int) -> str | None:
        return {256: "<eos>", 257: "<sep>"}.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return (self.special_text(token_id) or "").encode() if token_id >= 256 else bytes([token_id])


class ToyRunner:
    """Keeps the tokens themselves as keys. `before_step` may block or raise, in place of a fault."""

    weight_bytes = 1000
    max_wait_s = 0.0
    is_ready = True

    def __init__(self, options: RunnerOptions, revision: str = "") -> None:
        self.options = options
        self.kv = KVConfig(1, 1, 1, options.block_size, options.num_blocks)
        self.kv_bytes = options.num_blocks * options.block_size
        self.revision = revision
        # Poison: whatever is read before it was written is no token.
        self.cache = np.full(options.num_blocks * options.block_size, -7, np.int32)
        self.before_step: Callable[[BatchInputs], object] = lambda batch: None
        self.is_closed = False
        self.released: list[tuple[int, int]] = []
        """(first, count) of blocks given back."""
        self.num_steps = 0
        self.threads: set[int] = set()

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        self.before_step(batch)
        self.num_steps += 1
        self.threads.add(threading.get_ident())
        logits = self.logits(batch)
        output = draw(logits, sampling)
        # What stands for a state: the first scores, which depend on all tokens before them as well.
        return dataclasses.replace(output, hidden=logits[:, :HIDDEN_SIZE]) if sampling.wants_hidden else output

    def logits(self, batch: BatchInputs) -> FloatArray:
        assert not self.is_closed, "a closed runner was asked"
        size = self.kv.block_size
        for source, destination in batch.copies.tolist():
            self.cache[destination * size : (destination + 1) * size] = self.cache[source * size : (source + 1) * size]
        assert (batch.slots >= size).all(), "the null block is nobody's"
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens in one slot"
        self.cache[batch.slots] = batch.token_ids
        rows = [self._context(batch, row) for row in batch.logits_rows.tolist()]
        return np.array([self._row(context) for context in rows], np.float32).reshape(len(rows), VOCAB_SIZE)

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        assert not self.is_closed, "a closed runner was asked"
        assert first_block > 0, "the null block stays"
        assert 0 < num_blocks <= self.kv.num_blocks - first_block
        size = self.kv.block_size
        self.cache[first_block * size : (first_block + num_blocks) * size] = -7
        self.released.append((first_block, num_blocks))

    def close(self) -> None:
        self.is_closed = True

    def _context(self, batch: BatchInputs, row: int) -> list[int]:
        size = self.kv.block_size
        sequence = int(np.searchsorted(batch.query_start, row, side="right")) - 1
        length = int(batch.positions[row]) + 1
        assert length <= batch.seq_lens[sequence]
        table = batch.block_table[sequence]
        context = [int(self.cache[table[p // size] * size + p % size]) for p in range(length)]
        assert min(context) >= 0, "read before it was written"
        return context

    def _row(self, context: list[int]) -> npt.NDArray[np.float32]:
        return toy_logits(tuple(context), self.revision)


def toy_logits(context: tuple[int, ...], revision: str = "") -> npt.NDArray[np.float32]:
    """(VOCAB_SIZE,) between -4 and 4; letters are likelier than other bytes."""
    digest = hashlib.blake2b(f"{revision}{context}".encode(), digest_size=8).digest()
    logits = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little"))).uniform(-4.0, 4.0, VOCAB_SIZE)
    logits[97:123] += 3.0
    return logits.astype(np.float32)


def draw(logits: FloatArray, sampling: SamplingBatch) -> SampleOutput:
    """Greedy or Gumbel, after penalties, bias and bans; top-k and the like are not modelled."""
    count, width = len(logits), max(1, sampling.max_logprobs)
    ids, ranks = np.zeros(count, np.int32), np.zeros(count, np.int32)
    values = np.zeros(count, np.float32)
    top_ids, top_values = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    for i in range(count):
        raw = logits[i].astype(np.float64)
        raw[sampling.vocab_limit :] = -np.inf
        scores = raw.copy()
        if sampling.masks is not None and sampling.masks.rows[i] >= 0 and not await_masks(sampling.masks):
            ids[i] = -1
            continue
        mask = mask_of(sampling, i)
        if mask is not None:
            scores[: sampling.vocab_limit][~mask] = -np.inf
        start, end = sampling.penalty_start[i : i + 2]
        seen, counts = sampling.penalty_ids[start:end], sampling.penalty_output_counts[start:end]
        repeated = scores[seen]
        scores[seen] = np.where(
            repeated > 0, repeated / sampling.repetition_penalty[i], repeated * sampling.repetition_penalty[i]
        )
        scores[seen] -= sampling.presence_penalty[i] * (counts > 0) + sampling.frequency_penalty[i] * counts
        start, end = sampling.bias_start[i : i + 2]
        scores[sampling.bias_ids[start:end]] += sampling.bias_values[start:end]
        start, end = sampling.banned_start[i : i + 2]
        scores[sampling.banned_ids[start:end]] = -np.inf
        if mask is not None and scores.max() == -np.inf:
            scores[np.flatnonzero(mask)[:1]] = 0.0
        if sampling.target[i] >= 0:
            ids[i] = sampling.target[i]
        elif sampling.temperature[i] == 0.0:
            ids[i] = np.argmax(scores)
        else:
            key = [int(sampling.seed[i]), int(sampling.counter[i])]
            noise = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64))).gumbel(size=VOCAB_SIZE)
            ids[i] = np.argmax(scores / sampling.temperature[i] + noise)
        logprobs = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
        order = np.argsort(-logprobs, kind="stable")
        values[i], ranks[i] = logprobs[ids[i]], int(np.flatnonzero(order == ids[i])[0]) + 1
        top_ids[i], top_values[i] = order[:width], logprobs[order[:width]]
    return SampleOutput(ids, values, ranks, top_ids, top_values)


def toy_engine(
    num_blocks: int = 257,
    *,
    block_size: int = 4,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 128,
    max_model_len: int = 256,
    enable_prefix_caching: bool = True,
    clock: Callable[[], float] = lambda: 0.0,
    revision: str = "",
    make_space: Callable[[ToyRunner], KVSpace] | None = None,
    memory_wait_s: float = 10.0,
    max_draft_tokens: int = 0,
    make_runner: Callable[[RunnerOptions, str], ToyRunner] | None = None,
) -> tuple[ModelEngine, ToyRunner, Scheduler]:
    """An engine over a toy model, and its parts. `make_space`: its KV cache grows there; else it is all there."""
    options = RunnerOptions(block_size, num_blocks, max_num_batched_tokens, max_num_seqs, max_model_len)
    runner = (make_runner or ToyRunner)(options, revision)
    space = None if make_space is None else make_space(runner)
    kv = KVManager(
        num_blocks,
        block_size,
        model_revision=f"toy{revision}",
        enable_prefix_caching=enable_prefix_caching,
        growth=space,
    )
    limits = SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        (EOS,),
        vocab_size=VOCAB_SIZE,
        max_draft_tokens=max_draft_tokens,
    )
    scheduler = Scheduler(limits, kv)
    tokens = TokenTable(ToyTokenizer())
    engine = ModelEngine(scheduler, runner, options, tokens, NUM_TOKENS, clock, space, memory_wait_s)
    return engine, runner, scheduler
