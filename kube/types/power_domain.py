"""PowerDomain: the nodes on one electrical feed, and its budget. Domains form a tree."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.meta import (
    AGE,
    READY_REASON,
    Conditions,
    KindInfo,
    LabelValue,
    ObjectName,
    PrinterColumn,
    QualifiedKey,
    Resource,
    SpecModel,
    StatusModel,
)
from busbar.kube.types.power_meter import PowerMeter, PowerMeterStatus
from busbar.kube.types.rules import Rule
from busbar.kube.types.training_status import Count

Watts = Annotated[float, Field(ge=0)]


class Policy(StrEnum):
    """What is done to keep the budget."""

    OBSERVE = "Observe"
    """The draw is measured, and nothing is limited."""
    STATIC = "Static"
    """The nodes that hang on the domain itself have equal leases, whatever runs."""
    LEASE = "Lease"
    """Their leases go where they save the most work."""
    LEASE_WITH_BURST = "LeaseWithBurst"
    """As Lease, but a lease bounds the mean: short peaks pass above it."""


class PowerEnforcement(StrEnum):
    """What is done where even the lowest limits of all boards are above the budget."""

    CAP = "Cap"
    """Nothing more: the boards are held at their lowest limits."""
    PREEMPT = "Preempt"
    """Running work is stopped until they fit."""


class PowerDomainSpec(SpecModel):
    """The feed's budget, its place in the tree, and its nodes."""

    budget_watts: Annotated[float, Field(gt=0, le=100_000_000)] = Field(
        description="What the feed may carry, in watts."
    )
    parent: ObjectName | None = Field(
        default=None, description="The domain that feeds this one; absent: none is above it."
    )
    node_selector: Annotated[dict[QualifiedKey, LabelValue], Field(min_length=1, max_length=32)] | None = (
        Field(
            default=None,
            description="Labels of the nodes on this feed; absent: it has only those of the domains below it. "
            "Of several domains that select a node, one below another comes first, then the one with more labels.",
        )
    )
    policy: Policy = Field(
        default=Policy.OBSERVE,
        description="Of the nodes that hang on this domain itself. Observe: measure, and limit nothing. Static: limit "
        "the boards by equal leases. Lease: by leases that go where they save the most work. LeaseWithBurst: as Lease, but short peaks "
        "of nodes that serve pass above their leases, as far as rideThroughSeconds allows. The budget binds the "
        "leases of all domains below, whatever the policy. With all but Observe, jobs on this domain and on those below "
        "wait while it does not carry what they draw.",
    )
    enforcement: PowerEnforcement = Field(
        default=PowerEnforcement.CAP,
        description="What is done if hosts, and boards at their lowest limits, are above the budget for longer than limits "
        "need to act. Cap: nothing more. Preempt: running jobs on this domain and on those below save their state and "
        "wait, as few as needed, except for those with preemptible: false; then replicas of services finish their "
        "requests and leave.",
    )
    host_watts: Annotated[float, Field(ge=0, le=1_000_000)] | None = Field(
        default=None,
        description="The most that one node of this domain draws beside its boards: processors, memory, fans and "
        "supplies. All policies but Observe need it: leases leave room for it.",
    )
    ride_through_seconds: Annotated[float, Field(gt=0, le=10)] | None = Field(
        default=None,
        description="With LeaseWithBurst: for how long at most the breaker bears what its nodes may draw together once more, "
        "beside their leases; absent: 0.1. So much energy may pass above the leases at once, and what passes until limits act.",
    )
    unreported_node_watts: Annotated[float, Field(ge=0, le=1_000_000)] | None = Field(
        default=None,
        description="What a node of this domain counts with while it has not reported since the operator's start; "
        "absent: until then nothing above the lowest limits is leased on its feeds.",
    )
    margin_percent: Annotated[float, Field(ge=0, le=50)] = Field(
        default=1.0,
        description="Part of the budget that headroom and leases leave out, for what is not measured.",
    )
    meter: PowerMeter | None = Field(
        default=None,
        description="The feed's own meter, to compare the energy ledger with. It limits nothing and nobody.",
    )


