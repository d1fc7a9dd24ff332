"""PerformanceProfile: the known speeds of one workload class by accelerator. One object per class.

The spec has the speeds that people state: a stated speed counts like a measurement, and with `override` it replaces all
measurements. The status is the table itself, cell by cell with its source and interval, and the evidence from which it
was learned, so that a measurement outlives its job and a restarted operator plans as before.

A profile is shared by all tenants. It names no job and no tenant: the tenant behind a piece of evidence is recorded
as a digest that only the operator can match, and the API shows members neither `evidence` nor `conduct`.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.meta import (
    AGE,
    READY_REASON,
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
from busbar.kube.types.training_status import Amount, Count

MOST_CELLS = 256
MOST_EVIDENCE = 256
MOST_RUNS = 256
MOST_CONDUCT = 256
MOST_CURVES = 32
MOST_COMPARISONS = 160

Speed = Annotated[float, Field(ge=0, le=1e12)]
ClassName = Annotated[str, Field(pattern=r"^[!-~]([ -~]*[!-~])?$", min_length=1, max_length=253)]
Accelerators = Annotated[int, Field(ge=1, le=1_000_000)]
Percent = Annotated[int, Field(ge=1, le=100)]
Gibibytes = Annotated[float, Field(ge=0, le=1_000_000)]
Watts = Annotated[float, Field(ge=0, le=100_000)]
Nodes = Annotated[int, Field(ge=0, le=1_000_000)]
PLACE = ["accelerator", "linkClass", "accelerators", "nodes", "mode", "powerCapPercent"]
"""The key of a cell within its class. Link class and nodes came later: in older objects they have their defaults, which
stand for every link class, and every number of nodes, that has no cell of its own."""
_NODES = "Different nodes that its pods stand on; 0: any number of which nothing better is known."
_LINK_CLASS = "Link class of the pool; empty: any of which nothing better is known."


class StatedCell(SpecModel):
    """A stated speed."""

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
    link_class: Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=63)] = Field(
        default="", description=_LINK_CLASS
    )
    accelerators: Accelerators = Field(description="Accelerators of the whole job.")
    nodes: Nodes = Field(default=0, description=_NODES)
    mode: DnsLabel = Field(default="resident", description="Engine mode.")
    power_cap_percent: Percent = Field(default=100, description="Power cap, per cent of the board's limit.")
    tokens_per_second: Speed = Field(description="Speed of the whole job; 0 means that it cannot run there.")
    low: Speed | None = Field(default=None, description="Lower end of the speed's 90 % interval.")
    high: Speed | None = Field(default=None, description="Upper end of the speed's 90 % interval.")
    memory_gib: Gibibytes | None = Field(
        default=None, description="Device memory per accelerator; absent: by formula."
    )
    watts: Watts | None = Field(default=None, description="Watts of one accelerator; absent: not known.")
    override: bool = Field(
        default=False,
        description="Use this speed and ignore measurements; otherwise measurements refine it.",
    )
    note: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None, description="Where the number comes from, for people."
    )


class PerformanceProfileSpec(SpecModel):
    """The workload class, and its stated speeds."""

    rules = (immutable("workloadClass", required=True),)

    workload_class: ClassName = Field(
        description="The workload class, as in status.workloadClass of its jobs."
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
    ) = Field(default=None, description="Stated speeds.")


class CellSource(StrEnum):
    """The source of a cell's speed."""

    STATED = "Stated"
    PRIOR = "Prior"
    RATIO = "Ratio"
    MEASURED = "Measured"


class StepModel(StatusModel):
    """Seconds of one step of a serving engine: a linear model of the step's content, fitted to measured steps."""

    seconds_per_step: float = Field(description="Of every step.")
    seconds_per_sequence: float = Field(description="Per sequence that gets its next token.")
    seconds_per_thousand_context_tokens: float = Field(description="Per thousand tokens of context.")
    seconds_per_prompt_token: float = Field(description="Per token of a prompt.")
    rms_error_seconds: Amount = Field(default=0.0, description="Root mean square error of the model.")
    steps: Count = Field(default=0, description="Steps that the model was fitted to.")


