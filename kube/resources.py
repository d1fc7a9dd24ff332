"""The API resource of each kind: group, version, plural. One constant per kind that we use."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "busbar.dev"
VERSION = "v1alpha1"


@dataclass(frozen=True)
class Resource:
    """A resource of the API, with the data for its paths."""

    group: str  # empty for the core group
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """The URL path; ``namespace`` None on a namespaced resource means all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if self.namespaced and namespace is not None:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        if name is not None:
            if self.namespaced and namespace is None:
                raise ValueError(f"{self.kind} {name}: a namespace is needed to name a namespaced object")
            parts.append(name)
            if subresource is not None:
                parts.append(subresource)
        return "/".join(parts)


TRAINING_JOBS = Resource(GROUP, VERSION, "trainingjobs", "TrainingJob")
MODEL_SERVICES = Resource(GROUP, VERSION, "modelservices", "ModelService")
ACCELERATOR_POOLS = Resource(GROUP, VERSION, "acceleratorpools", "AcceleratorPool", namespaced=False)
TENANTS = Resource(GROUP, VERSION, "tenants", "Tenant", namespaced=False)
PERFORMANCE_PROFILES = Resource(GROUP, VERSION, "performanceprofiles", "PerformanceProfile", namespaced=False)
POWER_DOMAINS = Resource(GROUP, VERSION, "powerdomains", "PowerDomain", namespaced=False)

PODS = Resource("", "v1", "pods", "Pod")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
EVENTS = Resource("", "v1", "events", "Event")
PERSISTENT_VOLUME_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
JOBS = Resource("batch", "v1", "jobs", "Job")
RESOURCE_QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
SUBJECT_ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
