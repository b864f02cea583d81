"""The kinds of objects the operator meets: where the API server keeps them, and what is watched. Data alone."""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto import names


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind; without a namespace in its paths, one of the cluster's."""

    name: str
    """As in an object's `kind`."""
    group: str
    """Empty: the core group."""
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """As in an object's `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """As people write it: `pods`, `leases.coordination.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The URL's path; namespace None: of all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"/namespaces/{namespace}" if namespace else ""
        parts = (part for part in (self.plural, name, subresource) if part)
        return f"{root}{within}/{'/'.join(parts)}"


MODEL_DEPLOYMENT = Kind("ModelDeployment", names.API_GROUP, names.API_VERSION, "modeldeployments")
WORKER_POOL = Kind("WorkerPool", names.API_GROUP, names.API_VERSION, "workerpools")
POD = Kind("Pod", "", "v1", "pods")
PERSISTENT_VOLUME_CLAIM = Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
NODE = Kind("Node", "", "v1", "nodes")
CONTROLLER_REVISION = Kind("ControllerRevision", "apps", "v1", "controllerrevisions")
POD_DISRUPTION_BUDGET = Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")
EVENT = Kind("Event", "events.k8s.io", "v1", "events")

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        MODEL_DEPLOYMENT,
        WORKER_POOL,
        POD,
        PERSISTENT_VOLUME_CLAIM,
        CONTROLLER_REVISION,
        POD_DISRUPTION_BUDGET,
        LEASE,
        EVENT,
        NODE,
    )
}

_OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"

WATCHED: dict[Kind, str] = {
    MODEL_DEPLOYMENT: "",
    WORKER_POOL: "",
    POD: _OURS,
    CONTROLLER_REVISION: _OURS,
    PERSISTENT_VOLUME_CLAIM: _OURS,
}
"""What is kept in memory, with the label selector that narrows it; empty: all of them."""