class PhaseWatts(StatusModel):
    """Watts of one accelerator by what a replica does; absent: not known well enough."""

    prefill: Amount | None = Field(
        default=None, description="In steps with more tokens of prompts than decoded ones."
    )
    decode: Amount | None = Field(default=None, description="In all other steps.")
    idle: Amount | None = Field(default=None, description="Between steps.")


class ProfileCell(StatusModel):
    """The table's estimate for one cell."""

    accelerator: ShortText = Field(description="Accelerator type.")
    link_class: ShortText = Field(default="", description=_LINK_CLASS)
    accelerators: Count = Field(description="Accelerators of the whole job.")
    nodes: Count = Field(default=0, description=_NODES)
    mode: ShortText = Field(default="resident", description="Engine mode.")
    power_cap_percent: Count = Field(default=100, description="Power cap, per cent of the board's limit.")
    tokens_per_second: Amount = Field(description="Mean speed of the whole job; plans use it.")
    low: Amount | None = Field(default=None, description="Lower end of the speed's 90 % interval.")
    high: Amount | None = Field(default=None, description="Upper end of the speed's 90 % interval.")
    predicted: Amount | None = Field(default=None, description="Speed by formula, before any measurement.")
    limit: Amount | None = Field(default=None, description="No speed above this is possible there.")
    memory_gib: Amount | None = Field(
        default=None, description="Device memory per accelerator as planned: stated, else by formula."
    )
    measured_memory_gib: Amount | None = Field(
        default=None,
        description="Largest device memory per accelerator that jobs have used; if above the planned, plans ask for it.",
    )
    host_memory_gib: Amount | None = Field(default=None, description="Host memory per pod.")
    watts: Amount | None = Field(
        default=None,
        description="Watts of one accelerator: stated, as the nodes' meters measured them, or the nameplate; of a serving"
        " class in steps, as measured, or what the power cap allows.",
    )
    phase_watts: PhaseWatts | None = Field(
        default=None,
        description="Of a serving class: watts of one accelerator by phase, as the nodes' meters measured them.",
    )
    source: CellSource = Field(
        description="Stated by people, Prior: a formula, Ratio: from other cells, Measured."
    )
    reports: Count = Field(default=0, description="Accepted reports.")
    quarantined: Count = Field(default=0, description="Reports that are not believed.")
    prefill_tokens_per_second: Amount | None = Field(
        default=None, description="Of a serving class: speed of processing prompts."
    )
    step_model: StepModel | None = Field(default=None, description="Of a serving class: seconds of one step.")
    kv_tokens: Count | None = Field(
        default=None, description="Of a serving class: tokens of context that fit into the KV cache."
    )
    note: ShortText | None = Field(default=None, description="People's note on a stated speed.")


class Evidence(StatusModel):
    """Reports of one tenant's ended runs about one cell: sums over the logarithms of their speeds."""

    tenant: ShortText = Field(description="Digest of the tenant whose jobs they were.")
    accelerator: ShortText = Field(description="Accelerator type.")
    link_class: ShortText = Field(default="", description="Link class of their pool; empty: it had none.")
    accelerators: Count = Field(description="Accelerators of the whole job.")
    nodes: Count = Field(
        default=0, description="Different nodes of the job; 0: one accelerator, or not known."
    )
    mode: ShortText = Field(default="resident", description="Engine mode.")
    power_cap_percent: Count = Field(default=100, description="Power cap, per cent of the board's limit.")
    reports: Count = Field(default=0, description="How many.")
    runs: Count = Field(default=1, description="Number of runs.")
    log_mean: float = Field(default=0.0, description="Mean of the logarithms.")
    within: Amount = Field(default=0.0, description="Squared differences from their run's mean.")
    between: Amount = Field(default=0.0, description="Squared differences of the runs' means.")
    squares: Amount = Field(default=0.0, description="Sum over the runs of their reports, squared.")
    verified: bool = Field(default=False, description="Verified against data that a tenant cannot forge.")
    fault: CamelReason | None = Field(default=None, description="Why they are rejected.")
    memory_mib: Count | None = Field(default=None, description="Largest device memory of one of them.")
    watts: Amount | None = Field(default=None, description="What one accelerator drew, where meters said so.")


