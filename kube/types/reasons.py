"""Condition types and reasons: stable words that scripts may match. They never change their meaning.

The scheduler's own codes for a waiting job (`busbar.scheduler`) are used as reasons too; these are the others.
"""

from enum import StrEnum


class ConditionType(StrEnum):
    """Types of the conditions in a status."""

    READY = "Ready"
    """kstatus: the object reached what its spec asks for."""
    ADMITTED = "Admitted"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    CAPACITY_HELD_ELSEWHERE = "CapacityHeldElsewhere"
    """Pods of no job use capacity of a pool."""


class Reason(StrEnum):
    """Why an object is in its phase."""

    WAITING = "Waiting"
    ADMITTED = "Admitted"
    STARTING = "Starting"
    RUNNING = "Running"
    PREEMPTED = "Preempted"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    RETRYING = "Retrying"
    RETRY_LIMIT_REACHED = "RetryLimitReached"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    GANG_INCOMPLETE = "GangIncomplete"
    PODS_REFUSED = "PodsRefused"
    """The API server refuses the pods, because of a quota, a policy or a webhook."""
    POD_STUCK = "PodStuck"
    """A pod is being deleted and its node does not confirm the end: the node is probably down."""
    INVALID_SPEC = "InvalidSpec"
    FITS_NOWHERE = "FitsNowhere"
    NO_TENANT = "NoTenant"
    TENANT_GONE = "TenantGone"
    """No Tenant has the namespace any more, so what ran there is stopped."""
    MODEL_NOT_READY = "ModelNotReady"
    CLAIM_MISSING = "ClaimMissing"
    SERVING = "Serving"
    IDLE = "Idle"
    DRAINING = "Draining"
    REPLICA_REPLACED = "ReplicaReplaced"
    """A replica that should serve has stopped accepting requests; another one replaces it."""
    NODES_READY = "NodesReady"
    NO_NODES = "NoNodes"
    OBSERVING = "Observing"
    """A feed is measured, and nothing limits it."""
    FOREIGN_PODS = "ForeignPods"
    NO_FOREIGN_PODS = "NoForeignPods"
    MEASURED = "Measured"
    NOT_MEASURED = "NotMeasured"
    CLASS_TAKEN = "ClassTaken"
    """Another PerformanceProfile describes the same workload class already."""
    SPEED_QUARANTINED = "SpeedQuarantined"
    """The speed that the job reports is rejected."""
    NAMESPACES_READY = "NamespacesReady"
    NAMESPACE_TAKEN = "NamespaceTaken"
    NAMESPACE_MISSING = "NamespaceMissing"
    NAMESPACE_RELEASED = "NamespaceReleased"
    """A Tenant released the namespace; it stays closed until an administrator opens it or a Tenant lists it again."""
