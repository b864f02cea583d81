from naru_proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_KIND_UNSPECIFIED: _ClassVar[PoolingKind]
    POOLING_KIND_EMBED: _ClassVar[PoolingKind]
    POOLING_KIND_SCORE: _ClassVar[PoolingKind]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_COLD: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_ACTIVE: _ClassVar[Tier]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_COLD: _ClassVar[ModelState]
    MODEL_STATE_FETCHING: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_DRAINING: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
    MODEL_STATE_HOST: _ClassVar[ModelState]
    MODEL_STATE_ACTIVE: _ClassVar[ModelState]
POOLING_KIND_UNSPECIFIED: PoolingKind
POOLING_KIND_EMBED: PoolingKind
POOLING_KIND_SCORE: PoolingKind
TIER_UNSPECIFIED: Tier
TIER_COLD: Tier
TIER_HOST: Tier
TIER_ACTIVE: Tier
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_COLD: ModelState
MODEL_STATE_FETCHING: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_DRAINING: ModelState
MODEL_STATE_FAILED: ModelState
MODEL_STATE_HOST: ModelState
MODEL_STATE_ACTIVE: ModelState

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "add_special_tokens", "sampling", "priority", "cache_salt", "adapter", "skip_prefix_cache", "return_token_ids", "prior", "prior_revision", "route_keys", "shared_prefix_bytes", "tenant", "tenant_weight", "timeout_s", "show_special_tokens", "pooling", "tensors", "tokenize")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    PRIOR_REVISION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARED_PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    add_special_tokens: bool
    sampling: _inference_pb2.SamplingParams
    priority: int
    cache_salt: bytes
    adapter: str
    skip_prefix_cache: bool
    return_token_ids: bool
    prior: _containers.RepeatedCompositeFieldContainer[PriorOutput]
    prior_revision: str
    route_keys: bytes
    shared_prefix_bytes: int
    tenant: str
    tenant_weight: float
    timeout_s: float
    show_special_tokens: bool
    pooling: PoolingTask
    tensors: TensorTask
    tokenize: TokenizeTask
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., adapter: _Optional[str] = ..., skip_prefix_cache: _Optional[bool] = ..., return_token_ids: _Optional[bool] = ..., prior: _Optional[_Iterable[_Union[PriorOutput, _Mapping]]] = ..., prior_revision: _Optional[str] = ..., route_keys: _Optional[bytes] = ..., shared_prefix_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ..., timeout_s: _Optional[float] = ..., show_special_tokens: _Optional[bool] = ..., pooling: _Optional[_Union[PoolingTask, _Mapping]] = ..., tensors: _Optional[_Union[TensorTask, _Mapping]] = ..., tokenize: _Optional[_Union[TokenizeTask, _Mapping]] = ...) -> None: ...

