"""From a TrainingJob to a run's settings. The kinds' models define what is valid; this module names the invalid field.

In a cluster the API server has checked the manifest against the CRD, which is generated from the same models;
for a stand-alone run no server has. Facts that only the engine knows (whether the corpus exists) are checked here
too. Every refusal names the field's path, what is wrong, and what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from busbar.kube.types.checkpoint import CheckpointPolicy as CheckpointFields
from busbar.kube.types.quantity import to_bytes
from busbar.kube.types.rules import refusals
from busbar.kube.types.training_data import BadRow
from busbar.kube.types.training_data import DataFields as RowFields
from busbar.kube.types.training_data import DataSource as DataFields
from busbar.kube.types.training_engine import TrainingEngine
from busbar.kube.types.training_job import TrainingJob
from busbar.kube.types.training_sections import Adapter as AdapterFields
from busbar.kube.types.training_sections import Order, Sharding, without_integral_floats
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.settings import (
    ACROSS,
    EXACT,
    WEIGHTS,
    WHOLE,
    Adapter,
    Batch,
    CheckpointPolicy,
    DataSource,
    EngineSpec,
    Evaluation,
    Fields,
    LayerDrop,
    LengthWarmup,
    ModelSource,
    OptimizerSpec,
    TokenizerSource,
)

BUILTIN_CORPORA = ("builtin://python-stdlib",)
DEFAULT_EVERY_STEPS = 50
DEFAULT_ORDER, DEFAULT_SHARDING = Order.FAST.value, Sharding.OPTIMIZER.value
DEFAULTS = (
    ("parallelism.order", DEFAULT_ORDER),
    ("parallelism.sequence", 1),
    ("data.packing", ACROSS),
    ("loss", WHOLE),
    ("mlp", WHOLE),
    ("gradientSums", WEIGHTS),
    ("state", EXACT),
    ("optimizer.perturbation", 1e-3),
)
# Fields that change nothing in the numbers by design, and two for which a checkpoint has a place of its own.
_NEUTRAL = {
    "mode",
    "activations",
    "schedule",
    "deviceMemory",
    "scratchDisk",
    "evaluation",
    "maxBadSteps",
    "steps",
    "threads",
    "adapter.merge",
    "parallelism.sharding",
    "parallelism.processesPerPod",
    "data.onBadRow",  # a run that goes on met none, or left them out from the start
}

M = TypeVar("M", bound=BaseModel)


def parse_job(manifest: Any) -> TrainingJob:
    """Check a whole manifest. Raises InvalidJob."""
    job = _validated(TrainingJob, manifest, "")
    for field, sentence in refusals(job):
        problem, _, remedy = sentence.partition("; ")
        raise InvalidJob(field, problem, remedy)
    return job


def parse_engine(document: Any, path: str = "spec.engine") -> EngineSpec:
    """Check `spec.engine`. Raises InvalidJob."""
    return engine_spec(_validated(TrainingEngine, document, path), path)


def parse_runs(document: Any, path: str = "spec.engine") -> list[tuple[str, EngineSpec]]:
    """What `spec.engine` trains, one after another: its adapters by name, or one run without a name. Raises InvalidJob."""
    return engine_runs(_validated(TrainingEngine, document, path), path)


def engine_runs(engine: TrainingEngine, path: str = "spec.engine") -> list[tuple[str, EngineSpec]]:
    """The same of an engine that is checked. Raises InvalidJob."""
    names = [each.name for each in engine.adapters or ()]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidJob(f"{path}.adapters[{number}].name", f"is {name} again", "give each its own name")
    return [
        (name, engine_spec(alone, f"{path}.adapters[{number}]" if name else path))
        for number, (name, alone) in enumerate(engine.runs)
    ]


def parse_checkpoint(document: Any, path: str = "spec.checkpoint") -> CheckpointPolicy:
    """Check `spec.checkpoint`. Raises InvalidJob."""
    return checkpoint_policy(_validated(CheckpointFields, document, path))


def checkpoint_policy(fields: CheckpointFields) -> CheckpointPolicy:
    nothing = fields.every_steps is None and fields.every_seconds is None
    return CheckpointPolicy(
        every_steps=DEFAULT_EVERY_STEPS if nothing else fields.every_steps,
        every_seconds=fields.every_seconds,
        keep=fields.keep,
        adopt=fields.adopt,
        memory=fields.memory,
    )


def engine_spec(engine: TrainingEngine, path: str = "spec.engine") -> EngineSpec:
    """The settings of a run of this engine. Raises InvalidJob for what the schema cannot know."""
    _check_model(engine, path)
    _check_corpus(engine, path)
    optimizer, tokenizer = engine.optimizer, engine.tokenizer
    wire = engine.to_wire()
    settings = {
        path: value
        for path, value in _flat(wire)
        if path not in _NEUTRAL
        and path.partition(".")[0] not in _NEUTRAL
        and (path, value) not in DEFAULTS  # as if they were left out
    }
    patterns = tuple(sorted(set(engine.freeze or ())))
    if patterns:
        settings["freeze"] = list(patterns)  # in which order they are given changes nothing
    trained = None if tokenizer is None or tokenizer.train is None else tokenizer.train.vocab_size
    saved = engine.model.uri if tokenizer is None else tokenizer.uri
    return EngineSpec(
        model=ModelSource(engine.model.config, engine.model.uri),
        tokenizer=TokenizerSource(trained, saved),
        data=_data(engine.data),
        steps=engine.steps,
        batch=Batch(engine.batch.sequences, engine.batch.micro_batch),
        optimizer=OptimizerSpec(
            learning_rate=optimizer.learning_rate,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            warmup_steps=optimizer.warmup_steps,
            schedule=optimizer.schedule.value,
            gradient_clip=optimizer.gradient_clip,
            name=optimizer.name.value,
            perturbation=optimizer.perturbation,
        ),
        dtype=engine.dtype.value,
        mode=engine.mode.value,
        device_memory_bytes=None if engine.device_memory is None else to_bytes(engine.device_memory),
        seed=engine.seed,
        threads=engine.threads,
        max_bad_steps=engine.max_bad_steps,
        evaluation=None if engine.evaluation is None else Evaluation(engine.evaluation.ngram_order),
        settings=settings,
        identity=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        adapter=None if engine.adapter is None else _adapter(engine.adapter),
        freeze=patterns,
        activations=engine.activations.value,
        loss=engine.loss.value,
        mlp=engine.mlp.value,
        length_warmup=None
        if (warmup := engine.length_warmup) is None
        else LengthWarmup(warmup.start, warmup.steps),
        layer_drop=None if (drop := engine.layer_drop) is None else LayerDrop(drop.keep, drop.rate),
        gradient_sums=engine.gradient_sums.value,
        state=engine.state.value,
        schedule=engine.schedule.value,
        order=DEFAULT_ORDER if engine.parallelism is None else engine.parallelism.order.value,
        sequence=engine.processes_per_sequence,
        processes=engine.processes_per_pod,
        sharding=DEFAULT_SHARDING if engine.parallelism is None else engine.parallelism.sharding.value,
        scratch_disk_bytes=0 if engine.scratch_disk is None else to_bytes(engine.scratch_disk),
    )


def _adapter(adapter: AdapterFields) -> Adapter:
    return Adapter(
        rank=adapter.rank,
        alpha=adapter.rank if adapter.alpha is None else adapter.alpha,
        dropout=adapter.dropout,
        targets=None if adapter.targets is None else tuple(adapter.targets),
        rs_lora=adapter.rs_lora,
        dora=adapter.dora,
        merge=adapter.merge,
    )


def _data(data: DataFields) -> DataSource:
    return DataSource(
        uri=data.uri,
        holdout_fraction=data.holdout_fraction,
        sequence_length=data.sequence_length,
        format=None if data.format is None else data.format.value,
        fields=Fields() if data.fields is None else _names(data.fields),
        skips_bad_rows=data.on_bad_row is BadRow.SKIP,
        chat_template=data.chat_template,
        packing=data.packing.value,
    )


def _names(fields: RowFields) -> Fields:
    return Fields(fields.text, fields.prompt, fields.completion, fields.messages)


def _flat(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """`{"data": {"uri": u}}` as `("data.uri", u)`."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _check_model(engine: TrainingEngine, path: str) -> None:
    config = engine.model.config
    if config is None:
        return
    if not isinstance(config.get("model_type"), str):
        raise InvalidJob(
            f"{path}.model.config.model_type",
            "is missing",
            "name a transformers architecture such as llama or gpt2",
        )


