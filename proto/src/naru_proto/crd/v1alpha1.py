"""The custom resources of serving.naru.dev/v1alpha1."""

from __future__ import annotations

from naru_proto.crd.manifests import InvalidManifest, Manifest, Problem, load_manifests
from naru_proto.crd.model_deployment import ModelDeployment, ModelDeploymentSpec
from naru_proto.crd.model_status import ModelDeploymentStatus
from naru_proto.crd.worker_pool import WorkerPool, WorkerPoolSpec, WorkerPoolStatus

__all__ = [
    "InvalidManifest",
    "Manifest",
    "ModelDeployment",
    "ModelDeploymentSpec",
    "ModelDeploymentStatus",
    "Problem",
    "WorkerPool",
    "WorkerPoolSpec",
    "WorkerPoolStatus",
    "load_manifests",
]
