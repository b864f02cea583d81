"""What the worker tells about itself, as messages and records. Reads only."""

from __future__ import annotations

import asyncio

from naru_proto.registry import ResidentRecord, WorkerRecord
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.resident import Progress, Resident
from naru_worker.adapters.server.identity import WorkerIdentity
from naru_worker.adapters.server.wire import fill_error
from naru_worker.core.hub.model import Residency, Tier
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.residency import ModelState

STATES = {
    ModelState.COLD: worker_pb2.MODEL_STATE_COLD,
    ModelState.FETCHING: worker_pb2.MODEL_STATE_FETCHING,
    ModelState.HOST: worker_pb2.MODEL_STATE_HOST,
    ModelState.LOADING: worker_pb2.MODEL_STATE_LOADING,
    ModelState.READY: worker_pb2.MODEL_STATE_READY,
    ModelState.ACTIVE: worker_pb2.MODEL_STATE_ACTIVE,
    ModelState.DRAINING: worker_pb2.MODEL_STATE_DRAINING,
    ModelState.FAILED: worker_pb2.MODEL_STATE_FAILED,
}
TIERS = {
    Tier.COLD: worker_pb2.TIER_COLD,
    Tier.HOST: worker_pb2.TIER_HOST,
    Tier.ACTIVE: worker_pb2.TIER_ACTIVE,
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
        eta_s=progress.eta_s,
    )
    if progress.error is not None:
        fill_error(message.error, progress.error)
    return message


def describe_message(
    identity: WorkerIdentity, hub: ModelHub, *, is_known_wanted: bool = False
) -> worker_pb2.DescribeReply:
    """The worker and the models it holds; those it only knows are named where ``is_known_wanted``."""
    known = hub.core.entries() if is_known_wanted else ()
    return worker_pb2.DescribeReply(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        backend=identity.backend,
        isa=identity.isa,
        num_threads=identity.num_threads,
        models=[_model_message(hub, resident) for resident in hub.residents()],
        draining=hub.is_draining,
        known=[
            worker_pb2.KnownModel(model=entry.name, generation=entry.generation, tier=TIERS[entry.tier])
            for entry in known
        ],
    )


def resident_record(hub: ModelHub, resident: Resident, unix_offset_s: float) -> ResidentRecord:
    """One model as the route map shows it. `unix_offset_s`: from the hub's clock to Unix time, always the same."""
    progress, model, entry = hub.progress(resident), resident.model, resident.entry
    # A model that serves is ready whether requests run or not.
    since_s = entry.ready_since_s if entry.state.is_serving else entry.state_since_s
    used_s = hub.now_s() if entry.num_in_flight else entry.last_used_s
    # The hub also counts the moment at which a model came up as a use of it.
    was_used = bool(entry.num_in_flight) or entry.last_used_s > entry.ready_since_s > 0
    # The route map counts bytes of all accelerators together.
    count = 1 if entry.footprint is None else entry.footprint.num_accelerators
    weight_bytes = 0 if model is None else model.facts.weight_bytes * count
    kv_bytes = 0 if model is None else entry.kv_bytes * count
    return ResidentRecord(
        state=progress.state.value,
        generation=entry.generation,
        info_digest="" if model is None else model.facts.info_digest,
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        error="" if progress.error is None else progress.error.message,
        num_bytes=weight_bytes + kv_bytes,
        eta_s=round(progress.eta_s, 1),
        epoch=resident.epoch,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        num_in_flight=entry.num_in_flight,
        since_s=int(unix_offset_s + since_s),
        last_used_s=int(unix_offset_s + used_s) // 60 * 60 if was_used else 0,
    )


def worker_record(identity: WorkerIdentity, hub: ModelHub, address: str, unix_offset_s: float) -> WorkerRecord:
    """The worker as the route map shows it; `address` is where routers reach it."""
    load = load_message(hub)
    ledger, memory = hub.operations.bookings.ledger, hub.core.memory
    residents, count = hub.residents(), identity.num_accelerators
    return WorkerRecord(
        worker_id=identity.worker_id,
        address=address,
        epoch=identity.epoch,
        models={r.name: resident_record(hub, r, unix_offset_s) for r in residents},
        draining=hub.is_draining,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_known=hub.num_known() - len(residents),
        budget_bytes=ledger.budget_bytes * count,
        used_bytes=(ledger.budget_bytes - ledger.free_bytes()) * count - _bytes_elsewhere(hub, count),
        num_accelerators=count,
        host_budget_bytes=memory.host_budget_bytes,
        host_used_bytes=memory.host_bytes,
    )