def _check_corpus(engine: TrainingEngine, path: str) -> None:
    uri = engine.data.uri
    if uri.startswith("builtin://") and uri not in BUILTIN_CORPORA:
        raise InvalidJob(
            f"{path}.data.uri",
            f"there is no corpus {uri}",
            f"use {', '.join(BUILTIN_CORPORA)} or pvc://claim/folder",
        )


def _validated(model: type[M], document: Any, path: str) -> M:
    try:
        # As strict as the API server: by itself pydantic takes true for 1, and texts for numbers.
        model.model_validate_json(json.dumps(without_integral_floats(document), default=repr), strict=True)
        return model.model_validate(document)
    except ValidationError as problem:
        errors = problem.errors(include_url=False)
        first = errors[0]
        field = ".".join([path, _dotted(first["loc"])]).strip(".") or "manifest"
        more = f" (and {len(errors) - 1} more problems)" if len(errors) > 1 else ""
        what = first["msg"].removeprefix("Value error, ")
        shown = "" if isinstance(first["input"], dict) else f", not {first['input']!r:.80}"
        raise InvalidJob(field, f"{what[:1].lower()}{what[1:]}{shown}{more}", "correct it") from problem


def _dotted(location: Iterable[int | str]) -> str:
    """`("betas", 0)` as `betas[0]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
