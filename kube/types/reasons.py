"""Condition types and reasons: stable words that scripts may match. They never change their meaning.

The scheduler's own codes for a waiting job (`busbar.scheduler`) appear as reasons too; these are the rest.
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
    """The API server refuses the pods: a quota, a policy, a webhook."""
    POD_STUCK = "PodStuck"
    """A pod is being deleted and its node does not confirm it: the node is probably dead."""
    INVALID_SPEC = "InvalidSpec"
    FITS_NOWHERE = "FitsNowhere"
    NO_TENANT = "NoTenant"
    MODEL_NOT_READY = "ModelNotReady"
    CLAIM_MISSING = "ClaimMissing"
    SERVING = "Serving"
    IDLE = "Idle"
    DRAINING = "Draining"
    NODES_READY = "NodesReady"
    NO_NODES = "NoNodes"
    MEASURED = "Measured"
    NOT_MEASURED = "NotMeasured"
    CLASS_TAKEN = "ClassTaken"
    """Another PerformanceProfile describes the same workload class already."""
    SPEED_QUARANTINED = "SpeedQuarantined"
    """The speed that the job reports is not believed."""
    NAMESPACES_READY = "NamespacesReady"
    NAMESPACE_TAKEN = "NamespaceTaken"
    NAMESPACE_MISSING = "NamespaceMissing"
