"""The route map's records: what stands in Redis, as dataclasses and JSON. No pydantic, so that workers start fast.

Readers ignore fields they do not know, so that parts of different versions can share a board.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from naru_proto.errors import InternalError

INFO_DIGEST_BYTES = 16
"""Of ModelInfoRecord.digest."""

_R = TypeVar("_R", bound="_Record")


@dataclass(frozen=True, slots=True)
class _Record:
    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls: type[_R], text: str | bytes) -> _R:
        """Reads a record.

        Raises:
            InternalError: not such a record.
        """
        try:
            return cls._from_dict(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise InternalError(f"the route map holds {text[:80]!r}, not a {cls.__name__}: {exc}") from exc

    @classmethod
    def _from_dict(cls: type[_R], data: dict[str, Any]) -> _R:
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})


def _listed(value: Any) -> list[Any]:
    """A JSON array: a text, too, could be gone through piece by piece.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is no list")
    return value


@dataclass(frozen=True, slots=True)
class ModelRecord(_Record):
    """A model that may be asked for. Written by the control plane from a ModelDeployment."""

    name: str
    uri: str
    generation: int
    revision: str = ""
    aliases: tuple[str, ...] = ()
    min_replicas: int = 1
    created_s: int = 0
    """Unix seconds, for /v1/models."""
    on_demand: bool = False
    """Its workers know it and load it for the first request."""
    pools: tuple[str, ...] = ()
    """Pools whose workers may know it; empty: any."""
    target: str = ""
    """Name of the record that serves requests for this one; moved at once when a rollout is done. Empty: itself."""
    is_revision: bool = False
    """Reached through another record's `target` alone: no client may ask for it, no listing shows it."""
    desired_digest: str = ""
    """Of what `generation` stands for, so that a control plane that starts anew need not count one further."""
    max_wait_s: float = 0.0
    """Longest wait of a request while no copy is ready; 0: the router's own."""
    max_depth: int = 0
    """Most requests that wait; 0: the router's own."""
    max_replicas: int = 0
    """Most copies; 0: as many as there are workers."""
    policy: str = "preferred"
    """pinned, preferred or on_demand."""
    priority: int = 100
    """Weight in the choice of victims, in [1, 1000]."""
    target_in_flight: int = 16
    """Requests in flight that one copy should carry."""
    target_queue_s: float = 1.0
    """Longest wait for a first step that is not yet a shortage."""
    scale_window_s: float = 30.0
    scale_down_delay_s: float = 300.0
    num_accelerators: int = 1
    """That one copy is cut over."""
    spread_key: str = ""
    """Key of WorkerRecord.domains that copies are spread over; empty: by node."""
    strategy: str = "prefix_affinity"
    """prefix_affinity, least_loaded or round_robin."""
    load_factor: float = 0.0
    """See the router's setting; 0: that one."""
    max_retries: int = 1
    """Tries on other workers before the first byte."""
    allow: tuple[str, ...] = ()
    """Tenants that may use it; empty: all."""
    cache_isolation: str = "isolated"
    """isolated, after_system or shared."""
    fallbacks: tuple[str, ...] = ()
    """Names of entries that answer where no copy can be had, in this order."""
    split: tuple[tuple[str, int], ...] = ()
    """Names of entries that share its requests, with their weights; empty: itself alone."""

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> ModelRecord:
        known = {f.name for f in dataclasses.fields(cls)}
        data = {k: v for k, v in data.items() if k in known}
        for name in ("aliases", "pools", "allow", "fallbacks"):
            data[name] = tuple(_listed(data.get(name, [])))
        data["split"] = tuple((name, weight) for name, weight in map(_listed, _listed(data.get("split", []))))
        return cls(**data)


@dataclass(frozen=True, slots=True)
class TensorRecord(_Record):
    """An input or output of a model of tensors."""

    name: str
    datatype: str
    """In the words of the Open Inference Protocol."""
    shape: tuple[int, ...]
    """-1: any size."""

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> TensorRecord:
        return cls(str(data["name"]), str(data["datatype"]), tuple(int(size) for size in _listed(data["shape"])))


