"""PerformanceProfile: how fast one workload class runs where, as far as it is known. One object per class.

The spec is what people know and ship: a stated speed counts like a measurement of theirs, and with `override` it is
the last word. The status is the table itself, cell by cell with its source and interval, and what it was learned
from, so that a measurement outlives the job that made it and a new operator plans like the one before.

A profile is shared by all tenants. It names no job and no tenant: whose word a piece of evidence was stands there
as a digest that only the operator can match, and the API shows members neither evidence nor conduct.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.meta import (
    AcceleratorName,
    CamelReason,
    Conditions,
    DnsLabel,
    KindInfo,
    PrinterColumn,
    Resource,
    ShortText,
    SpecModel,
    StatusModel,
)
from busbar.kube.types.rules import Rule, immutable
from busbar.kube.types.training_job import Amount, Count

MOST_CELLS = 256
MOST_EVIDENCE = 256
MOST_RUNS = 256
MOST_CONDUCT = 256

Speed = Annotated[float, Field(ge=0, le=1e12)]
ClassName = Annotated[str, Field(pattern=r"^[!-~]([ -~]*[!-~])?$", min_length=1, max_length=253)]
Accelerators = Annotated[int, Field(ge=1, le=1_000_000)]
Percent = Annotated[int, Field(ge=1, le=100)]
Gibibytes = Annotated[float, Field(ge=0, le=1_000_000)]
Watts = Annotated[float, Field(ge=0, le=100_000)]
PLACE = ["accelerator", "accelerators", "mode", "powerCapPercent"]
"""What names a cell within its class."""


class StatedCell(SpecModel):
    """A speed that somebody knows."""

    rules = (
        Rule(
            cel="!has(self.low) || self.low <= self.tokensPerSecond",
            message="low must not be greater than tokensPerSecond",
            field_path=".low",
            holds=lambda cell: cell.low is None or cell.low <= cell.tokens_per_second,
        ),
        Rule(
            cel="!has(self.high) || self.high >= self.tokensPerSecond",
            message="high must not be less than tokensPerSecond",
            field_path=".high",
            holds=lambda cell: cell.high is None or cell.high >= cell.tokens_per_second,
        ),
    )

    accelerator: AcceleratorName = Field(description="Accelerator type, as pools name it.")
    accelerators: Accelerators = Field(description="Accelerators of the whole job.")
    mode: DnsLabel = Field(default="resident", description="Engine mode.")
    power_cap_percent: Percent = Field(default=100, description="Power cap, per cent of the board's limit.")
    tokens_per_second: Speed = Field(description="Speed of the whole job; 0: it cannot run there.")
    low: Speed | None = Field(default=None, description="Nineteen times in twenty it is faster than this.")
    high: Speed | None = Field(default=None, description="Nineteen times in twenty it is slower than this.")
    memory_gib: Gibibytes | None = Field(
        default=None, description="Device memory per accelerator; absent: by formula."
    )
    watts: Watts | None = Field(default=None, description="Watts of one accelerator; absent: not known.")
    override: bool = Field(
        default=False,
        description="Believe this and nothing else; otherwise what jobs measure refines it.",
    )
    note: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None, description="Where the number comes from, for people."
    )


class PerformanceProfileSpec(SpecModel):
    """The class, and what is known of it beforehand."""

    rules = (immutable("workloadClass", required=True),)

    workload_class: ClassName = Field(
        description="The workload class, as jobs of it show it in status.workloadClass."
    )
    cells: (
        Annotated[
            list[StatedCell],
            Field(
                max_length=128,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": PLACE},
            ),
        ]
        | None
    ) = Field(default=None, description="Speeds that are known.")


class CellSource(StrEnum):
    """Where a cell's speed comes from."""

    STATED = "Stated"
    PRIOR = "Prior"
    RATIO = "Ratio"
    MEASURED = "Measured"


class ProfileCell(StatusModel):
    """What is believed of one place."""

    accelerator: ShortText = Field(description="Accelerator type.")
    accelerators: Count = Field(description="Accelerators of the whole job.")
    mode: ShortText = Field(default="resident", description="Engine mode.")
    power_cap_percent: Count = Field(default=100, description="Power cap, per cent of the board's limit.")
    tokens_per_second: Amount = Field(description="Mean speed of the whole job; plans use it.")
    low: Amount | None = Field(default=None, description="Nineteen times in twenty it is faster than this.")
    high: Amount | None = Field(default=None, description="Nineteen times in twenty it is slower than this.")
    predicted: Amount | None = Field(default=None, description="Speed by formula, before anybody measured.")
    limit: Amount | None = Field(default=None, description="No speed above this is possible there.")
    memory_gib: Amount | None = Field(default=None, description="Device memory per accelerator.")
    host_memory_gib: Amount | None = Field(default=None, description="Host memory per pod.")
    watts: Amount | None = Field(default=None, description="Watts of one accelerator.")
    source: CellSource = Field(
        description="Stated by people, Prior: a formula, Ratio: from other cells, Measured."
    )
    reports: Count = Field(default=0, description="Reports that are believed.")
    quarantined: Count = Field(default=0, description="Reports that are not believed.")


