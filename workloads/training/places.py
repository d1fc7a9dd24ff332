"""Where a run reads and writes: claims are folders, in a pod as alone.

In a pod the claim `stdlib` is mounted at /artifacts/stdlib and the operator names the folders in variables.
Alone, claims are subfolders of one folder (`./claims`), so the same manifest works without Kubernetes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from busbar.kube.contracts.workload import Env
from busbar.kube.types.meta import claim_of
from busbar.workloads.training.durable import fsync
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.settings import EngineSpec


@dataclass(frozen=True)
class Places:
    output: Path
    checkpoints: Path
    model: Path | None  # saved weights to start from
    data: Path | None
    tokenizer: Path | None  # a saved tokenizer


def claim_folder(uri: str, claims: Path) -> Path:
    """The folder of `pvc://claim/path` under `claims`."""
    claim, path = claim_of(uri)
    return claims / claim / path


def find_places(
    spec: EngineSpec, output_uri: str, checkpoint_uri: str | None, claims: Path, given: Mapping[str, str]
) -> Places:
    """Folders of a run; `given` are the `BUSBAR_*_DIR` variables, which win over the URIs."""

    def folder(variable: str, uri: str | None) -> Path | None:
        if variable in given:
            return Path(given[variable])
        return None if uri is None else claim_folder(uri, claims)

    data_uri = None if spec.data.uri.startswith("builtin://") else spec.data.uri
    output = folder(Env.OUTPUT_DIR, output_uri)
    assert output is not None
    checkpoints = folder(Env.CHECKPOINT_DIR, checkpoint_uri) or output / "checkpoints"
    tokenizer = None if spec.tokenizer.uri is None else claim_folder(spec.tokenizer.uri, claims)
    if spec.tokenizer.uri is not None and spec.tokenizer.uri == spec.model.uri:
        tokenizer = folder(Env.MODEL_DIR, spec.model.uri)
    return Places(
        output=output,
        checkpoints=checkpoints,
        model=folder(Env.MODEL_DIR, spec.model.uri) if spec.model.uri else None,
        data=folder(Env.DATA_DIR, data_uri) if data_uri else None,
        tokenizer=tokenizer,
    )


def check_places(places: Places) -> None:
    """Say early and plainly when a folder is missing or cannot be written. Raises InvalidJob."""
    for field, folder, needed in (
        ("spec.engine.model.uri", places.model, "config.json"),
        ("spec.engine.tokenizer.uri", places.tokenizer, "tokenizer.json"),
    ):
        if folder is not None and not (folder / needed).is_file():
            raise InvalidJob(field, f"{folder} holds no {needed}", "name a folder that save_pretrained wrote")
    for field, folder in (("spec.output.uri", places.output), ("spec.checkpoint.uri", places.checkpoints)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK)
        except OSError as problem:
            raise InvalidJob(
                field, f"{folder} cannot be made: {problem}", "choose another folder"
            ) from problem
        if not writable:
            raise InvalidJob(field, f"{folder} is not writable", "check the claim's permissions (fsGroup)")


def claim_checkpoints(checkpoints: Path, run: str) -> bool:
    """Make `checkpoints` the folder of `run`; what another run left there is moved to `<name>.previous`.

    A job that is deleted and made again under the same name keeps its output but must not resume from it.
    Returns whether something was moved. One earlier generation is kept.
    """
    owner = checkpoints / "run.json"
    moved = False
    if owner.exists() and _run_of(owner) != run:
        previous = checkpoints.with_name(checkpoints.name + ".previous")
        shutil.rmtree(previous, ignore_errors=True)
        checkpoints.rename(previous)
        moved = True
    checkpoints.mkdir(parents=True, exist_ok=True)
    if not owner.exists():
        temporary = checkpoints / ".tmp-run.json"
        temporary.write_text(json.dumps({"run": run}))
        fsync(temporary)  # lost or empty after a power cut, it would make the checkpoints a stranger's
        temporary.rename(owner)
        fsync(checkpoints)
        fsync(checkpoints.parent)
    return moved


def _run_of(owner: Path) -> str | None:
    try:
        return str(json.loads(owner.read_text())["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
