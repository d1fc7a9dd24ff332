"""`busbar plan`: the memory that a job would need and its speed, for any machine.

Neither a GPU nor torch is needed: sizes come from the model's config, activations and speed from the formulas that
the scheduler admits by (`scheduler/fit`), and the layout from the engine's own `plan`. The engine measures the
activations of the very model on fake tensors, so its numbers are closer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from busbar.scheduler.fit import Accelerator, BatchShape, ModelShape
    from busbar.workloads.training.demand import Demand
    from busbar.workloads.training.division import Division
    from busbar.workloads.training.gang_plan import GangMachine, Network
    from busbar.workloads.training.plan import MemoryLimits, MemoryPlan
    from busbar.workloads.training.settings import Adapter, EngineSpec

EPILOG = """
Examples:

\b
  busbar plan job.yaml --gpu H200 --host 128Gi
  busbar plan job.yaml --gpu H200 --hbm 70Gi --host 64Gi
  busbar plan job.yaml --gpu H100 --longest
  busbar plan job.yaml --gpu A100 --host 256Gi --disk 3G
  busbar plan job.yaml --gpu H200 --host 128Gi --pods 4 --network 400Gbit
  busbar plan examples/train-python-stdlib.yaml

Exit code 0: the job's mode fits; 2: it does not, or the job cannot run as it is.
"""
MODES = ("resident", "optimizer-offload", "parameter-offload", "auto")


@dataclass(frozen=True)
class Machine:
    """The machine in question: an accelerator by name (`cpu`: none), the bytes of both memories, and the bytes per second of
    its disk; and what is between pods."""

    accelerator: Accelerator
    device_bytes: int | None
    host_bytes: int | None
    disk_bytes_per_s: int | None = None
    network: Network | None = None

    def limits(self, device_memory: int | None, scratch_disk: int = 0, processes: int = 1) -> MemoryLimits:
        """The bytes that the plan of one of so many processes may use: without those of Python, torch and the driver."""
        from busbar.scheduler.fit.memory import RUNTIME_BYTES
        from busbar.workloads.machine.limits import CUDA_RESERVE_BYTES, RESERVE_BYTES
        from busbar.workloads.training.plan import MemoryLimits

        on_cpu = self.accelerator.name == "cpu"
        whole = None if self.device_bytes is None else self.device_bytes - (0 if on_cpu else RUNTIME_BYTES)
        sizes = [size for size in (whole, device_memory) if size is not None]
        reserve = RESERVE_BYTES if on_cpu else CUDA_RESERVE_BYTES
        host = None if self.host_bytes is None else max(0, self.host_bytes // processes - reserve)
        return MemoryLimits(min(sizes, default=None), host, on_cpu, whole, scratch_disk)

    def disk_seconds(self, size: int, times: int = 1) -> float | None:
        """For the disk to move so many bytes so often; None: there are none, or its rate is not known."""
        if not size or self.disk_bytes_per_s is None:
            return None
        return times * size / self.disk_bytes_per_s


@click.command(
    epilog=EPILOG, help="Say what the job in JOB.YAML needs and how fast it would be, without running it."
)
@click.argument("job", metavar="JOB.YAML", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--gpu", metavar="NAME", default="cpu", help="Accelerator, such as H200.  [default: none, a CPU]"
)
@click.option("--hbm", metavar="QUANTITY", help="Its memory.  [default: by its data sheet]")
@click.option(
    "--host", metavar="QUANTITY", help="The host's memory for a pod of this job.  [default: not limited]"
)
@click.option(
    "--disk",
    metavar="QUANTITY",
    help="Bytes per second that its disk reads, and writes, such as 3G.  [default: not known]",
)
@click.option("--pods", type=click.IntRange(min=1), default=1, show_default=True, help="Pods of the gang.")
@click.option(
    "--network",
    metavar="RATE",
    help="Between pods, each way: 400Gbit, 25Gi (bytes per second), or a class such as infiniband-ndr.  [default: ethernet-25]",
)
@click.option(
    "--claims",
    default="claims",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that stands for the cluster's claims, where model.uri names one.",
)
@click.option("--longest", is_flag=True, help="Also find the longest sequence that fits, in each mode.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    job: Path,
    gpu: str,
    hbm: str | None,
    host: str | None,
    disk: str | None,
    pods: int,
    network: str | None,
    claims: Path,
    longest: bool,
    as_json: bool,
) -> None:
    from busbar.workloads.training.errors import TrainingError
    from busbar.workloads.training.plan_text import as_text

    try:
        answers = answers_for(job, machine_of(gpu, hbm, host, disk, network), pods, claims, longest=longest)
    except TrainingError as problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(2)
    fits = all(answer["fits"] for answer in answers.values())
    if as_json:
        several = {"fits": fits, "adapters": [{"name": name, **each} for name, each in answers.items()]}
        click.echo(json.dumps(answers.get("", several), indent=2))
    for name, answer in answers.items() if not as_json else ():
        click.echo(f"Adapter {name}, trained by itself:\n{as_text(answer)}\n" if name else as_text(answer))
    sys.exit(0 if fits else 2)


def answers_for(
    job: Path,
    machine: Machine,
    pods: int,
    claims: Path,
    *,
    longest: bool = False,
) -> dict[str, dict[str, Any]]:
    """The answer for each of the job's adapters by its name, or for all of it by the empty one. Raises TrainingError."""
    from busbar.workloads.training.environment import read_manifest
    from busbar.workloads.training.errors import InvalidJob
    from busbar.workloads.training.job import engine_runs, parse_job

    parsed = parse_job(read_manifest(job))
    if parsed.spec.engine is None:
        raise InvalidJob("spec.template", "an own image has no plan", "give spec.engine")
    memory = parsed.spec.checkpoint.memory
    parity = None if memory is None else memory.parity_of(pods)
    return {
        name: answer_for(spec, machine, pods, claims, parity=parity, longest=longest)
        for name, spec in engine_runs(parsed.spec.engine)
    }


