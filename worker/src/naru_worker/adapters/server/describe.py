"""What the worker tells about itself, as messages and records. Reads only."""

from __future__ import annotations

import asyncio

from naru_proto.registry import ResidentRecord
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.host import ModelHost
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.resident import Progress, Resident
from naru_worker.adapters.server.identity import WorkerIdentity
from naru_worker.adapters.server.wire import fill_error
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.residency import ModelState

STATES = {
    ModelState.COLD: worker_pb2.MODEL_STATE_COLD,
    ModelState.FETCHING: worker_pb2.MODEL_STATE_FETCHING,
    ModelState.LOADING: worker_pb2.MODEL_STATE_LOADING,
    ModelState.READY: worker_pb2.MODEL_STATE_READY,
    ModelState.DRAINING: worker_pb2.MODEL_STATE_DRAINING,
    ModelState.FAILED: worker_pb2.MODEL_STATE_FAILED,
}
KV_STATS_TIMEOUT_S = 1.0
"""A step may be long; who asks for numbers gets those of the last step rather than wait for ever."""


def progress_message(progress: Progress) -> worker_pb2.LoadProgress:
    """One report of a load."""
    message = worker_pb2.LoadProgress(
        state=STATES[progress.state],
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        detail=progress.detail,
    )
    if progress.error is not None:
        fill_error(message.error, progress.error)
    return message


def describe_message(identity: WorkerIdentity, host: ModelHost) -> worker_pb2.DescribeReply:
    """The worker and its models."""
    return worker_pb2.DescribeReply(
        worker_id=identity.worker_id,
        epoch=identity.epoch(host.epoch),
        backend=identity.backend,
        isa=identity.isa,
        num_threads=identity.num_threads,
        models=[_model_message(resident) for resident in host.residents()],
        draining=host.is_draining,
    )


def resident_record(resident: Resident) -> ResidentRecord:
    """One model as the route map shows it."""
    progress, model = resident.progress, resident.model
    return ResidentRecord(
        state=progress.state.value,
        generation=resident.desired.generation,
        info_digest="" if model is None else model.facts.info.digest(),
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        error="" if progress.error is None else progress.error.message,
    )


def load_message(host: ModelHost) -> worker_pb2.Load:
    """Running, waiting and KV use over all models; use is that of the fullest one."""
    usage = 0.0
    num_running = num_waiting = 0
    for stats in (model.engine.stats for model in host.models()):
        num_running += stats.num_running
        num_waiting += stats.num_waiting
        usage = max(usage, stats.kv_usage_ratio)
    return worker_pb2.Load(num_running=num_running, num_waiting=num_waiting, kv_usage=usage)


async def kv_stats(loop: EngineLoop, model: LoadedModel) -> KVStats | None:
    """Blocks and slots between two steps, or None when the engine is busy for too long."""
    aio = asyncio.get_running_loop()
    answer: asyncio.Future[KVStats] = aio.create_future()

    def settle(stats: KVStats) -> None:
        if not answer.done():
            answer.set_result(stats)

    loop.call(lambda: aio.call_soon_threadsafe(settle, model.engine.kv_stats()))
    try:
        async with asyncio.timeout(KV_STATS_TIMEOUT_S):
            return await answer
    except TimeoutError:
        return None


async def stats_message(loop: EngineLoop, model: LoadedModel) -> worker_pb2.ModelStats:
    """Numbers of one model."""
    stats = model.engine.stats
    kv = await kv_stats(loop, model)
    return worker_pb2.ModelStats(
        model=model.name,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks if kv is None else kv.num_free_blocks,
        num_cached_blocks=0 if kv is None else kv.num_cached_blocks,
        num_preemptions=stats.num_preemptions,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        kv_waste_ratio=0.0 if kv is None else kv.waste_ratio,
        num_steps=stats.num_steps,
        generated_tokens=stats.generated_tokens,
        prefilled_tokens=stats.prefilled_tokens,
    )


def _model_message(resident: Resident) -> worker_pb2.ModelInfo:
    spec = resident.loaded_spec or resident.desired.spec
    message = worker_pb2.ModelInfo(
        model=resident.name,
        state=STATES[resident.state],
        uri=spec.uri if spec else "",
        revision=spec.revision if spec else "",
        generation=resident.desired.generation,
    )
    if resident.progress.error is not None:
        fill_error(message.error, resident.progress.error)
    if resident.model is not None:
        facts = resident.model.facts
        message.revision = facts.revision
        message.architecture = facts.info.architecture
        message.max_model_len = facts.info.max_model_len
        message.vocab_size = facts.info.vocab_size
        message.weight_bytes = facts.weight_bytes
        message.kv_bytes = facts.kv_bytes
        message.kv_bytes_per_token = facts.kv_bytes_per_token
        message.chat_template = facts.info.chat_template
        message.bos_token = facts.info.bos_token
        message.eos_token = facts.info.eos_token
        message.block_size = facts.block_size
        message.num_blocks = facts.num_blocks
    return message
