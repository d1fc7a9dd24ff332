"""The kinds of group `busbar.dev`: one Pydantic model each; the CRD YAML is generated from them."""

from busbar.kube.types.accelerator_pool import AcceleratorPool
from busbar.kube.types.meta import (
    API_VERSION,
    GROUP,
    VERSION,
    Condition,
    ConditionStatus,
    ObjectMeta,
    Resource,
)
from busbar.kube.types.model_service import ModelService
from busbar.kube.types.performance_profile import PerformanceProfile
from busbar.kube.types.power_domain import PowerDomain
from busbar.kube.types.service_status import ServicePhase
from busbar.kube.types.tenant import Tenant
from busbar.kube.types.training_job import TrainingJob
from busbar.kube.types.training_status import TrainingPhase

KINDS: dict[str, type[Resource]] = {
    model.__name__: model
    for model in (TrainingJob, ModelService, AcceleratorPool, Tenant, PerformanceProfile, PowerDomain)
}
"""Kind to model."""

__all__ = [
    "API_VERSION",
    "GROUP",
    "KINDS",
    "VERSION",
    "AcceleratorPool",
    "Condition",
    "ConditionStatus",
    "ModelService",
    "ObjectMeta",
    "PerformanceProfile",
    "PowerDomain",
    "Resource",
    "ServicePhase",
    "Tenant",
    "TrainingJob",
    "TrainingPhase",
]
