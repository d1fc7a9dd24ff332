"""Sections of `spec.engine` and the words that they allow: model, batch, optimizer, adapters, parallelism; of its data `training_data`."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from busbar.kube.types.meta import ClaimUri, SpecModel
from busbar.kube.types.rules import Rule, exactly_one_of
from busbar.kube.types.training_data import DataSource

Beta = Annotated[float, Field(ge=0, lt=1)]
LARGEST_BETA = 0.99  # of the second moment, in a reduced format


def without_integral_floats(value: Any) -> Any:
    """The API server stores 10000.0 as 10000; the same normalization here keeps both forms of an object equal."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: without_integral_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_integral_floats(item) for item in value]
    return value


def _with_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError where a property that the schema names is no number."""
    for name in _NUMBERS:
        value = config.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number")
    return config


_NUMBERS = {"vocab_size": {"type": "number", "description": "Entries of the vocabulary."}}
"""Properties of a model's config that rules read."""
ModelConfig = Annotated[
    dict[str, Any],
    Field(max_length=256, json_schema_extra={"properties": _NUMBERS}),
    AfterValidator(without_integral_floats),
    AfterValidator(_with_numbers),
]


class EngineMode(StrEnum):
    """Where the engine keeps its state; `auto` lets the scheduler choose."""

    AUTO = "auto"
    RESIDENT = "resident"
    OPTIMIZER_OFFLOAD = "optimizer-offload"
    PARAMETER_OFFLOAD = "parameter-offload"


class Activations(StrEnum):
    """What happens to the activations inside a block between forward and backward."""

    AUTO = "auto"
    KEEP = "keep"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class TileForm(StrEnum):
    """Whether something is computed for all tokens of a micro-batch at once."""

    WHOLE = "whole"
    TILED = "tiled"


class GradientSums(StrEnum):
    """The type in which gradients of a step's micro-batches are added up."""

    WEIGHTS = "weights"
    FLOAT32 = "float32"


class UpdateSchedule(StrEnum):
    """Whether the next forward pass runs beside the optimizer's updates."""

    AUTO = "auto"
    GATED = "gated"
    BLOCKING = "blocking"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class StateFormat(StrEnum):
    """In what AdamW's moments are kept; `exact` is float32."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"


class OptimizerName(StrEnum):
    ADAMW = "AdamW"
    ZEROTH_ORDER = "ZerothOrder"


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Order(StrEnum):
    """In which the gradients of a step's micro-batches are added up."""

    FAST = "fast"
    FIXED = "fixed"


class Sharding(StrEnum):
    """What the pods of a gang divide among them; the stages of ZeRO."""

    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


class ModelSource(SpecModel):
    """The model: a new one from a configuration, or weights to start from; exactly one."""

    rules = (exactly_one_of("config", "uri", message="model needs exactly one of config and uri"),)

    config: ModelConfig | None = Field(
        default=None,
        description="A transformers configuration (config.json) of any causal language model.",
    )
    uri: ClaimUri | None = Field(
        default=None, description="A folder in safetensors layout: pvc://claim/path."
    )


class Batch(SpecModel):
    """Size of one optimizer step."""

    rules = (
        Rule(
            cel="self.sequences % self.microBatch == 0",
            message="sequences must be a multiple of microBatch",
            holds=lambda batch: batch.sequences % batch.micro_batch == 0,
        ),
    )

    sequences: Annotated[int, Field(ge=1, le=1_048_576)] = Field(
        default=8, description="Sequences in one step."
    )
    micro_batch: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1, description="Sequences in one forward and backward pass; gradients are accumulated."
    )

    @property
    def micro_batches(self) -> int:
        """Of one step."""
        return self.sequences // self.micro_batch


class Optimizer(SpecModel):
    """The optimizer and its schedule."""

    name: OptimizerName = Field(
        default=OptimizerName.ADAMW,
        description="Algorithm. ZerothOrder has no backward pass: two forward passes tell the slope along a random direction, so "
        "that neither gradients nor moments need memory. It takes many more steps, at a smaller learning rate.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        default=3e-4, description="Peak learning rate."
    )
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.95], description="Of AdamW: decay of the first and second moment."
    )
    eps: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1e-8, description="Of AdamW: added to the denominator."
    )
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.1, description="Decoupled weight decay."
    )
    warmup_steps: Annotated[int, Field(ge=0, le=100_000_000)] = Field(
        default=0, description="Steps over which the learning rate rises from zero."
    )
    schedule: Schedule = Field(default=Schedule.COSINE, description="Schedule after the warm-up.")
    gradient_clip: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=1.0, description="Largest global gradient norm; of ZerothOrder, largest slope."
    )
    perturbation: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1e-3, description="Of ZerothOrder: how far from each weight the two points are."
    )