class PowerOverrun(StatusModel):
    """A time in which the measured draw was above the budget."""

    start_time: datetime = Field(description="When it began.")
    seconds: Annotated[float, Field(ge=0)] = Field(description="How long it lasted, or has lasted.")
    worst_watts: Watts = Field(description="The most above the budget.")
    kilojoules: Annotated[float, Field(ge=0)] = Field(description="Energy above the budget.")


class PowerDomainStatus(StatusModel):
    """The state of the feed; only the operator writes it."""

    observed_generation: Count | None = Field(default=None, description="The metadata.generation acted upon.")
    nodes: Count | None = Field(
        default=None, description="Nodes on this feed, those of the domains below it included."
    )
    draw_watts: Watts | None = Field(
        default=None, description="Mean of the last second of the nodes that report; absent: none does."
    )
    assumed_watts: Watts | None = Field(
        default=None, description="Nameplates of the nodes that have stopped reporting."
    )
    headroom_watts: float | None = Field(
        default=None,
        description="Budget less margin, draw and assumed watts; absent while a node has never reported.",
    )
    floor_watts: Watts | None = Field(
        default=None, description="The nodes with all boards at their lowest limit, as they report it."
    )
    nameplate_watts: Watts | None = Field(
        default=None, description="The most that the nodes can draw, as they report it."
    )
    leased_watts: Watts | None = Field(
        default=None,
        description="The most that the nodes may draw by the leases in force or on their way; nodes that nothing limits "
        "count with their nameplates. Absent where nothing on this feed is limited.",
    )
    short_watts: Watts | None = Field(
        default=None,
        description="With enforcement Preempt: what the domain lacks for the work that runs on it, or for the least of "
        "what was stopped, with all boards at their lowest limits. Nothing starts there meanwhile. Absent: nothing "
        "is lacking.",
    )
    boards_limited: bool | None = Field(
        default=None,
        description="Whether all nodes of this feed have reported, with agents that set limits and boards that take them: "
        "jobs may start under a power cap on those that hang on this domain itself. Absent where nothing is limited.",
    )
    capped_nodes: Count | None = Field(
        default=None,
        description="Nodes with a board whose limit in force is below the most that it can draw.",
    )
    silent_nodes: Count | None = Field(
        default=None, description="Nodes without a report of the last seconds."
    )
    simulated_nodes: Count | None = Field(
        default=None, description="Nodes whose watts are invented by the simulator."
    )
    telemetry_age_seconds: Count | None = Field(default=None, description="Age of the oldest node's report.")
    energy_joules: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Energy that its nodes have used; absent: nothing was ever measured."
    )
    unassigned_joules: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Of these, what no tenant's pods held: idle boards and hosts."
    )
    last_overrun: PowerOverrun | None = Field(
        default=None, description="The last time that the measured draw was above the budget."
    )
    meter: PowerMeterStatus | None = Field(
        default=None, description="What spec.meter has said, beside the energy ledger."
    )
    conditions: Conditions | None = Field(default=None, description="Observations in the standard form.")


