"""Names every part must agree on: API group, labels, ports, Redis keys. Keys used twice are built by one function."""

from __future__ import annotations

API_GROUP = "serving.naru.dev"
API_VERSION = "v1alpha1"

LABEL_POOL = f"{API_GROUP}/pool"
"""On worker pods: the WorkerPool they belong to."""
LABEL_MODEL = f"{API_GROUP}/model"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
ANNOTATION_MODEL_NAME = f"{API_GROUP}/model-name"
"""The full name where a label had to be cut."""
ANNOTATION_POOL_NAME = f"{API_GROUP}/pool-name"
"""On worker pods: the pool's full name, which LABEL_POOL holds cut when it is long."""
LABEL_SLOT = f"{API_GROUP}/slot"
"""On worker pods: the number in their name; a slot is taken again only when its pod is gone."""
LABEL_TEMPLATE_HASH = f"{API_GROUP}/template-hash"
"""On worker pods: of all that a change of makes the pod outdated."""
ANNOTATION_REVISION_DIGEST = f"{API_GROUP}/revision-digest"
"""On ControllerRevisions of a ModelDeployment: the digest of what a worker loads."""
MANAGED_BY = "naru-operator"
"""Value of LABEL_MANAGED_BY, and the field manager of everything the operator applies."""
HEALTH_READY = "ready"
"""Name to ask a worker's gRPC health for readiness; the empty one is liveness."""
LEASE_OPERATOR = "naru-operator"
"""coordination.k8s.io Lease that the acting operator holds, in the operator's namespace."""

CREDENTIALS_DIR = "/etc/naru/credentials"
"""In worker pods: one folder for each Secret of a pool's `credentialSecrets`, one file for each key."""
CLAIMS_DIR = "/models"
"""In worker pods: one folder for each claim of a pool's `claims`; where pvc://claim/path is read."""
CACHE_DIR = "/var/cache/naru"
"""In worker pods: fetched files and packed images."""

PORT_ROUTER_HTTP = 8080
PORT_ROUTER_GRPC = 8081
PORT_WORKER_GRPC = 9090
PORT_WORKER_METRICS = 9091
PORT_OPERATOR_HEALTH = 8082

HEADER_REQUEST_ID = "x-request-id"
HEADER_SESSION = "x-session-id"
"""Requests of one session stay together where their prompts do not say so."""
HEADER_EXPLAIN = "x-naru-explain"
"""Asks for HEADER_ROUTE in the reply: any value but empty, 0 or false."""
HEADER_ROUTE = "x-naru-route"
"""Where the request went, and why."""
HEADER_MODEL = "x-naru-model"
"""Of a reply: the ModelDeployment that answered, where it is another one than was asked for."""
HEADER_PRIORITY = "x-naru-priority"
"""Whole number, lower is sooner; 0 is normal. Wins over the body's `priority`."""
HEADER_TIMEOUT = "x-naru-timeout"
"""Seconds after which the answer is of no use."""
HEADER_KEEPALIVE = "x-naru-keepalive"
"""Seconds of silence, 1 to 60, after which a streamed reply gets a comment: while it waits for a model or a turn."""

WORKER_LEASE_TTL_S = 3.0
"""A worker that has not renewed for this long is gone. Renewed three times as often."""

_PREFIX = "naru:v1:"

KEY_MODELS = f"{_PREFIX}models"
"""Hash: model name → ModelRecord as JSON. Written by the operator (or `naru up`) alone."""
KEY_WORKERS = f"{_PREFIX}workers"
"""Set of worker ids that ever held a lease; readers drop the ones whose lease is gone."""
CHANNEL_CHANGES = f"{_PREFIX}changes"
"""Pub/sub: 'models' or 'worker:<id>' whenever an entry changed; a hint to read again, never the truth itself."""


def revision_name(model: str, digest: str) -> str:
    """The registry's name of one revision of a ModelDeployment: what workers load it under.

    '@' stands in no object's name, so none can be mistaken for a revision.
    """
    return f"{model}@{digest}"


def base_name(name: str) -> str:
    """The ModelDeployment's name of a registry entry; a name that is no revision's stays as it is."""
    return name.partition("@")[0]


def key_worker(worker_id: str) -> str:
    """The lease of a worker: WorkerRecord as JSON, expiring after WORKER_LEASE_TTL_S. Written by the worker alone."""
    return f"{_PREFIX}worker:{worker_id}"


def key_model_info(digest: str) -> str:
    """Content-addressed facts of a loaded model (ModelInfoRecord as JSON): any worker may write the same bytes."""
    return f"{_PREFIX}model-info:{digest}"


KEY_SEED = f"{_PREFIX}seed"
"""Random hex text, written once by whichever router comes first: hash rings are seeded with it, so that nobody outside
can tell which prompts meet on one worker."""
KEY_BOARD = f"{_PREFIX}board"
"""Random hex text, written by whichever router comes first and finds none: another one means that Redis lost what it
had, by a restart or by being emptied."""
KEY_FENCE = f"{_PREFIX}fence"
"""Counter of fencing tokens; each lease that is taken gets the next one."""
KEY_KEEPER = f"{_PREFIX}keeper"
"""The lease of the router that moves copies: LeaseRecord as JSON, expiring."""
KEY_ROUTERS = f"{_PREFIX}routers"
"""Set of router ids that ever held a lease; readers drop the ones whose lease is gone."""
KEY_FOOTPRINTS = f"{_PREFIX}footprints"
"""Hash: registry name of a model → FootprintRecord as JSON, as measured at its last load on any worker."""
KEY_NODES = f"{_PREFIX}nodes"
"""Hash: node → JSON object of those of its labels that copies are spread over. Written by the operator alone."""
ROUTER_LEASE_TTL_S = 3.0
BATCH_LEASE_TTL_S = 4.0
"""After so long another router goes on with the batch of one that died."""


def key_router(router_id: str) -> str:
    """The lease of a router process: RouterRecord as JSON, expiring after ROUTER_LEASE_TTL_S."""
    return f"{_PREFIX}router:{router_id}"


def key_load_lease(model: str) -> str:
    """Who has a cold model brought up, and where: LeaseRecord as JSON, expiring. Set by a router if it is not there."""
    return f"{_PREFIX}load:{model}"


def key_batch(batch_id: str) -> str:
    """Which router works on a batch: LeaseRecord as JSON, expiring after BATCH_LEASE_TTL_S."""
    return f"{_PREFIX}batch:{batch_id}"


def key_known(worker_id: str) -> str:
    """Hash: registry name of a model → KnownRecord as JSON, of what this worker has near without holding it."""
    return f"{_PREFIX}known:{worker_id}"


def key_quota(tenant: str, what: str) -> str:
    """What a tenant has used of a quota in its window; `what`: requests, tokens or in_flight."""
    return f"{_PREFIX}quota:{tenant}:{what}"


KEY_EVENTS = f"{_PREFIX}events"
"""Stream of what happened to models on workers, newest last, cut at about MAX_EVENTS. Fields: worker, epoch, model,
from, to (lower-case ModelState; ready also stands for active), reason, at_ms (Unix)."""
MAX_EVENTS = 10_000
METADATA_ERROR_CODE = "naru-error-code"
"""Trailing metadata of a worker's refusal: `code` of the error, finer than the status."""
METADATA_GENERATION = "naru-generation"
"""Trailing metadata of a stale command's refusal: the newest generation seen."""