def answer_for(
    spec: EngineSpec,
    machine: Machine,
    pods: int,
    claims: Path,
    *,
    parity: int | None = None,
    longest: bool = False,
) -> dict[str, Any]:
    """Each mode's plan and predicted speed, as JSON. Raises TrainingError.

    Args:
        parity: the state is copied into the pods' memory, and so many of them may be lost; None: it is not.
    """
    from busbar.scheduler.fit import unknown_patterns
    from busbar.scheduler.fit.speed import hiding_tokens
    from busbar.workloads.training.division import divide, divide_sequence
    from busbar.workloads.training.gang_plan import GangMachine, network_json
    from busbar.workloads.training.longest import longest_sequences
    from busbar.workloads.training.packing import TOKEN_BYTES, tokens_for
    from busbar.workloads.training.sizing import batch_shape

    batch = batch_shape(spec)
    shape, positions = _shape(spec, claims)
    processes = pods * spec.processes
    division = divide(spec.batch.sequences, spec.batch.micro_batch, processes, spec.order, spec.sequence)
    if spec.sequence > 1:
        divide_sequence(spec.data.sequence_length, shape.heads, shape.kv_heads, spec.sequence)

    needed = partial(_needed, spec, shape, division, parity)
    demand = needed(batch)
    limits = machine.limits(spec.device_memory_bytes, spec.scratch_disk_bytes, spec.processes)
    network = machine.network if pods > 1 else None
    gang = (
        None
        if processes == 1
        else GangMachine(machine.accelerator, network, spec.processes, machine.disk_bytes_per_s)
    )
    modes = {mode: _mode(mode, shape, batch, demand, limits, machine, division, gang) for mode in MODES}
    answer: dict[str, Any] = {
        "parameters": shape.parameters,
        "trainableParameters": _trainable(shape, spec),
        "adapter": None if spec.adapter is None else str(spec.adapter),
        "freeze": list(spec.freeze),
        "unknownPatterns": unknown_patterns(shape, spec.freeze),
        "accelerator": machine.accelerator.name,
        "pods": pods,
        "processesPerPod": spec.processes,
        "sharding": spec.sharding,
        "network": network_json(network),
        "memoryParity": parity,
        "processesPerSequence": spec.sequence,
        "deviceBytes": limits.device_bytes,
        "hostBytes": limits.host_bytes,
        "mode": spec.mode,
        "fits": modes[spec.mode]["fits"],
        **_choices(spec, shape, batch, demand),
        "modes": modes,
        "tokenBytes": TOKEN_BYTES * tokens_for(spec.steps, spec.batch.sequences, spec.data.sequence_length),
        "hidingTokens": hiding_tokens(shape, batch, machine.accelerator),
    }
    if longest:
        answer |= {"microBatch": spec.batch.micro_batch, "maxPositions": positions}
        answer["longest"] = longest_sequences(
            lambda way, tokens: needed(replace(batch, sequence_length=tokens, activations=way)),
            limits,
            MODES,
            spec.sequence,
        )
    return answer