class PoolingTask(_message.Message):
    __slots__ = ("inputs", "kind", "dimensions", "normalize", "truncate_tokens", "add_special_tokens")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    kind: PoolingKind
    dimensions: int
    normalize: bool
    truncate_tokens: int
    add_special_tokens: bool
    def __init__(self, inputs: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., kind: _Optional[_Union[PoolingKind, str]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., truncate_tokens: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class PoolingInput(_message.Message):
    __slots__ = ("text", "token_ids", "pair")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    pair: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., pair: _Optional[str] = ...) -> None: ...

class TensorTask(_message.Message):
    __slots__ = ("inputs", "outputs")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., outputs: _Optional[_Iterable[str]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "datatype", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    datatype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., datatype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TokenizeTask(_message.Message):
    __slots__ = ("text", "token_ids", "add_special_tokens", "with_texts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_TEXTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    add_special_tokens: bool
    with_texts: bool
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., with_texts: _Optional[bool] = ...) -> None: ...

class Tokenized(_message.Message):
    __slots__ = ("token_ids", "texts", "text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    text: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., text: _Optional[str] = ...) -> None: ...

class PooledVector(_message.Message):
    __slots__ = ("index", "values", "prompt_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    values: bytes
    prompt_tokens: int
    def __init__(self, index: _Optional[int] = ..., values: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PriorOutput(_message.Message):
    __slots__ = ("token_ids", "is_finished")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_finished: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., is_finished: _Optional[bool] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "index", "text", "num_tokens", "logprobs", "finish_reason", "stop_reason", "usage", "error", "token_ids", "prompt_logprobs", "request_done", "cached_tokens", "revision", "vectors", "tensors", "tokenized")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DONE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    text: str
    num_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PositionLogprobs]
    finish_reason: _inference_pb2.FinishReason
    stop_reason: str
    usage: _inference_pb2.Usage
    error: Error
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PositionLogprobs]
    request_done: bool
    cached_tokens: int
    revision: str
    vectors: _containers.RepeatedCompositeFieldContainer[PooledVector]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    tokenized: Tokenized
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.PositionLogprobs, _Mapping]]] = ..., request_done: _Optional[bool] = ..., cached_tokens: _Optional[int] = ..., revision: _Optional[str] = ..., vectors: _Optional[_Iterable[_Union[PooledVector, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., tokenized: _Optional[_Union[Tokenized, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "param", "retryable", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    retryable: bool
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("generate", "cancel")
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    generate: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    cancel: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generate: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ..., cancel: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("epoch", "deltas", "load", "route_keys")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ROUTE_KEYS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    load: Load
    route_keys: _containers.RepeatedCompositeFieldContainer[RouteKeyUpdate]
    def __init__(self, epoch: _Optional[str] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., route_keys: _Optional[_Iterable[_Union[RouteKeyUpdate, _Mapping]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_usage", "num_others", "models", "last_request_id")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_usage: float
    num_others: int
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    last_request_id: str
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., num_others: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ..., last_request_id: _Optional[str] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "num_running", "num_waiting", "num_others", "waiting_tokens", "prefill_tokens_per_s", "decode_step_s", "kv_usage")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_running: int
    num_waiting: int
    num_others: int
    waiting_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    kv_usage: float
    def __init__(self, model: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_others: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., kv_usage: _Optional[float] = ...) -> None: ...

class RouteKeyUpdate(_message.Message):
    __slots__ = ("model", "epoch", "is_snapshot", "added", "removed", "number")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    is_snapshot: bool
    added: bytes
    removed: bytes
    number: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("num_cancelled",)
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    num_cancelled: int
    def __init__(self, num_cancelled: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("model", "uri", "revision", "generation", "options", "tier", "fencing_token", "residency", "load_timeout_s", "for_request", "credentials")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FOR_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    model: str
    uri: str
    revision: str
    generation: int
    options: EngineOptions
    tier: Tier
    fencing_token: int
    residency: Residency
    load_timeout_s: float
    for_request: bool
    credentials: str
    def __init__(self, model: _Optional[str] = ..., uri: _Optional[str] = ..., revision: _Optional[str] = ..., generation: _Optional[int] = ..., options: _Optional[_Union[EngineOptions, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., fencing_token: _Optional[int] = ..., residency: _Optional[_Union[Residency, _Mapping]] = ..., load_timeout_s: _Optional[float] = ..., for_request: _Optional[bool] = ..., credentials: _Optional[str] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("pinned", "priority", "min_residency_s", "idle_ttl_s", "keep_last_copy")
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MIN_RESIDENCY_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_COPY_FIELD_NUMBER: _ClassVar[int]
    pinned: bool
    priority: int
    min_residency_s: float
    idle_ttl_s: float
    keep_last_copy: bool
    def __init__(self, pinned: _Optional[bool] = ..., priority: _Optional[int] = ..., min_residency_s: _Optional[float] = ..., idle_ttl_s: _Optional[float] = ..., keep_last_copy: _Optional[bool] = ...) -> None: ...

class EngineOptions(_message.Message):
    __slots__ = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes", "enable_prefix_caching", "kv_cache_min_bytes", "max_batch_size", "max_batch_delay_s", "speculation", "max_draft_tokens", "kv_cache_dtype", "tensor_parallel_size")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    enable_prefix_caching: bool
    kv_cache_min_bytes: int
    max_batch_size: int
    max_batch_delay_s: float
    speculation: str
    max_draft_tokens: int
    kv_cache_dtype: str
    tensor_parallel_size: int
    def __init__(self, max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., enable_prefix_caching: _Optional[bool] = ..., kv_cache_min_bytes: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., max_batch_delay_s: _Optional[float] = ..., speculation: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("state", "bytes_done", "bytes_total", "detail", "error", "eta_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    state: ModelState
    bytes_done: int
    bytes_total: int
    detail: str
    error: Error
    eta_s: float
    def __init__(self, state: _Optional[_Union[ModelState, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., detail: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., eta_s: _Optional[float] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("model", "generation", "drain_timeout_s", "tier", "fencing_token")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    generation: int
    drain_timeout_s: float
    tier: Tier
    fencing_token: int
    def __init__(self, model: _Optional[str] = ..., generation: _Optional[int] = ..., drain_timeout_s: _Optional[float] = ..., tier: _Optional[_Union[Tier, str]] = ..., fencing_token: _Optional[int] = ...) -> None: ...

class UnloadReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("model", "tier", "fencing_token", "only_if_idle", "drain_timeout_s", "for_request")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ONLY_IF_IDLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FOR_REQUEST_FIELD_NUMBER: _ClassVar[int]
    model: str
    tier: Tier
    fencing_token: int
    only_if_idle: bool
    drain_timeout_s: float
    for_request: bool
    def __init__(self, model: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., fencing_token: _Optional[int] = ..., only_if_idle: _Optional[bool] = ..., drain_timeout_s: _Optional[float] = ..., for_request: _Optional[bool] = ...) -> None: ...

class MoveReply(_message.Message):
    __slots__ = ("state", "eta_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    state: ModelState
    eta_s: float
    def __init__(self, state: _Optional[_Union[ModelState, str]] = ..., eta_s: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("worker_id", "epoch", "backend", "isa", "num_threads", "models", "draining", "known")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    backend: str
    isa: str
    num_threads: int
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    draining: bool
    known: _containers.RepeatedCompositeFieldContainer[KnownModel]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., backend: _Optional[str] = ..., isa: _Optional[str] = ..., num_threads: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., draining: _Optional[bool] = ..., known: _Optional[_Iterable[_Union[KnownModel, _Mapping]]] = ...) -> None: ...

class KnownModel(_message.Message):
    __slots__ = ("model", "generation", "tier")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    model: str
    generation: int
    tier: Tier
    def __init__(self, model: _Optional[str] = ..., generation: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "state", "uri", "revision", "generation", "architecture", "max_model_len", "vocab_size", "weight_bytes", "kv_bytes", "kv_bytes_per_token", "chat_template", "bos_token", "eos_token", "error", "block_size", "num_blocks", "wanted_tier", "residency", "kv_committed_bytes", "workspace_bytes", "num_in_flight", "num_held", "idle_s", "resident_s", "load_s", "eta_s", "bytes_done", "bytes_total", "last_eviction", "last_eviction_s", "retry_s", "epoch", "tasks")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WANTED_TIER_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    KV_COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LAST_EVICTION_FIELD_NUMBER: _ClassVar[int]
    LAST_EVICTION_S_FIELD_NUMBER: _ClassVar[int]
    RETRY_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: ModelState
    uri: str
    revision: str
    generation: int
    architecture: str
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    chat_template: str
    bos_token: str
    eos_token: str
    error: Error
    block_size: int
    num_blocks: int
    wanted_tier: Tier
    residency: Residency
    kv_committed_bytes: int
    workspace_bytes: int
    num_in_flight: int
    num_held: int
    idle_s: float
    resident_s: float
    load_s: float
    eta_s: float
    bytes_done: int
    bytes_total: int
    last_eviction: str
    last_eviction_s: float
    retry_s: float
    epoch: int
    tasks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., uri: _Optional[str] = ..., revision: _Optional[str] = ..., generation: _Optional[int] = ..., architecture: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., chat_template: _Optional[str] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., wanted_tier: _Optional[_Union[Tier, str]] = ..., residency: _Optional[_Union[Residency, _Mapping]] = ..., kv_committed_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., num_held: _Optional[int] = ..., idle_s: _Optional[float] = ..., resident_s: _Optional[float] = ..., load_s: _Optional[float] = ..., eta_s: _Optional[float] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., last_eviction: _Optional[str] = ..., last_eviction_s: _Optional[float] = ..., retry_s: _Optional[float] = ..., epoch: _Optional[int] = ..., tasks: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("state", "reasons")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    state: ModelState
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[_Union[ModelState, str]] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("models", "rss_bytes", "memory")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStats]
    rss_bytes: int
    memory: MemoryStats
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStats, _Mapping]]] = ..., rss_bytes: _Optional[int] = ..., memory: _Optional[_Union[MemoryStats, _Mapping]] = ...) -> None: ...

class MemoryStats(_message.Message):
    __slots__ = ("budget_bytes", "weight_bytes", "kv_bytes", "workspace_bytes", "reserved_bytes", "unreturned_bytes", "host_budget_bytes", "host_bytes", "image_budget_bytes", "image_bytes", "high_watermark", "low_watermark", "num_loads", "num_evictions", "num_failed_loads", "num_known_models", "private_bytes")
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNRETURNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LOW_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_MODELS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    budget_bytes: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    reserved_bytes: int
    unreturned_bytes: int
    host_budget_bytes: int
    host_bytes: int
    image_budget_bytes: int
    image_bytes: int
    high_watermark: float
    low_watermark: float
    num_loads: int
    num_evictions: int
    num_failed_loads: int
    num_known_models: int
    private_bytes: int
    def __init__(self, budget_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., unreturned_bytes: _Optional[int] = ..., host_budget_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., image_budget_bytes: _Optional[int] = ..., image_bytes: _Optional[int] = ..., high_watermark: _Optional[float] = ..., low_watermark: _Optional[float] = ..., num_loads: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_failed_loads: _Optional[int] = ..., num_known_models: _Optional[int] = ..., private_bytes: _Optional[int] = ...) -> None: ...

class ModelStats(_message.Message):
    __slots__ = ("model", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_preemptions", "prefix_query_tokens", "prefix_hit_tokens", "kv_waste_ratio", "num_steps", "generated_tokens", "prefilled_tokens", "drafted_tokens", "accepted_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_WASTE_RATIO_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    kv_waste_ratio: float
    num_steps: int
    generated_tokens: int
    prefilled_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, model: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., kv_waste_ratio: _Optional[float] = ..., num_steps: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