@dataclass(frozen=True, slots=True)
class ModelInfoRecord(_Record):
    """Facts a router needs of a loaded model, read from its files by the worker."""

    architecture: str
    max_model_len: int
    vocab_size: int
    chat_template: str
    bos_token: str
    eos_token: str
    tasks: tuple[str, ...] = ("generate",)
    """What it can be asked for: generate, embed, score, tensors."""
    embedding_dim: int = 0
    """Numbers of one of its vectors; 0: it makes none."""
    platform: str = "naru"
    """What computes it: naru or onnxruntime."""
    inputs: tuple[TensorRecord, ...] = ()
    """Of a model of tensors, by name."""
    outputs: tuple[TensorRecord, ...] = ()
    max_batch_size: int = 0
    """Of a model of tensors: its shapes leave out a first dimension that may be so large; 0: it takes no batches."""

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> ModelInfoRecord:
        known = {f.name for f in dataclasses.fields(cls)}
        data = {k: v for k, v in data.items() if k in known}
        if "tasks" in data:
            data["tasks"] = tuple(str(task) for task in _listed(data["tasks"]))
        for name in ("inputs", "outputs"):
            data[name] = tuple(TensorRecord._from_dict(each) for each in _listed(data.get(name, [])))
        return cls(**data)

    def digest(self) -> str:
        """Hex identity of the content."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=INFO_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class ResidentRecord(_Record):
    """One model on one worker."""

    state: str
    """Lower-case ModelState: cold, fetching, host, loading, ready (active ones too), draining, failed."""
    generation: int = 0
    info_digest: str = ""
    """Key of the ModelInfoRecord; empty until loaded."""
    bytes_done: int = 0
    bytes_total: int = 0
    error: str = ""
    num_bytes: int = 0
    """Weights and KV in memory now."""
    epoch: int = 0
    """Grows whenever the model's caches on this worker become void: at each unload and clear."""
    eta_s: float = 0.0
    """Seconds left of the load under way; 0: unknown."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    num_in_flight: int = 0
    """Requests running or waiting in its engine."""
    since_s: int = 0
    """Unix seconds at which it reached its state; 0: unknown."""
    last_used_s: int = 0
    """Unix seconds of its last request, cut to whole minutes so that use alone is seldom news; 0: never."""


@dataclass(frozen=True, slots=True)
class WorkerRecord(_Record):
    """A worker's lease: who it is, where, and what it holds."""

    worker_id: str
    address: str
    """host:port of its gRPC server."""
    epoch: str
    models: dict[str, ResidentRecord]
    draining: bool = False
    pool: str = "default"
    num_running: int = 0
    num_waiting: int = 0
    num_known: int = 0
    """Models it knows and does not hold: a request brings them up. They are not in `models`."""
    budget_bytes: int = 0
    used_bytes: int = 0
    leaving: bool = False
    """It was asked to end and still serves: its models are wanted elsewhere, and requests go there first."""
    node: str = ""
    """The machine it runs on; empty: not told."""
    domains: dict[str, str] = field(default_factory=dict)
    """Failure domains it stands in: key of a node label to its value."""
    num_accelerators: int = 1
    host_budget_bytes: int = 0
    host_used_bytes: int = 0
    known_version: int = 0
    """Grows whenever its entry of key_known has changed."""

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> WorkerRecord:
        known = {f.name for f in dataclasses.fields(cls)}
        data = {k: v for k, v in data.items() if k in known}
        data["models"] = {name: ResidentRecord._from_dict(r) for name, r in data["models"].items()}
        return cls(**data)


@dataclass(frozen=True, slots=True)
class KnownRecord(_Record):
    """A model that a worker does not hold, and has something of."""

    tier: str
    """host: packed, in its memory; disk: its files or packed image are there."""
    num_bytes: int = 0
    """Of the weights; 0: not known."""


@dataclass(frozen=True, slots=True)
class FootprintRecord(_Record):
    """What a copy takes, as measured at a load."""

    weight_bytes: int
    kv_min_bytes: int
    """KV it starts with and keeps."""
    private_bytes: int = 0
    """What comes with it beside weights and KV."""
    load_s: float = 0.0
    """What a load from the nearest tier took, the last one."""
    fetch_s: float = 0.0
    """What a load took that had to fetch files; 0: not seen."""


@dataclass(frozen=True, slots=True)
class LeaseRecord(_Record):
    """Who may act, until the key expires."""

    holder: str
    """Router id."""
    token: int
    """Fencing token: the one that a later holder gets is larger."""
    worker_id: str = ""
    """Of a load: where the model comes up."""


@dataclass(frozen=True, slots=True)
class RouterRecord(_Record):
    """A router process's lease."""

    router_id: str
    address: str
    """host:port of its HTTP server, as others reach it; empty: not told."""
    since_s: int = 0
    """Unix seconds of its start."""