def _needed(
    spec: EngineSpec, shape: ModelShape, division: Division, parity: int | None, batch: BatchShape
) -> Demand:
    """What each process of a job needs."""
    from busbar.workloads.training.demand import COPIES

    whole = demand_of(
        shape, batch, evaluates=spec.evaluation is not None, adapter=spec.adapter, schedule=spec.schedule
    )
    if parity is not None:
        whole = replace(whole, memory_copies=COPIES, parity=parity * spec.processes)
    return over_ranks(whole, division, spec.sharding)


def _choices(spec: EngineSpec, shape: ModelShape, batch: BatchShape, demand: Demand) -> dict[str, Any]:
    """What the job says of activations, logits and state, and the bytes of each thing that it could say."""
    from busbar.scheduler.fit.memory import block_activations, mask_bytes
    from busbar.scheduler.fit.speed import compute_ratio
    from busbar.workloads.training.demand import KEEP, MOMENT_BYTES, RECOMPUTE
    from busbar.workloads.training.settings import TILED, WHOLE, WITHIN

    return {
        "activations": {
            "asked": spec.activations,
            "keptBytes": demand.activation_bytes,
            "recomputedBytes": demand.recompute_bytes,
            "swappedBytes": demand.swap_bytes,
            "onHostBytes": demand.swapped_bytes,
            "computeRatio": compute_ratio(
                shape, replace(batch, activations=KEEP), replace(batch, activations=RECOMPUTE)
            ),
        },
        "logits": {
            "asked": spec.loss,
            "wholeBytes": _logit_bytes(shape, replace(batch, loss=WHOLE)),
            "tiledBytes": _logit_bytes(shape, replace(batch, loss=TILED)),
            "computeRatio": compute_ratio(shape, replace(batch, loss=WHOLE), replace(batch, loss=TILED)),
        },
        "mlp": {
            "asked": spec.mlp,
            "wholeBytes": block_activations(shape, replace(batch, mlp=WHOLE))[1],
            "tiledBytes": block_activations(shape, replace(batch, mlp=TILED))[1],
            "computeRatio": compute_ratio(shape, replace(batch, mlp=WHOLE), replace(batch, mlp=TILED)),
        },
        "packing": {
            "asked": spec.data.packing,
            "maskBytes": mask_bytes(replace(batch, packing=WITHIN))[0],
        },
        "state": {
            "asked": spec.state,
            "bytes": {
                each: replace(demand, state=each).state_size(demand.parameters) for each in MOMENT_BYTES
            },
        },
    }


def machine_of(
    gpu: str,
    hbm: str | None = None,
    host: str | None = None,
    disk: str | None = None,
    network: str | None = None,
) -> Machine:
    """Memory that is not stated is the data sheet's; of a CPU, and of the host, it is not known. Raises InvalidJob."""
    from busbar.scheduler.fit import DATA_SHEETS, accelerator
    from busbar.workloads.training.errors import InvalidJob
    from busbar.workloads.training.gang_plan import network_of

    found = accelerator(gpu)
    if found is None:
        raise InvalidJob("--gpu", f"{gpu} is not known", f"name one of {', '.join(DATA_SHEETS)}")
    on_data_sheet = None if found.name == "cpu" else found.memory_mib * 2**20
    return Machine(
        found,
        _bytes("--hbm", hbm) if hbm else on_data_sheet,
        _bytes("--host", host) if host else None,
        _bytes("--disk", disk) if disk else None,
        network_of(network),
    )


def _trainable(shape: ModelShape, spec: EngineSpec) -> int:
    from busbar.scheduler.fit import frozen_parameters
    from busbar.workloads.training.adapter_size import parameters

    if spec.adapter is not None:
        return parameters(shape, spec.adapter)
    return shape.parameters - frozen_parameters(shape, spec.freeze)


