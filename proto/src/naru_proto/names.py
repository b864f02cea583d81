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
FINALIZER = f"{API_GROUP}/cleanup"

PORT_ROUTER_HTTP = 8080
PORT_ROUTER_GRPC = 8081
PORT_WORKER_GRPC = 9090
PORT_WORKER_METRICS = 9091

HEADER_REQUEST_ID = "x-request-id"

WORKER_LEASE_TTL_S = 3.0
"""A worker that has not renewed for this long is gone. Renewed three times as often."""

_PREFIX = "naru:v1:"

KEY_MODELS = f"{_PREFIX}models"
"""Hash: model name → ModelRecord as JSON. Written by the operator (or `naru up`) alone."""
KEY_WORKERS = f"{_PREFIX}workers"
"""Set of worker ids that ever held a lease; readers drop the ones whose lease is gone."""
CHANNEL_CHANGES = f"{_PREFIX}changes"
"""Pub/sub: 'models' or 'worker:<id>' whenever an entry changed; a hint to read again, never the truth itself."""


def key_worker(worker_id: str) -> str:
    """The lease of a worker: WorkerRecord as JSON, expiring after WORKER_LEASE_TTL_S. Written by the worker alone."""
    return f"{_PREFIX}worker:{worker_id}"


def key_model_info(digest: str) -> str:
    """Content-addressed facts of a loaded model (ModelInfoRecord as JSON): any worker may write the same bytes."""
    return f"{_PREFIX}model-info:{digest}"


KEY_EVENTS = f"{_PREFIX}events"
"""Stream of what happened to models on workers, newest last, cut at about MAX_EVENTS. Fields: worker, epoch, model,
from, to (lower-case ModelState; ready also stands for active), reason, at_ms (Unix)."""
MAX_EVENTS = 10_000
METADATA_ERROR_CODE = "naru-error-code"
"""Trailing metadata of a worker's refusal: `code` of the error, finer than the status."""
METADATA_GENERATION = "naru-generation"
"""Trailing metadata of a stale command's refusal: the newest generation seen."""
