"""What a caller may see of measured speeds, and of cluster-wide objects in general.

Admins see PerformanceProfiles whole. A member sees those of the workload classes that a job or service of theirs has, on the
accelerators of pools that they may use: the cells and what people stated. Evidence, conduct and counts of doubted
reports are about other tenants' jobs, even without names, and stay with the admins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from pydantic import BaseModel

from busbar.kube.types import ModelService, PerformanceProfile, TrainingJob
from busbar.kube.types.meta import ObjectMeta
from busbar.kube.types.performance_profile import CellSource, PerformanceProfileStatus

SHOWN_OF_METADATA = {"name", "uid", "creation_timestamp"}
SHOWN_OF_STATUS = {"observed_generation", "conditions", "last_updated"}
HIDDEN_OF_CELLS = {"quarantined"}

B = TypeVar("B", bound=BaseModel)


def only(part: B, fields: Collection[str]) -> B:
    """The part of an object with these fields alone, as far as they were given."""
    given = {name: getattr(part, name) for name in part.model_fields_set & set(fields)}
    return type(part).model_construct(_fields_set=set(given), **given)


def without(part: B, fields: Collection[str]) -> B:
    """The part of an object without these fields."""
    return only(part, part.model_fields_set - set(fields))


def identity_of(metadata: ObjectMeta) -> ObjectMeta:
    """What a member may read of the metadata of a cluster-wide object."""
    return only(metadata, SHOWN_OF_METADATA)


def classes_of(jobs: Collection[TrainingJob]) -> set[str]:
    """The workload classes of jobs, as the operator wrote them down."""
    return {job.status.workload_class for job in jobs if job.status and job.status.workload_class}


def served_classes(services: Collection[ModelService]) -> set[str]:
    """The workload classes of services, as their replicas named them."""
    lines = [line for service in services if service.status for line in service.status.measured or ()]
    return {line.workload_class for line in lines if line.workload_class}


def profile_for_member(profile: PerformanceProfile, accelerators: Collection[str]) -> PerformanceProfile:
    """The part of a profile that a member may read."""
    spec, status = profile.spec, profile.status
    if spec.cells is not None:
        stated = [cell for cell in spec.cells if cell.accelerator in accelerators]
        spec = spec.model_copy(update={"cells": stated})
    shown: dict[str, object] = {"metadata": identity_of(profile.metadata), "spec": spec}
    if status is not None:
        shown["status"] = _status_for_member(status, accelerators)
    return profile.model_copy(update=shown)


def _status_for_member(
    status: PerformanceProfileStatus, accelerators: Collection[str]
) -> PerformanceProfileStatus:
    cells = [
        without(cell, HIDDEN_OF_CELLS) for cell in status.cells or () if cell.accelerator in accelerators
    ]
    return only(status, SHOWN_OF_STATUS).model_copy(
        update={
            "conditions": [c.model_copy(update={"message": ""}) for c in status.conditions or ()],
            "places": len(cells),
            "measured": sum(cell.source is CellSource.MEASURED for cell in cells),
            "cells": cells,
        }
    )
