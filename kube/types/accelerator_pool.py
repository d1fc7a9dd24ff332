"""AcceleratorPool: nodes with one type of accelerator, and who may use them. CPU is a type."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.meta import (
    AGE,
    READY_REASON,
    AcceleratorName,
    Conditions,
    DnsLabel,
    KindInfo,
    LabelValue,
    LinkClass,
    ObjectName,
    PrinterColumn,
    QualifiedKey,
    Quantity,
    Resource,
    SpecModel,
    StatusModel,
    short_name_rule,
)
from busbar.kube.types.pod_template import EnvName, own_environment_rule, own_keys_rule
from busbar.kube.types.rules import Rule, immutable, not_built
from busbar.kube.types.training_status import Amount, Count

TenantList = Annotated[
    list[DnsLabel], Field(max_length=256, json_schema_extra={"x-kubernetes-list-type": "set"})
]


class Sharing(StrEnum):
    """How one accelerator is divided; MIG and time slicing will be added here."""

    NONE = "none"


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class PoolToleration(SpecModel):
    """A taint of the pool's nodes. The operator adds this toleration to the pods it places there."""

    rules = (
        Rule(
            cel="self.operator != 'Exists' || !has(self.value)",
            message="a toleration with operator Exists has no value; remove it or use Equal",
            field_path=".operator",
            holds=lambda toleration: (
                toleration.operator is not TolerationOperator.EXISTS or toleration.value is None
            ),
        ),
    )

    key: QualifiedKey = Field(description="Key of the taint.")
    operator: TolerationOperator = Field(default=TolerationOperator.EQUAL, description="Exists or Equal.")
    value: LabelValue | None = Field(default=None, description="Value of the taint, with Equal.")
    effect: TaintEffect | None = Field(default=None, description="Effect of the taint; default all.")


DeviceResource = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        min_length=1,
        max_length=316,
    ),
]


class Fabric(SpecModel):
    """What pods of a gang need to reach each other over the nodes' own network, InfiniBand or RoCE, and not the pods'.

    Pods that are alone get nothing of it.
    """

    rules = (
        own_keys_rule("resources", "fabric resources"),
        own_keys_rule("annotations", "fabric annotations"),
        own_environment_rule("env", "fabric env"),
    )

    resources: (
        Annotated[dict[DeviceResource, Annotated[int, Field(ge=1, le=64)]], Field(max_length=8)] | None
    ) = Field(
        default=None,
        description="Devices of the network that a pod of a gang requests for each of its accelerators, e.g. "
        "rdma/hca_shared_devices_a: 1. Of a node only as many accelerators count as it has these for.",
    )
    annotations: (
        Annotated[dict[QualifiedKey, Annotated[str, Field(max_length=4096)]], Field(max_length=16)] | None
    ) = Field(
        default=None,
        description="Annotations of a gang's pods, e.g. k8s.v1.cni.cncf.io/networks with the networks that Multus attaches.",
    )
    env: Annotated[dict[EnvName, Annotated[str, Field(max_length=1024)]], Field(max_length=32)] | None = (
        Field(
            default=None,
            description="Variables of a gang's containers, e.g. NCCL_IB_HCA and NCCL_SOCKET_IFNAME; those of a job's own template go before.",
        )
    )


class Interconnect(SpecModel):
    """The links of the accelerators to the host and to each other."""

    link_class: LinkClass | None = Field(
        default=None,
        description="Link to the host, e.g. pcie5, nvlink-c2c: offload speed depends on it, and the performance table "
        "keeps the speeds of pools with different link classes apart.",
    )
    nvlink_island: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="Accelerators joined by NVLink on one node. Refused: nothing depends on it yet.",
        json_schema_extra=not_built(
            "NVLink islands are not built yet: no decision would depend on this one; remove "
            "spec.interconnect.nvlinkIsland"
        ),
    )
    nic_class: LinkClass | None = Field(
        default=None,
        description="Network between nodes, e.g. ib-400, ethernet. Refused: nothing depends on it yet; speeds are "
        "measured by the number of nodes.",
        json_schema_extra=not_built(
            "classes of networks are not built yet: no decision would depend on this one; remove "
            "spec.interconnect.nicClass"
        ),
    )
    fabric: Fabric | None = Field(
        default=None,
        description="What pods of a gang need to use the network between nodes, e.g. RDMA devices.",
    )