def demand_of(
    shape: ModelShape,
    batch: BatchShape,
    *,
    evaluates: bool = False,
    adapter: Adapter | None = None,
    schedule: str = "auto",
) -> Demand:
    """The engine's demand of a model of this shape: the same groups, each parameter at full size.

    The activations are those of full training, which are more than those beside frozen weights. Frozen are the
    parameters whose sizes are known from their names. Raises InvalidJob where nothing is left.
    """
    from busbar.scheduler.fit import freezes_all, frozen_parts
    from busbar.scheduler.fit.memory import (
        activations,
        exchanged_parts,
        forward_activations,
        logit_rows,
        part_bytes,
        swapped_activations,
    )
    from busbar.workloads.training import adapter_size
    from busbar.workloads.training.demand import KEEP, RECOMPUTE, SWAP, Demand, GroupSize
    from busbar.workloads.training.errors import InvalidJob
    from busbar.workloads.training.settings import FLOAT32

    table = shape.vocabulary * shape.hidden
    head = shape.hidden + (0 if shape.tied else table)
    blocks = {f"block-{index}": shape.layer_parameters for index in range(shape.layers)}
    frozen = frozen_parts(shape, batch.freeze)
    trained = {
        part: size - frozen.get(part, 0)
        for part, size in {"embedding": table, **blocks, "head": head}.items()
    }
    groups = tuple(GroupSize(part, _grain(size)) for part, size in trained.items() if size > 0)
    if freezes_all(shape, batch.freeze):
        raise InvalidJob(
            "spec.engine.freeze",
            "leaves nothing to train, as its patterns match every parameter",
            "take one of them out",
        )
    alone = replace(batch, sequence_parallel=1)
    evaluation = 8 * logit_rows(alone) * shape.vocabulary  # logits, and their softmax
    kept, recomputed, swapped = (
        activations(shape, replace(batch, activations=way)) for way in (KEEP, RECOMPUTE, SWAP)
    )
    if batch.is_zeroth_order:
        kept = recomputed = swapped = forward_activations(shape, batch)
    demand = Demand(
        groups or (GroupSize("head", _grain(1)),),  # biases
        batch.dtype,
        batch.micro_batch,
        kept,
        evaluation if evaluates else 0,
        frozen_bytes=sum(frozen.values()) * batch.weight_bytes,
        frozen_in_blocks={part: size * batch.weight_bytes for part, size in frozen.items() if part in blocks},
        writes_frozen=bool(batch.freeze),
        part_bytes=part_bytes(shape, batch),
        gathers_result=adapter is not None or part_bytes(shape, batch) is None,
        activations=batch.activations,
        recompute_bytes=recomputed,
        swap_bytes=swapped,
        swapped_bytes=swapped_activations(shape, batch),
        gradient_dtype=FLOAT32 if batch.gradient_bytes == 4 else "",
        sequence_bytes=exchanged_parts(shape, batch),
        state=batch.state,
        zeroth_order=batch.is_zeroth_order,
        schedule=schedule,
    )
    if adapter is None:
        return demand
    return replace(
        demand,
        groups=adapter_size.group_sizes(shape, adapter),
        frozen_bytes=shape.parameters * batch.weight_bytes,
        frozen_in_blocks={part: size * batch.weight_bytes for part, size in blocks.items()},
        merge_bytes=adapter_size.merge_bytes(shape, adapter, batch.weight_bytes),
    )