def _bytes_elsewhere(hub: ModelHub, num_accelerators: int) -> int:
    """Bytes that the first accelerator has and others have not, as they have no part of a model; of all of them."""
    if num_accelerators == 1:
        return 0
    books, total = hub.operations.bookings, 0
    for resident in hub.residents():
        footprint = resident.entry.footprint
        if footprint is not None:
            total += books.held_bytes(resident.name) * (num_accelerators - footprint.num_accelerators)
    return total


def load_message(hub: ModelHub) -> worker_pb2.Load:
    """Running, waiting and KV use over all models; use is that of the fullest one."""
    usage = 0.0
    num_running = num_waiting = 0
    for stats in (model.engine.stats for model in hub.models()):
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
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
    )


def memory_message(hub: ModelHub, high_watermark: float, low_watermark: float) -> worker_pb2.MemoryStats:
    """Where the bytes of the budget are."""
    books, view = hub.operations.bookings, hub.core.memory
    ledger = books.ledger.view()
    kv_bytes = sum(ledger.kv.values())
    told_bytes = kv_bytes + books.weight_bytes + books.workspace_bytes + books.unreturned_bytes
    images = hub.operations.image_usage()
    return worker_pb2.MemoryStats(
        budget_bytes=ledger.budget_bytes,
        weight_bytes=books.weight_bytes,
        kv_bytes=kv_bytes,
        workspace_bytes=books.workspace_bytes,
        private_bytes=ledger.used_bytes - told_bytes,
        reserved_bytes=view.reserved_bytes,
        unreturned_bytes=books.unreturned_bytes,
        host_budget_bytes=view.host_budget_bytes,
        host_bytes=view.host_bytes,
        image_budget_bytes=images.budget_bytes,
        image_bytes=images.used_bytes,
        high_watermark=high_watermark,
        low_watermark=low_watermark,
        num_loads=hub.num_loads,
        num_evictions=hub.num_evictions,
        num_failed_loads=hub.num_failed_loads,
        num_known_models=hub.num_known(),
    )


def _model_message(hub: ModelHub, resident: Resident) -> worker_pb2.ModelInfo:
    spec, entry, now_s = resident.loaded_spec or resident.spec, resident.entry, hub.now_s()
    progress = hub.progress(resident)
    message = worker_pb2.ModelInfo(
        model=resident.name,
        state=STATES[resident.state],
        uri=spec.uri if spec else "",
        revision=spec.revision if spec else "",
        generation=entry.generation,
        wanted_tier=TIERS[entry.tier],
        residency=_residency_message(entry.residency),
        kv_committed_bytes=entry.kv_bytes,
        num_in_flight=entry.num_in_flight,
        num_held=entry.num_held,
        load_s=entry.load_s,
        eta_s=progress.eta_s,
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        last_eviction=entry.last_eviction,
        epoch=resident.epoch,
    )
    if entry.last_eviction:
        message.last_eviction_s = max(0.0, now_s - entry.last_eviction_s)
    if progress.error is not None:
        fill_error(message.error, progress.error)
        message.retry_s = max(0.0, entry.retry_at_s - now_s)
    if entry.footprint is not None:
        message.weight_bytes = entry.footprint.weight_bytes
        message.workspace_bytes = entry.footprint.workspace_bytes
    if resident.model is not None:
        message.idle_s = (
            max(0.0, now_s - max(entry.last_used_s, entry.ready_since_s)) if not entry.num_in_flight else 0.0
        )
        message.resident_s = max(0.0, now_s - entry.ready_since_s)
        _fill_facts(message, resident.model)
    return message


def _fill_facts(message: worker_pb2.ModelInfo, model: LoadedModel) -> None:
    facts = model.facts
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
    message.tasks.extend(facts.info.tasks)


def _residency_message(residency: Residency) -> worker_pb2.Residency:
    return worker_pb2.Residency(
        pinned=residency.pinned,
        priority=residency.priority,
        min_residency_s=residency.min_residency_s,
        idle_ttl_s=residency.idle_ttl_s,
        keep_last_copy=residency.keep_last_copy,
    )