class LengthWarmup(SpecModel):
    """Sequences that are shorter at the beginning of a run."""

    start: Annotated[int, Field(ge=8)] = Field(description="Tokens of a sequence in the first step.")
    steps: Annotated[int, Field(ge=1)] = Field(
        description="Steps until sequences are whole; they grow evenly, by eight tokens at a time."
    )


class LayerDrop(SpecModel):
    """Blocks that a step leaves out, more of them the later the step and the deeper the block."""

    keep: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5,
        description="Share of the steps that compute the last block in the end; block i of L is in 1 - i / L * (1 - keep) of "
        "them.",
    )
    rate: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.001,
        description="How fast steps get there from having all blocks: what is missing falls by the factor exp(-rate) per step.",
    )


class Evaluation(SpecModel):
    """Bits per byte on the held-out files, beside n-gram models counted on the same training bytes."""

    ngram_order: Annotated[int, Field(ge=2, le=5)] = Field(
        default=3, description="Order of the larger n-gram model; a bigram is always counted too."
    )


AdapterName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=128)]


ParameterPattern = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9_.*?]|\[!?([A-Za-z0-9_](-[A-Za-z0-9_])?)+\])+$",
        max_length=253,
    ),
]


class Adapter(SpecModel):
    """LoRA: the weights of model.uri stay as they are, and low-rank matrices beside them are trained."""

    rank: Annotated[int, Field(ge=1, le=1024)] = Field(default=16, description="Rank of the matrices.")
    alpha: Annotated[float, Field(gt=0, le=65_536)] | None = Field(
        default=None,
        description="The adapter counts alpha / rank times; default rank, so once.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0, description="Share of the adapter's inputs that are dropped in training."
    )
    targets: Annotated[list[ModuleName], Field(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="Names of the linear layers to adapt, e.g. [q_proj, v_proj]; default all but the output's.",
    )
    rs_lora: bool = Field(
        default=False, description="Count alpha / sqrt(rank) times instead, for large ranks (rsLoRA)."
    )
    dora: bool = Field(default=False, description="Train the magnitudes of the weights too (DoRA).")
    merge: bool = Field(
        default=False,
        description="Write the whole model with the adapter added, ready to be served, and the adapter in its "
        "subfolder adapter; default the adapter alone.",
    )


MOST_ADAPTERS = 16
"""Of one job."""
Steps = Annotated[int, Field(ge=1, le=100_000_000)]
Seed = Annotated[int, Field(ge=0, le=2_147_483_647)]


class NamedAdapter(Adapter):
    """One of several adapters of one model; what is left out is as the engine has it."""

    name: AdapterName = Field(description="Its subfolder of the output, and of the checkpoints.")
    data: DataSource | None = Field(default=None, description="Its own training text; default engine.data.")
    steps: Steps | None = Field(default=None, description="Its own optimizer steps; default engine.steps.")
    batch: Batch | None = Field(default=None, description="Its own batch; default engine.batch.")
    optimizer: Optimizer | None = Field(
        default=None, description="Its own optimizer and schedule; default engine.optimizer."
    )
    seed: Seed | None = Field(default=None, description="Its own seed; default engine.seed.")


class Parallelism(SpecModel):
    """How the processes of a job share a step: `processesPerPod` of each pod."""

    rules = (
        Rule(
            cel="!has(self.sequence) || self.sequence == 1 || !has(self.order) || self.order != 'fixed'",
            message="processes that share sequences add up in the order fast; remove sequence, or set order: fast",
            holds=lambda own: own.sequence == 1 or own.order is not Order.FIXED,
        ),
    )

    order: Order = Field(
        default=Order.FAST,
        description="fast adds gradients up as the processes' collectives do; fixed adds the micro-batches up as one tree of "
        "up to 8 parts, with bit-equal results on 1, 2, 4 or 8 processes, and needs memory for partial sums.",
    )
    sharding: Sharding = Field(
        default=Sharding.OPTIMIZER,
        description="What each process keeps a part of: optimizer, its state; gradients, these too, which are exchanged "
        "after each micro-batch; parameters, the weights too, which a block has whole only while it is computed. The results "
        "are equal bit for bit in order fixed.",
    )
    sequence: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="Processes that share each sequence: each has so many times fewer of its tokens, and between layers of "
        "attention they exchange them for heads. For sequences that fit no accelerator alone; the number divides the "
        "processes, data.sequenceLength, and the model's heads of queries and of keys. Losses differ by roundings.",
    )
    processes_per_pod: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="Processes of each pod, which share its memory and cores. On accelerators each has one of its own, so it is "
        "shape.acceleratorsPerPod there; on cpu pools they share the pod's cores.",
    )
