"""Puts one model's engine together: scheduler, KV space, runner, tokenizer. The one place that knows all parts.

Called by loading threads; the engine thread owns the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from naru_proto.registry import ModelInfoRecord
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.grammar_compiler import GrammarCompiler, GrammarRoom
from naru_worker.adapters.engine.loaded import LoadedModel, ModelFacts, PoolingFacts
from naru_worker.adapters.engine.sizing import ModelSize
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.memory.kv_space import make_kv_space
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.adapters.ops.protocol import Runner
from naru_worker.adapters.tokenizer.cache import TokenizerCache
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.request_limits import RequestLimits
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.settings import EngineSettings, MemorySettings

if TYPE_CHECKING:
    from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool
    from naru_worker.adapters.ops.tensor_parallel.rank_group import RankGroup

MAX_TOKEN_BYTES = 1024
"""Longer than any entry of the vocabularies in use (the longest are runs of blanks)."""


KEPT_TOKENIZER_BYTES = 64 << 20
"""Tokenizers kept beyond their last use: part of the worker's own memory, not of the models' budget."""


ASIDE_S = 0.01
"""About a step: pieces of a load are shorter, so that the gap between two tokens grows by one of them at most."""


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """What all models of a worker share."""

    engine: EngineSettings
    memory: MemorySettings
    num_threads: int
    ledger: MemoryLedger
    is_busy: Callable[[], bool] = lambda: False
    """Whether some model has work: loads stand aside between their steps."""
    tokenizers: TokenizerCache = field(default_factory=lambda: TokenizerCache(KEPT_TOKENIZER_BYTES))
    grammars: GrammarRoom = field(default_factory=GrammarRoom)
    ranks: RankGroup | None = None
    """Processes that models are cut over; None: there is one accelerator."""
    sleep_slots: PinnedPool | None = None
    """Where weights wait that leave a GPU; None: they do not, and are read from their files again."""

    def stand_aside(self, stop: threading.Event) -> None:
        """Lets models that have work take their steps undisturbed for a moment, between two pieces of a load.

        On few cores a load's thread takes one from the step under way, which then waits for it at every layer.
        """
        if self.is_busy():
            stop.wait(ASIDE_S)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """One model's own."""

    name: str
    config: ModelConfig
    chat_template: str
    weights_revision: str
    """Names the exact weights."""
    revision: str
    """What was fetched and what it holds, for people."""
    tokenizer: ModelTokenizer
    vocab_limit: int
    """Ids at or above it are never drawn."""
    size: ModelSize


def build_engine(room: EngineRoom, parts: ModelParts, runner: Runner) -> LoadedModel:
    """A model that can be handed to the engine loop. Releasing it closes the runner, unless its maker sees to that."""
    size, options = parts.size, parts.size.runner_options
    space = make_kv_space(parts.name, room.ledger, runner, size.kv_block_bytes, options.num_blocks, size.floor_blocks)
    kv = KVManager(
        options.num_blocks,
        options.block_size,
        model_revision=parts.weights_revision,
        enable_prefix_caching=size.enable_prefix_caching,
        growth=space,
    )
    config = parts.config
    eos_ids = {
        *config.eos_token_ids,
        *(() if parts.tokenizer.eos_token_id is None else (parts.tokenizer.eos_token_id,)),
    }
    limits = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_tokens,
        max_model_len=options.max_model_len,
        eos_token_ids=tuple(sorted(eos_ids)),
        vocab_size=config.vocab_size,
        max_draft_tokens=size.max_draft_tokens,
        target_itl_s=room.engine.target_itl_s,
    )
    tokens = TokenTable(parts.tokenizer)
    engine = ModelEngine(
        Scheduler(limits, kv), runner, options, tokens, parts.vocab_limit, kv_space=space, masks=room.grammars.masks
    )
    return LoadedModel(
        name=parts.name,
        engine=engine,
        tokenizer=parts.tokenizer,
        tokens=tokens,
        limits=RequestLimits(options.max_model_len, parts.vocab_limit, MAX_TOKEN_BYTES),
        facts=_facts(parts, runner),
        release=runner.close,
        pooling=PoolingFacts(
            kind="embed", max_tokens=options.max_model_len, normalize=True, dimension=config.hidden_size
        ),
        grammars=GrammarCompiler(room.grammars, parts.tokenizer, parts.vocab_limit, limits.eos_token_ids),
        device_stats=getattr(runner, "device_stats", None),
    )


def _facts(parts: ModelParts, runner: Runner) -> ModelFacts:
    options = parts.size.runner_options
    return ModelFacts(
        info=ModelInfoRecord(
            architecture=parts.config.architecture,
            max_model_len=options.max_model_len,
            vocab_size=parts.config.vocab_size,
            chat_template=parts.chat_template,
            bos_token=parts.tokenizer.bos_token,
            eos_token=parts.tokenizer.eos_token,
            tasks=("generate", "embed"),
            embedding_dim=parts.config.hidden_size,
        ),
        revision=parts.revision,
        weight_bytes=runner.weight_bytes,
        kv_bytes=runner.kv_bytes,
        kv_bytes_per_token=parts.size.kv_block_bytes // options.block_size,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
    )