class Evidence(StatusModel):
    """What one tenant's ended runs said of one place: sums over the logarithms of their speeds."""

    tenant: ShortText = Field(description="Digest of whose jobs they were.")
    accelerator: ShortText = Field(description="Accelerator type.")
    accelerators: Count = Field(description="Accelerators of the whole job.")
    mode: ShortText = Field(default="resident", description="Engine mode.")
    power_cap_percent: Count = Field(default=100, description="Power cap, per cent of the board's limit.")
    reports: Count = Field(default=0, description="How many.")
    runs: Count = Field(default=1, description="From how many runs.")
    log_mean: float = Field(default=0.0, description="Mean of the logarithms.")
    within: Amount = Field(default=0.0, description="Squared differences from their run's mean.")
    between: Amount = Field(default=0.0, description="Squared differences of the runs' means.")
    squares: Amount = Field(default=0.0, description="Sum over the runs of their reports, squared.")
    verified: bool = Field(default=False, description="Checked against what a tenant cannot forge.")
    fault: CamelReason | None = Field(default=None, description="Why they are not believed.")


class TenantConduct(StatusModel):
    """How often what a tenant's jobs said was right, where it could be checked."""

    tenant: ShortText = Field(description="Digest of whose jobs they were.")
    passed: Count = Field(default=0, description="Jobs whose speed and time agree with their work.")
    failed: Count = Field(default=0, description="Jobs that contradict themselves.")


class CountedRuns(StatusModel):
    """Which ended runs are in the evidence already."""

    before: datetime | None = Field(default=None, description="All that ended until then.")
    runs: Annotated[
        list[ShortText], Field(max_length=MOST_RUNS, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = Field(default_factory=list, description="And these.")


class HeldTime(StatusModel):
    """Accelerator-seconds that jobs of the class held, with a half-life of a week: the account of exploration."""

    measured: Amount = Field(default=0.0, description="Where somebody had measured before.")
    unmeasured: Amount = Field(default=0.0, description="Where nobody had.")
    as_of: datetime | None = Field(default=None, description="Until when they are counted.")


class PerformanceProfileStatus(StatusModel):
    """What is believed of the class and why; only the operator writes it."""

    observed_generation: Count | None = Field(default=None, description="The metadata.generation acted upon.")
    conditions: Conditions | None = Field(default=None, description="Observations in the standard form.")
    places: Count | None = Field(default=None, description="Number of cells.")
    measured: Count | None = Field(default=None, description="Of these, measured.")
    quarantined: Count | None = Field(default=None, description="Reports that are not believed.")
    cells: (
        Annotated[
            list[ProfileCell],
            Field(
                max_length=MOST_CELLS,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": PLACE},
            ),
        ]
        | None
    ) = Field(default=None, description="The table's cells of this class.")
    evidence: Annotated[list[Evidence], Field(max_length=MOST_EVIDENCE)] | None = Field(
        default=None, description="What they were learned from."
    )
    conduct: (
        Annotated[
            list[TenantConduct],
            Field(
                max_length=MOST_CONDUCT,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["tenant"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Whose word was right how often.")
    counted: CountedRuns | None = Field(default=None, description="Runs that are in the evidence.")
    held: HeldTime | None = Field(default=None, description="The account of exploration.")
    last_updated: datetime | None = Field(default=None, description="When this was written.")


class PerformanceProfile(Resource):
    """How fast one workload class runs on which accelerators: stated, predicted and measured speeds."""

    info: ClassVar[KindInfo] = KindInfo(
        plural="performanceprofiles",
        singular="performanceprofile",
        short_names=["bbperf"],
        namespaced=False,
        columns=[
            PrinterColumn(
                name="Class", type="string", json_path=".spec.workloadClass", description="Workload class."
            ),
            PrinterColumn(
                name="Cells", type="integer", json_path=".status.places", description="Known places."
            ),
            PrinterColumn(
                name="Measured",
                type="integer",
                json_path=".status.measured",
                description="Of these, measured.",
            ),
            PrinterColumn(
                name="Quarantined",
                type="integer",
                json_path=".status.quarantined",
                description="Reports that are not believed.",
            ),
            PrinterColumn(
                name="Reason",
                type="string",
                json_path='.status.conditions[?(@.type=="Ready")].reason',
                description="Why it is or is not ready.",
            ),
            PrinterColumn(
                name="Updated", type="date", json_path=".status.lastUpdated", description="Last change."
            ),
            PrinterColumn(
                name="Age", type="date", json_path=".metadata.creationTimestamp", description="Its age."
            ),
        ],
    )

    kind: Literal["PerformanceProfile"] = "PerformanceProfile"
    spec: PerformanceProfileSpec = Field(description="The class, and what is known of it beforehand.")
    status: PerformanceProfileStatus | None = Field(
        default=None, description="What is believed of it and why."
    )
