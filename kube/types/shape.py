"""Size of the pods of a job or service, shared by TrainingJob and ModelService."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import AcceleratorName, Quantity, SpecModel
from busbar.kube.types.rules import Rule

AcceleratorList = Annotated[
    list[AcceleratorName], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})
]


class PodShape(SpecModel):
    """Resources of each pod."""

    accelerators_per_pod: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Accelerators of each pod, as the pool counts them (cores where the type is cpu). The built-in training engine "
        "uses as many as engine.parallelism.processesPerPod, the built-in serving engine one.",
    )
    cpu: Quantity | None = Field(
        default=None,
        description="CPU of each pod; default 1 core per accelerator, or the cores of a cpu pool.",
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of each pod. Default for the built-in training engine: what its plan needs where model.config tells "
        "the model's size, which is also the least; else none is requested.",
    )
    ephemeral_storage: Quantity | None = Field(default=None, description="Scratch disk of each pod.")


class Domain(StrEnum):
    """Topology domains that a gang can be restricted to, outermost first."""

    ZONE = "zone"
    NETWORK = "network"
    RACK = "rack"
    NVLINK = "nvlink"
    NODE = "node"


class GangShape(PodShape):
    """The number of pods, and the resources of each. A range makes the job elastic."""

    rules = (
        Rule(
            cel="self.minPods <= self.maxPods",
            message="minPods must not be greater than maxPods",
            holds=lambda shape: shape.min_pods <= shape.max_pods,
        ),
    )

    min_pods: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="The gang never runs with fewer pods."
    )
    max_pods: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="The gang never runs with more pods."
    )
    within: Domain | None = Field(
        default=None,
        description="Topology domain that must contain all pods; default the closest placement with free capacity.",
    )
