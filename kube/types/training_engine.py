"""The configuration of Busbar's own training engine: its sections together, and what must hold between them."""

from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import Quantity, SpecModel
from busbar.kube.types.rules import Rule
from busbar.kube.types.training_data import DataSource, TokenizerSource
from busbar.kube.types.training_sections import (
    LARGEST_BETA,
    MOST_ADAPTERS,
    Activations,
    Adapter,
    Batch,
    Dtype,
    EngineMode,
    Evaluation,
    GradientSums,
    LayerDrop,
    LengthWarmup,
    ModelSource,
    NamedAdapter,
    Optimizer,
    OptimizerName,
    Parallelism,
    ParameterPattern,
    Seed,
    Sharding,
    StateFormat,
    Steps,
    TileForm,
    UpdateSchedule,
)


class TrainingEngine(SpecModel):
    """Busbar's own training engine."""

    rules = (
        Rule(
            cel="!has(self.adapter) || has(self.model.uri)",
            message="an adapter needs model.uri, the saved weights that it adapts",
            holds=lambda engine: engine.adapter is None or engine.model.uri is not None,
        ),
        Rule(
            cel="!has(self.adapters) || has(self.model.uri)",
            message="adapters need model.uri, the saved weights that they adapt",
            holds=lambda engine: engine.adapters is None or engine.model.uri is not None,
        ),
        Rule(
            cel="!has(self.adapters) || !has(self.adapter)",
            message="adapter is one, and adapters are several; remove one of the two",
            holds=lambda engine: engine.adapters is None or engine.adapter is None,
        ),
        Rule(
            cel="!has(self.freeze) || !(has(self.adapter) || has(self.adapters))",
            message="beside an adapter all weights of the model are frozen already; remove freeze, or adapter",
            holds=lambda engine: engine.freeze is None or not engine.has_adapters,
        ),
        Rule(
            cel="!has(self.adapters) || self.adapters.all(a, (has(a.optimizer) ? a.optimizer.warmupSteps : "
            "(has(self.optimizer) ? self.optimizer.warmupSteps : 0)) <= (has(a.steps) ? a.steps : self.steps))",
            message="an adapter's optimizer.warmupSteps must not exceed its steps",
            field_path=".adapters",
            holds=lambda engine: all(
                each.optimizer.warmup_steps <= each.steps for _, each in engine.runs if engine.adapters
            ),
        ),
        Rule(
            cel="has(self.tokenizer) || has(self.model.uri)",
            message="a model from config has no tokenizer of its own; add tokenizer.train or tokenizer.uri",
            holds=lambda engine: engine.tokenizer is not None or engine.model.uri is not None,
        ),
        Rule(
            cel="!has(self.tokenizer) || !has(self.tokenizer.train) || !has(self.model.config) || "
            "!has(self.model.config.vocab_size) || self.model.config.vocab_size == double(self.tokenizer.train.vocabSize)",
            message="tokenizer.train.vocabSize must be the vocab_size of model.config; make them equal, or leave vocab_size out",
            field_path=".tokenizer",
            holds=lambda engine: (
                engine.tokenizer is None
                or engine.tokenizer.train is None
                or (engine.model.config or {}).get("vocab_size", engine.tokenizer.train.vocab_size)
                == engine.tokenizer.train.vocab_size
            ),
        ),
        Rule(
            cel="!has(self.optimizer) || self.optimizer.warmupSteps <= self.steps",
            message="optimizer.warmupSteps must not be greater than steps",
            holds=lambda engine: engine.optimizer.warmup_steps <= engine.steps,
        ),
        Rule(
            cel="!has(self.lengthWarmup) || (self.lengthWarmup.steps <= self.steps && "
            "self.lengthWarmup.start <= self.data.sequenceLength)",
            message="lengthWarmup.steps must not be greater than steps, nor lengthWarmup.start than data.sequenceLength",
            field_path=".lengthWarmup",
            holds=lambda engine: (
                engine.length_warmup is None
                or (
                    engine.length_warmup.steps <= engine.steps
                    and engine.length_warmup.start <= engine.data.sequence_length
                )
            ),
        ),
        Rule(
            cel="!has(self.lengthWarmup) || !has(self.parallelism) || self.parallelism.sequence == 1",
            message="processes that share sequences have parts of one length; remove lengthWarmup, or parallelism.sequence",
            field_path=".lengthWarmup",
            holds=lambda engine: engine.length_warmup is None or engine.processes_per_sequence == 1,
        ),
        Rule(
            cel="!has(self.layerDrop) || !has(self.parallelism) || (self.parallelism.sequence == 1 && "
            "self.parallelism.sharding != 'parameters')",
            message="layerDrop does not go with processes that share sequences or divide weights, which take part in every block; "
            "remove it, or set parallelism.sharding: gradients, and sequence: 1",
            field_path=".layerDrop",
            holds=lambda engine: (
                engine.layer_drop is None
                or engine.parallelism is None
                or (
                    engine.parallelism.sequence == 1
                    and engine.parallelism.sharding is not Sharding.PARAMETERS
                )
            ),
        ),
        Rule(
            cel="!has(self.layerDrop) || !(has(self.adapter) || has(self.adapters))",
            message="layerDrop trains the blocks of a model, and an adapter leaves them as they are; remove one of the two",
            field_path=".layerDrop",
            holds=lambda engine: engine.layer_drop is None or not engine.has_adapters,
        ),
        Rule(
            cel="!has(self.layerDrop) || !has(self.optimizer) || self.optimizer.name != 'ZerothOrder'",
            message="optimizer.name: ZerothOrder compares losses of whole models; remove layerDrop",
            field_path=".layerDrop",
            holds=lambda engine: (
                engine.layer_drop is None or engine.optimizer.name is not OptimizerName.ZEROTH_ORDER
            ),
        ),
        Rule(
            cel="!has(self.optimizer) || self.optimizer.name != 'ZerothOrder' || !has(self.gradientSums) || "
            "self.gradientSums == 'weights'",
            message="optimizer.name: ZerothOrder has no gradients to add up; remove gradientSums",
            field_path=".gradientSums",
            holds=lambda engine: (
                engine.optimizer.name is not OptimizerName.ZEROTH_ORDER
                or engine.gradient_sums is GradientSums.WEIGHTS
            ),
        ),
        Rule(
            cel="!has(self.optimizer) || self.optimizer.name != 'ZerothOrder' || "
            "((!has(self.mode) || self.mode != 'optimizer-offload') && !has(self.scratchDisk) && "
            "(!has(self.activations) || self.activations == 'auto'))",
            message="optimizer.name: ZerothOrder has no state that could move and keeps no activations; set mode: auto, resident or "
            "parameter-offload, and remove scratchDisk and activations",
            field_path=".optimizer.name",
            holds=lambda engine: (
                engine.optimizer.name is not OptimizerName.ZEROTH_ORDER
                or (
                    engine.mode is not EngineMode.OPTIMIZER_OFFLOAD
                    and engine.scratch_disk is None
                    and engine.activations is Activations.AUTO
                )
            ),
        ),
        Rule(
            cel="!has(self.state) || self.state == 'exact' || !has(self.optimizer) || "
            "((!has(self.optimizer.name) || self.optimizer.name != 'ZerothOrder') && "
            "(!has(self.optimizer.betas) || self.optimizer.betas[1] <= 0.99))",
            message="state: bf16 and int8 are of AdamW's moments, with optimizer.betas[1] of at most 0.99, as a slower decay would "
            "be rounded away; set state: exact, or this optimizer",
            field_path=".state",
            holds=lambda engine: (
                engine.state is StateFormat.EXACT
                or (
                    engine.optimizer.name is OptimizerName.ADAMW and engine.optimizer.betas[1] <= LARGEST_BETA
                )
            ),
        ),
        Rule(
            cel="!has(self.scratchDisk) || !has(self.mode) || self.mode in ['auto', 'parameter-offload']",
            message="scratchDisk takes state of mode parameter-offload only; set this mode, or auto, or remove scratchDisk",
            field_path=".scratchDisk",
            holds=lambda engine: (
                engine.scratch_disk is None or engine.mode in (EngineMode.AUTO, EngineMode.PARAMETER_OFFLOAD)
            ),
        ),
        Rule(
            cel="!has(self.mode) || !has(self.activations) || self.mode != 'parameter-offload' || "
            "self.activations != 'keep'",
            message="mode: parameter-offload recomputes activations; remove activations: keep",
            holds=lambda engine: (
                engine.mode is not EngineMode.PARAMETER_OFFLOAD or engine.activations is not Activations.KEEP
            ),
        ),
    )

    model: ModelSource = Field(description="Which model.")
    tokenizer: TokenizerSource | None = Field(
        default=None, description="The tokenizer; default the one in the folder of model.uri."
    )
    adapter: Adapter | None = Field(
        default=None, description="Train a LoRA adapter of the model; default all of its weights."
    )
    adapters: (
        Annotated[
            list[NamedAdapter],
            Field(
                min_length=1,
                max_length=MOST_ADAPTERS,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Train several LoRA adapters of the model one after another, each as a job of its own would, in the memory "
        "of one.",
    )
    freeze: Annotated[list[ParameterPattern], Field(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="Patterns of the names of parameters that are not trained, as the model's own code names them, e.g. "
        "[model.embed_tokens.*, 'model.layers.[0-3].*']: * is any text, ? one character, [...] one of those in it. "
        "Tied weights are frozen if one of their names matches; default none.",
    )
    data: DataSource = Field(description="The training text.")
    steps: Steps = Field(
        description="Optimizer steps of the whole run; a later run with more steps continues a finished one."
    )
    batch: Batch = Field(
        default_factory=Batch, description="Size of one step.", json_schema_extra={"default": {}}
    )
    optimizer: Optimizer = Field(
        default_factory=Optimizer, description="Optimizer and schedule.", json_schema_extra={"default": {}}
    )
    parallelism: Parallelism | None = Field(
        default=None, description="How the pods of a gang share a step; default order fast."
    )
    dtype: Dtype = Field(default=Dtype.FLOAT32, description="Type of weights and arithmetic.")
    mode: EngineMode = Field(
        default=EngineMode.AUTO,
        description="resident keeps everything on the device; optimizer-offload keeps the optimizer's state in "
        "host memory; parameter-offload keeps the weights there too, updates them there, and has a few blocks at a time "
        "on the device; auto lets the scheduler choose.",
    )
    activations: Activations = Field(
        default=Activations.AUTO,
        description="keep holds the activations of a micro-batch until backward; recompute holds only the inputs of the "
        "blocks and computes the rest again, with equal results in about 4/3 of the time; swap does so and has these inputs in "
        "host memory until backward, for the longest sequences; auto takes the first of them that fits.",
    )
    loss: TileForm = Field(
        default=TileForm.WHOLE,
        description="whole has all logits of a micro-batch at once; tiled those of 256 tokens at a time, which backward "
        "computes again: for long sequences and large vocabularies. Its sums are rounded differently, and equal on every "
        "placement.",
    )
    mlp: TileForm = Field(
        default=TileForm.WHOLE,
        description="whole computes the MLPs of the blocks for all tokens of a micro-batch at once; tiled for a sixteenth of "
        "them, at least 512, which backward computes again: for long sequences. Gradients are rounded differently, and "
        "equal on every placement.",
    )
    length_warmup: LengthWarmup | None = Field(
        default=None,
        description="Train on the beginnings of sequences at first, which takes less time, and on whole ones later. What is cut "
        "off is not trained on in that epoch. Absent: all steps have whole sequences.",
    )
    layer_drop: LayerDrop | None = Field(
        default=None,
        description="Leave blocks out of steps (progressive layer dropping): what is left out is not computed, not updated and not "
        "moved in that step, and what the others add counts so much more. Which ones is drawn from the seed. The result has "
        "all blocks. Absent: all steps have all blocks.",
    )
    gradient_sums: GradientSums = Field(
        default=GradientSums.WEIGHTS,
        description="Type in which the gradients of a step's micro-batches, and of pods, are added up: weights is that of the "
        "weights, in which bfloat16 loses the small terms of many micro-batches; float32 loses none of them, and takes "
        "two bytes more a trained parameter with bfloat16.",
    )
    schedule: UpdateSchedule = Field(
        default=UpdateSchedule.AUTO,
        description="gated runs the optimizer's updates beside the next forward pass, in which each block waits for its "
        "own update only; blocking ends a step when all of them are done; auto is gated where state is on the host. "
        "The results are equal bit for bit.",
    )
    state: StateFormat = Field(
        default=StateFormat.EXACT,
        description="Format of AdamW's moments. exact is float32, 8 bytes a parameter; bf16 takes 4 and int8, eight bits with a "
        "scale for every 256, 2.03. Reduced moments change the numbers, alike on every placement, and need "
        "optimizer.betas[1] of at most 0.99: one that decays more slowly would be rounded away.",
    )
    device_memory: Quantity | None = Field(
        default=None, description="Byte limit of the device arena where the device is a CPU, e.g. 256Mi."
    )
    scratch_disk: Quantity | None = Field(
        default=None,
        description="Disk for temporary files that optimizer state may take, e.g. 200Gi, in mode parameter-offload (or auto) as "
        "far as the host's memory is too small for it. Each step reads that state and writes it back; a disk on which "
        "that takes too long is refused. The pod asks for it beside shape.ephemeralStorage. Default none.",
    )
    threads: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None,
        description="CPU threads of the engine; default the cores that the pod requests, or those of the checkpoint "
        "from which the run continues: restarts are bit-equal only with the same number.",
    )
    seed: Seed = Field(default=0, description="Seed of the whole run.")
    max_bad_steps: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=10,
        description="End the run after this many steps in a row whose gradient norm is not finite. Such a step is "
        "skipped: it changes no weight.",
    )
    evaluation: Evaluation | None = Field(
        default=None, description="Evaluate on the held-out files at the end."
    )

    @property
    def has_adapters(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return self.adapter is not None or self.adapters is not None

    @property
    def unmerged(self) -> list[str]:
        """What its output has in place of a model: its adapters by name, or the one without a name by what it is."""
        if self.adapters is not None:
            return [each.name for each in self.adapters]
        return ["adapter"] if self.adapter is not None and not self.adapter.merge else []

    @property
    def runs(self) -> list[tuple[str, "TrainingEngine"]]:
        """What is trained, one after another: each of `adapters` by its name as a job of its own, or the whole, without one."""
        return [(each.name, self._alone(each)) for each in self.adapters or ()] or [("", self)]

    @property
    def processes_per_pod(self) -> int:
        """Processes of each pod."""
        return 1 if self.parallelism is None else self.parallelism.processes_per_pod

    @property
    def processes_per_sequence(self) -> int:
        """Processes that share each sequence."""
        return 1 if self.parallelism is None else self.parallelism.sequence

    @property
    def all_steps(self) -> int:
        """Optimizer steps of all that is trained."""
        return sum(each.steps for _, each in self.runs)

    def _alone(self, entry: NamedAdapter) -> "TrainingEngine":
        own = {
            "data": entry.data,
            "steps": entry.steps,
            "batch": entry.batch,
            "optimizer": entry.optimizer,
            "seed": entry.seed,
        }
        given = {name: value for name, value in own.items() if value is not None}
        fields = {name: getattr(entry, name) for name in Adapter.model_fields}
        adapter = Adapter.model_construct(**fields)  # checked already; 0 stays what it is
        return self.model_copy(update={"adapters": None, "adapter": adapter, **given})
