"""The engine's input: a pod's variables, or a manifest on disk. Read once and turned into a `Run`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from busbar.kube.contracts.workload import ARTIFACTS_ROOT, TERMINATION_LOG, Env
from busbar.workloads.machine.limits import usable_processors
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import (
    checkpoint_policy,
    engine_runs,
    parse_checkpoint,
    parse_job,
    parse_runs,
)
from busbar.workloads.training.paths import Places, find_places, newest_facts
from busbar.workloads.training.run import Run
from busbar.workloads.training.settings import EngineSpec
from busbar.workloads.training.world import ALONE, World, world_of

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def run_from_pod(environment: Mapping[str, str]) -> Run:
    """The run that the operator described in `environment`. Raises InvalidJob."""
    document = dict(_json(environment, Env.SPEC))
    mode = environment.get(Env.MODE)
    if mode and mode != "auto":
        document["mode"] = mode  # what the scheduler chose for this pool
    runs = parse_runs(document)
    policy = parse_checkpoint(_json(environment, Env.CHECKPOINT, {}))
    if Env.OUTPUT_DIR not in environment:
        raise InvalidJob(Env.OUTPUT_DIR, "is not set", "the operator sets it from spec.output.uri")
    scratch = Path(tempfile.gettempdir())  # on the node's disk, in a pod of the operator
    places = [
        replace(_places(part, spec, "pvc://output", None, Path(ARTIFACTS_ROOT), environment), scratch=scratch)
        for part, spec in runs
    ]
    name = f"{environment.get(Env.NAMESPACE, 'default')}/{environment.get(Env.JOB_NAME, 'job')}"
    owner = environment.get(Env.JOB_UID, name)
    world, cores = world_of(environment), usable_processors()
    if Env.CPU_MILLICORES in environment:
        cores = min(cores, int(environment[Env.CPU_MILLICORES]) // 1000)
    cores = max(1, cores // world.per_pod)
    return _joined(
        Run(
            spec=spec,
            checkpoint=policy,
            places=place,
            name=name,
            owner=owner,
            threads=_threads(spec, place, None if policy.adopt else owner, cores),
            attempt=int(environment.get(Env.ATTEMPT, "1")),
            replacement=int(environment.get(Env.REPLACEMENT, "0")),
            grace_s=float(environment[Env.GRACE_SECONDS]) if Env.GRACE_SECONDS in environment else None,
            termination_log=Path(TERMINATION_LOG) if world.speaks_for_pod else None,
            world=world,
            part=part,
        )
        for (part, spec), place in zip(runs, places, strict=True)
    )


def run_from_manifest(
    manifest: Any,
    claims: Path,
    output: Path | None,
    overrides: Mapping[str, Any],
    world: World = ALONE,
) -> Run:
    """The run that a TrainingJob manifest describes, on this machine alone. Raises InvalidJob."""
    given_spec = manifest.get("spec") if isinstance(manifest, dict) else None
    given_engine = given_spec.get("engine") if isinstance(given_spec, dict) else None
    if isinstance(given_engine, dict):
        given_engine.update({key: value for key, value in overrides.items() if value is not None})
    job = parse_job(manifest)
    if job.spec.engine is None or job.spec.output is None:
        raise InvalidJob(
            "spec.template", "an own image runs in a cluster only", "use `busbar apply`, or give spec.engine"
        )
    runs = engine_runs(job.spec.engine)
    given = {} if output is None else {Env.OUTPUT_DIR.value: str(output)}
    checkpoint_uri = None if output is not None else job.spec.checkpoint.uri
    uri, policy = job.spec.output.uri, checkpoint_policy(job.spec.checkpoint)
    places = [_places(part, spec, uri, checkpoint_uri, claims, given) for part, spec in runs]
    cores = max(1, usable_processors() // world.per_pod)
    owners = [f"local-{spec.identity}" for _, spec in runs]
    return _joined(
        Run(
            spec=spec,
            checkpoint=policy,
            places=place,
            name=job.metadata.name or "job",
            owner=owner,
            threads=_threads(spec, place, None if policy.adopt else owner, cores),
            attempt=1,
            world=world,
            part=part,
        )
        for (part, spec), place, owner in zip(runs, places, owners, strict=True)
    )


def _places(
    part: str,
    spec: EngineSpec,
    output_uri: str,
    checkpoint_uri: str | None,
    claims: Path,
    given: Mapping[str, str],
) -> Places:
    """The folders of one run; several adapters have subfolders of the output and of the checkpoints, and their texts are found
    by their addresses."""
    if part:
        given = {name: folder for name, folder in given.items() if name != Env.DATA_DIR}
    places = find_places(spec, output_uri, checkpoint_uri, claims, given)
    return replace(places, output=places.output / part, checkpoints=places.checkpoints / part)


def _joined(found: Iterable[Run]) -> Run:
    """The run; or that of several adapters, all with the threads of the first that goes on."""
    parts = tuple(found)
    if not parts[0].part:
        return parts[0]
    threads = next(
        (each.threads for each in parts if newest_facts(each.places.checkpoints, None)), parts[0].threads
    )
    parts = tuple(replace(each, threads=threads) for each in parts)
    return replace(parts[0], parts=parts)


def read_manifest(path: Path) -> Any:
    """The TrainingJob in a YAML file of one or more documents. Raises InvalidJob."""
    from busbar.kube.documents import DocumentError, documents_of_yaml

    try:
        documents = documents_of_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, DocumentError) as problem:
        raise InvalidJob(str(path), f"cannot be read: {problem}", "give a YAML file") from problem
    jobs = [item for item in documents if isinstance(item, dict) and item.get("kind") == "TrainingJob"]
    if len(jobs) != 1:
        raise InvalidJob(str(path), f"holds {len(jobs)} TrainingJobs", "give a file with exactly one")
    return jobs[0]


def _threads(spec: EngineSpec, places: Places, owner: str | None, cores: int) -> int:
    """The job's own number; else that of the run which goes on, for the same bits; else all `cores`."""
    if spec.threads is not None:
        return spec.threads
    known = newest_facts(places.checkpoints, owner).get("numerics")
    threads = known.get("threads") if isinstance(known, dict) else None
    return threads if isinstance(threads, int) and threads > 0 else cores


def fix_threads(threads: int) -> None:
    """Thread counts for the libraries that read them at import: before torch is imported."""
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything the engine reads is local
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable matrix products on a GPU


def _json(environment: Mapping[str, str], name: str, default: Any = None) -> Any:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise InvalidJob(name, "is not set", "the operator sets it; alone, use `busbar train job.yaml`")
        return default
    try:
        return json.loads(text)
    except ValueError as problem:
        raise InvalidJob(name, f"is not JSON: {problem}", "report it: the operator writes it") from problem