class TenantConduct(StatusModel):
    """How often the reports of a tenant's jobs were right, where they could be verified."""

    tenant: ShortText = Field(description="Digest of the tenant whose jobs they were.")
    passed: Count = Field(default=0, description="Jobs whose reported speed agrees with their time and work.")
    failed: Count = Field(default=0, description="Jobs whose reports contradict their time and work.")


class CountedRuns(StatusModel):
    """The ended runs that the evidence includes."""

    before: datetime | None = Field(default=None, description="All runs that ended until then.")
    runs: Annotated[
        list[ShortText], Field(max_length=MOST_RUNS, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = Field(default_factory=list, description="And these.")


class HeldTime(StatusModel):
    """Accelerator-seconds used by jobs of the class, with a half-life of a week: the budget of exploration."""

    measured: Amount = Field(default=0.0, description="On cells with earlier measurements.")
    unmeasured: Amount = Field(default=0.0, description="Where nobody had.")
    as_of: datetime | None = Field(default=None, description="Until when they are counted.")


class CurvePoint(StatusModel):
    """What one power limit costs."""

    percent: Count = Field(description="The limit, per cent of the board's highest.")
    slowdown: Amount = Field(description="Time for the same work, over that without a limit.")


class LimitComparison(StatusModel):
    """What runs were slower by under one power limit than under a higher one."""

    percent: Count = Field(description="The lower limit.")
    against_percent: Count = Field(description="The higher one.")
    log_slower: float = Field(default=0.0, description="Mean of the logarithm of the ratio of their times.")
    seconds: Amount = Field(default=0.0, description="Of running, that it is worth.")


class PowerCurve(StatusModel):
    """What power limits cost the class on one accelerator type, as its runs under changing limits showed."""

    accelerator: ShortText = Field(description="Accelerator type.")
    mode: ShortText = Field(default="resident", description="Engine mode.")
    phase: ShortText = Field(
        default="Training",
        description="Training; or of a serving class Prefill, steps with more tokens of prompts than decoded ones, or"
        " Decode, all others.",
    )
    points: Annotated[list[CurvePoint], Field(max_length=32)] = Field(
        default_factory=list, description="From the lowest limit that was measured to the highest."
    )
    comparisons: Annotated[list[LimitComparison], Field(max_length=MOST_COMPARISONS)] = Field(
        default_factory=list, description="What the points were fitted to."
    )


class PerformanceProfileStatus(StatusModel):
    """The estimates for the class and their evidence; only the operator writes it."""

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
        default=None, description="The evidence of the cells."
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
    ) = Field(default=None, description="How often each tenant's reports were right.")
    counted: CountedRuns | None = Field(default=None, description="Runs that the evidence includes.")
    held: HeldTime | None = Field(default=None, description="The budget of exploration.")
    power_curves: (
        Annotated[
            list[PowerCurve],
            Field(
                max_length=MOST_CURVES,
                json_schema_extra={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["accelerator", "mode", "phase"],
                },
            ),
        ]
        | None
    ) = Field(default=None, description="What power limits cost, where it was measured.")
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
            READY_REASON,
            PrinterColumn(
                name="Updated", type="date", json_path=".status.lastUpdated", description="Last change."
            ),
            AGE,
        ],
    )

    kind: Literal["PerformanceProfile"] = "PerformanceProfile"
    spec: PerformanceProfileSpec = Field(description="The workload class, and its stated speeds.")
    status: PerformanceProfileStatus | None = Field(
        default=None, description="The estimates for it and their evidence."
    )