class PowerDomain(Resource):
    """The nodes on one electrical feed, and what it may carry."""

    rules = (
        Rule(
            cel="!has(self.spec.parent) || self.spec.parent != self.metadata.name",
            message="a domain cannot be its own parent; remove spec.parent, or name the feed above it",
            field_path=".spec.parent",
            holds=lambda domain: not domain.spec.parent or domain.spec.parent != domain.metadata.name,
        ),
        Rule(
            cel="self.spec.policy == 'Observe' || !has(self.spec.nodeSelector) || has(self.spec.hostWatts)",
            message="policies that limit nodes need spec.hostWatts: the most that one node draws beside its boards",
            field_path=".spec.hostWatts",
            holds=lambda domain: (
                domain.spec.policy is Policy.OBSERVE
                or not domain.spec.node_selector
                or domain.spec.host_watts is not None
            ),
        ),
        Rule(
            cel="self.spec.enforcement != 'Preempt' || self.spec.policy != 'Observe'",
            message="Preempt needs a spec.policy that limits nodes: limits come first, and what was stopped must wait",
            field_path=".spec.enforcement",
            holds=lambda domain: (
                domain.spec.enforcement is not PowerEnforcement.PREEMPT
                or domain.spec.policy is not Policy.OBSERVE
            ),
        ),
        Rule(
            cel="!has(self.spec.rideThroughSeconds) || self.spec.policy == 'LeaseWithBurst'",
            message="only spec.policy LeaseWithBurst lets peaks pass above leases; remove spec.rideThroughSeconds",
            field_path=".spec.rideThroughSeconds",
            holds=lambda domain: (
                domain.spec.ride_through_seconds is None or domain.spec.policy is Policy.LEASE_WITH_BURST
            ),
        ),
        Rule(
            cel="!has(self.spec.meter) || has(self.spec.meter.prometheus) != has(self.spec.meter.redfish)",
            message="a meter is read in one way: set either spec.meter.prometheus or spec.meter.redfish",
            field_path=".spec.meter",
            holds=lambda domain: (
                domain.spec.meter is None
                or (domain.spec.meter.prometheus is None) != (domain.spec.meter.redfish is None)
            ),
        ),
        Rule(
            cel="!has(self.spec.meter) || !has(self.spec.meter.secretName) || (has(self.spec.meter.prometheus) ? "
            "self.spec.meter.prometheus.url : has(self.spec.meter.redfish) ? self.spec.meter.redfish.url : "
            "'https').startsWith('https')",
            message="credentials are sent over https only: correct the meter's url, or remove spec.meter.secretName",
            field_path=".spec.meter.secretName",
            holds=lambda domain: (
                domain.spec.meter is None
                or domain.spec.meter.secret_name is None
                or (domain.spec.meter.url or "https").startswith("https")
            ),
        ),
    )
    info: ClassVar[KindInfo] = KindInfo(
        plural="powerdomains",
        singular="powerdomain",
        short_names=["bbpd"],
        namespaced=False,
        columns=[
            PrinterColumn(
                name="Budget", type="number", json_path=".spec.budgetWatts", description="In watts."
            ),
            PrinterColumn(name="Draw", type="number", json_path=".status.drawWatts", description="In watts."),
            PrinterColumn(
                name="Headroom", type="number", json_path=".status.headroomWatts", description="In watts."
            ),
            PrinterColumn(
                name="Leased", type="number", json_path=".status.leasedWatts", description="In watts."
            ),
            PrinterColumn(
                name="Capped",
                type="integer",
                json_path=".status.cappedNodes",
                description="Nodes with a limited board.",
            ),
            PrinterColumn(
                name="Nodes", type="integer", json_path=".status.nodes", description="On this feed."
            ),
            PrinterColumn(
                name="Parent", type="string", json_path=".spec.parent", description="The feed above it."
            ),
            PrinterColumn(
                name="Silent",
                type="integer",
                json_path=".status.silentNodes",
                description="Nodes that do not report.",
                priority=1,
            ),
            PrinterColumn(
                name="Simulated",
                type="integer",
                json_path=".status.simulatedNodes",
                description="Nodes whose watts are invented.",
                priority=1,
            ),
            PrinterColumn(
                name="Within",
                type="string",
                json_path='.status.conditions[?(@.type=="WithinBudget")].status',
                description="Whether the draw is within the budget.",
            ),
            PrinterColumn(
                name="Policy", type="string", json_path=".spec.policy", description="Its policy.", priority=1
            ),
            READY_REASON,
            AGE,
        ],
    )

    kind: Literal["PowerDomain"] = "PowerDomain"
    spec: PowerDomainSpec = Field(description="The feed's budget, its place in the tree, and its nodes.")
    status: PowerDomainStatus | None = Field(default=None, description="The state of the feed.")