class AcceleratorPoolSpec(SpecModel):
    """The pool's nodes, its accelerator type, and the tenants that may use it."""

    rules = (
        Rule(
            cel="self.resourceName == 'cpu' || string(self.unit) == '1'",
            message="only a cpu pool divides its resource; remove unit, or use resourceName cpu",
            field_path=".unit",
            holds=lambda spec: spec.is_cpu or spec.unit == "1",
        ),
        Rule(
            cel="!has(self.interconnect) || !has(self.interconnect.fabric) || !has(self.interconnect.fabric.resources) || "
            "!(self.resourceName in self.interconnect.fabric.resources)",
            message="the pool's own resource is no part of its fabric; a pod requests it for its accelerators already",
            field_path=".interconnect.fabric.resources",
            holds=lambda spec: spec.resource_name not in spec.fabric_devices,
        ),
        Rule(
            cel="self.resourceName != 'cpu' || !has(self.interconnect) || !has(self.interconnect.fabric) || "
            "!has(self.interconnect.fabric.resources)",
            message="pods of a cpu pool request no devices of a fabric; leave spec.interconnect.fabric.resources out",
            field_path=".interconnect",
            holds=lambda spec: not spec.is_cpu or not spec.fabric_devices,
        ),
        immutable("accelerator", required=True),
        immutable("resourceName", required=True),
    )

    accelerator: AcceleratorName = Field(description="Accelerator type, e.g. H100 or cpu.")
    resource_name: QualifiedKey = Field(
        description="The resource that pods request, e.g. nvidia.com/gpu; cpu for cores."
    )
    unit: Quantity = Field(
        default="1", description="Amount of the resource that counts as one accelerator, e.g. 500m of cpu."
    )
    node_selector: Annotated[dict[QualifiedKey, LabelValue], Field(min_length=1, max_length=32)] = Field(
        description="Labels of the pool's nodes."
    )
    tolerations: Annotated[list[PoolToleration], Field(max_length=16)] | None = Field(
        default=None, description="Taints of the pool's nodes; pods placed here tolerate them."
    )
    runtime_class_name: ObjectName | None = Field(
        default=None,
        description="RuntimeClass of the pods placed here, e.g. nvidia, where the nodes' default runtime gives containers no "
        "driver; absent: the default.",
    )
    tenants: TenantList | None = Field(
        default=None, description="Tenants that may use the pool; absent: all."
    )
    price_per_hour: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=0.0, description="Price of one accelerator for an hour."
    )
    memory_gib: Annotated[float, Field(ge=0, le=1_000_000)] | None = Field(
        default=None,
        description="Memory of one accelerator in GiB; absent: by the data sheet of its type, where there is one; 0: not known, "
        "so that it excludes no job. For cpu, host memory per core.",
    )
    interconnect: Interconnect | None = Field(
        default=None, description="Links to the host and between accelerators."
    )
    sharing: Sharing = Field(default=Sharing.NONE, description="How one accelerator is divided.")
    reserved: Annotated[dict[QualifiedKey, Quantity], Field(max_length=16)] | None = Field(
        default=None, description="Resources kept free on each node, e.g. cpu: 500m for system pods."
    )

    @property
    def fabric(self) -> Fabric | None:
        """What pods of a gang need besides."""
        return None if self.interconnect is None else self.interconnect.fabric

    @property
    def fabric_devices(self) -> Mapping[str, int]:
        """Devices of the network that a pod of a gang requests for each of its accelerators."""
        return (None if self.fabric is None else self.fabric.resources) or {}

    @property
    def is_cpu(self) -> bool:
        """Whether its accelerators are shares of its nodes' cores."""
        return self.resource_name == "cpu"


class ForeignCapacity(StatusModel):
    """Capacity allocated to pods of no job; no tenant is charged for it."""

    accelerators: Amount = Field(description="Accelerators; in a cpu pool, the amount above spec.reserved.")
    pods: Count = Field(description="Number of these pods.")


class AcceleratorPoolStatus(StatusModel):
    """The pool's capacity and use; only the operator writes it."""

    observed_generation: Count | None = Field(default=None, description="The metadata.generation acted upon.")
    nodes: Count | None = Field(default=None, description="Ready nodes.")
    capacity: Amount | None = Field(default=None, description="Accelerators on ready nodes.")
    allocated: Amount | None = Field(default=None, description="Accelerators held.")
    free: Amount | None = Field(default=None, description="Accelerators not held.")
    held_elsewhere: ForeignCapacity | None = Field(
        default=None, description="Allocated to pods of no job, and therefore not part of the capacity."
    )
    conditions: Conditions | None = Field(default=None, description="Observations in the standard form.")


class AcceleratorPool(Resource):
    """Nodes with one type of accelerator, and the tenants that may use them."""

    rules = (short_name_rule(63, "labels are"),)
    info: ClassVar[KindInfo] = KindInfo(
        plural="acceleratorpools",
        singular="acceleratorpool",
        short_names=["bbpool"],
        namespaced=False,
        columns=[
            PrinterColumn(
                name="Accelerator", type="string", json_path=".spec.accelerator", description="Type."
            ),
            PrinterColumn(
                name="Nodes", type="integer", json_path=".status.nodes", description="Ready nodes."
            ),
            PrinterColumn(
                name="Capacity", type="number", json_path=".status.capacity", description="Accelerators."
            ),
            PrinterColumn(
                name="Allocated", type="number", json_path=".status.allocated", description="Held."
            ),
            PrinterColumn(name="Free", type="number", json_path=".status.free", description="Not held."),
            READY_REASON,
            PrinterColumn(
                name="Price/h", type="number", json_path=".spec.pricePerHour", description="Each.", priority=1
            ),
            AGE,
        ],
    )

    kind: Literal["AcceleratorPool"] = "AcceleratorPool"
    spec: AcceleratorPoolSpec = Field(
        description="The pool's nodes, its accelerator type, and the tenants that may use it."
    )
    status: AcceleratorPoolStatus | None = Field(default=None, description="Capacity and use.")