def over_ranks(demand: Demand, division: Division, sharding: str) -> Demand:
    """What one of the ranks needs that share each step."""
    from busbar.workloads.training.demand import GroupSize
    from busbar.workloads.training.division import FIXED

    ranks = division.ranks * division.sequence
    unit = 1024 * ranks
    return replace(
        demand,
        groups=tuple(GroupSize(each.name, -(-each.parameters // unit) * unit) for each in demand.groups),
        ranks=ranks,
        fixed_order=division.order == FIXED,
        partial_sums=division.partial_sums,
        leaf_size=division.leaf_size,
        sharding=sharding,
    )


def _grain(parameters: int) -> int:
    return -(-parameters // 1024) * 1024


def _mode(
    mode: str,
    shape: ModelShape,
    batch: BatchShape,
    demand: Demand,
    limits: MemoryLimits,
    machine: Machine,
    division: Division,
    gang: GangMachine | None,
) -> dict[str, Any]:
    from busbar.workloads.training.choice import closest, make_plan
    from busbar.workloads.training.demand import own_checkpoint_bytes
    from busbar.workloads.training.disk_plan import too_slow
    from busbar.workloads.training.errors import InfeasiblePlan, InvalidJob

    try:
        made = make_plan(demand, limits, mode)
    except InvalidJob as refusal:
        return {"fits": False, "plan": None, "why": str(refusal), "fixes": []}
    except InfeasiblePlan as refusal:
        nearest = closest(demand, limits, mode).to_json()
        return {"fits": False, "plan": nearest, "why": refusal.why, "fixes": list(refusal.fixes)}
    on_disk = machine.disk_seconds(made.disk_bytes, 2)
    if on_disk is not None and (hopeless := too_slow(made, on_disk)) is not None:
        return {"fits": False, "plan": made.to_json(), "why": hopeless.why, "fixes": list(hopeless.fixes)}
    used = replace(batch, activations=made.activations)
    step = _step(shape, used, made, demand, machine, division, gang)
    whole = -(-own_checkpoint_bytes(demand) // made.snapshot_block_bytes)
    return {
        "fits": True,
        "plan": made.to_json(),
        **step,
        "tokensPerSecond": batch.tokens / step["secondsPerStep"],
        "checkpointBlocks": made.snapshot_blocks < whole,
        "diskSecondsPerStep": on_disk,
        "checkpointSeconds": machine.disk_seconds(made.checkpoint_bytes),
    }


def _step(
    shape: ModelShape,
    batch: BatchShape,
    made: MemoryPlan,
    demand: Demand,
    machine: Machine,
    division: Division,
    gang: GangMachine | None,
) -> dict[str, Any]:
    from busbar.scheduler.fit.speed import step_seconds
    from busbar.workloads.training.gang_plan import step_of_gang

    if gang is not None:
        return step_of_gang(gang, shape, batch, made, demand, division)
    seconds = step_seconds(
        shape,
        batch,
        made.mode,
        machine.accelerator,
        share=made.offloaded_fraction,
        slots=made.slots,
        gated=made.gated,
    )
    return {"secondsPerStep": seconds}


def _logit_bytes(shape: ModelShape, batch: BatchShape) -> int:
    """Logits that exist at a time, their softmax and their gradient."""
    from busbar.scheduler.fit.memory import logit_rows

    return 12 * logit_rows(batch) * shape.vocabulary


def _bytes(option: str, text: str) -> int:
    from busbar.kube.types.quantity import to_bytes
    from busbar.workloads.training.errors import InvalidJob

    try:
        size = to_bytes(text)
    except ValueError as problem:
        raise InvalidJob(option, f"{text} is no quantity", "write it as 139Gi") from problem
    if size < 1:
        raise InvalidJob(option, f"{text} is nothing", "write an amount such as 139Gi, or leave it out")
    return size


def _shape(spec: EngineSpec, claims: Path) -> tuple[ModelShape, int | None]:
    """Its dimensions, and the positions that it knows, if it says so."""
    from busbar.scheduler.fit import ModelShape
    from busbar.workloads.training.errors import InvalidJob
    from busbar.workloads.training.paths import claim_folder

    where = "spec.engine.model.config"
    try:
        if spec.model.config is not None:
            config = {"vocab_size": spec.tokenizer.vocab_size, **spec.model.config}
        else:
            where = "spec.engine.model.uri"
            path = claim_folder(spec.model.uri or "", claims) / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError(f"{path} is no object")
        shape = ModelShape.from_config(config)
    except OSError as problem:
        raise InvalidJob(
            where,
            f"the model's size cannot be read: {problem.filename}: {problem.strerror}",
            f"put the model's config.json there, or name with --claims the folder that stands for the claims (now {claims})",
        ) from problem
    except (RecursionError, ValueError) as problem:
        raise InvalidJob(
            where, f"has no size that is known: {problem}", "give a config with these fields"
        ) from problem
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    return shape, positions if isinstance(positions, int) else None
