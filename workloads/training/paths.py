"""Where a run reads and writes: claims are folders, in a pod as alone.

In a pod the claim `stdlib` is mounted at /artifacts/stdlib and the operator names the folders in variables.
Alone, claims are subfolders of one folder (`./claims`), so the same manifest works without Kubernetes.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busbar.kube.contracts.workload import Env
from busbar.kube.types.meta import claim_of
from busbar.workloads.training.durable import fsync, replace_text
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.settings import EngineSpec


@dataclass(frozen=True)
class Places:
    output: Path
    checkpoints: Path
    model: Path | None  # saved weights to start from
    data: Path | None  # a file or a folder
    data_root: Path | None  # which links in `data` must not leave
    tokenizer: Path | None  # a saved tokenizer
    scratch: Path | None = None  # for temporary files; None: beside the checkpoints


def claim_folder(uri: str, claims: Path) -> Path:
    """The folder of `pvc://claim/path` under `claims`."""
    claim, path = claim_of(uri)
    return claims / claim / path


def claim_root(uri: str, place: Path) -> Path:
    """The claim in which `place` is what `uri` names; the folder itself where it is mounted by another name."""
    parts = Path(claim_of(uri)[1]).parts
    if parts and place.parts[-len(parts) :] == parts:
        return place.parents[len(parts) - 1]
    return place


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
    data = folder(Env.DATA_DIR, data_uri) if data_uri else None
    return Places(
        output=output,
        checkpoints=checkpoints,
        model=folder(Env.MODEL_DIR, spec.model.uri) if spec.model.uri else None,
        data=data,
        data_root=claim_root(spec.data.uri, data) if data is not None else None,
        tokenizer=tokenizer,
    )


def check_places(places: Places, *, keeps_model: bool = False) -> None:
    """Say early and plainly when a folder is missing or cannot be written. Raises InvalidJob.

    Args:
        keeps_model: the output must not replace the model from which training starts.
    """
    if keeps_model and places.model is not None and places.model.resolve() == places.output.resolve():
        raise InvalidJob(
            "spec.output.uri",
            f"{places.output} is the folder of the model that the adapter or the frozen weights belong to, which the "
            "result would replace",
            "choose another folder",
        )
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


@dataclass(frozen=True)
class Claimed:
    """What was moved so that the folder of checkpoints is this run's."""

    moved: Path | None = None  # where another run's checkpoints are now
    brought_back: Path | None = None  # where this run's were


def claim_checkpoints(checkpoints: Path, run: str, *, adopt: bool = False) -> Claimed:
    """Make `checkpoints` the folder of `run`, with its own checkpoints if they had been moved aside.

    A job that is deleted and made again under the same name keeps its output but must not resume from it, unless
    it is told to `adopt` what is there. Nothing is ever deleted: the name is `<name>.previous`, `.previous-2`, ...
    """
    owner = checkpoints / "run.json"
    claimed = Claimed()
    if owner.exists() and _run_of(owner) != run and not adopt:
        claimed = Claimed(_free_name(checkpoints), own_folder(checkpoints, run))
        assert claimed.moved is not None
        checkpoints.rename(claimed.moved)
        if claimed.brought_back is not None:
            claimed.brought_back.rename(checkpoints)
    checkpoints.mkdir(parents=True, exist_ok=True)
    if not owner.exists():
        own_checkpoints(checkpoints, run)
    return claimed


def own_folder(checkpoints: Path, run: str) -> Path | None:
    """Where the checkpoints of `run` are: in `checkpoints`, or moved aside for another run's."""
    beside = checkpoints.parent.glob(f"{glob.escape(checkpoints.name)}.previous*")
    folders = [checkpoints, *sorted(beside)]
    return next((folder for folder in folders if _run_of(folder / "run.json") == run), None)


def own_checkpoints(checkpoints: Path, run: str) -> None:
    """Write down that `checkpoints` are those of `run`; for adopted ones, once they are known to fit."""
    # Lost or empty after a power cut, it would make the checkpoints a stranger's.
    replace_text(checkpoints / "run.json", json.dumps({"run": run}))
    fsync(checkpoints.parent)


def _free_name(checkpoints: Path) -> Path:
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (checkpoints.with_name(f"{checkpoints.name}.previous{number}") for number in numbers)
    return next(name for name in names if not name.exists())


def free_disk(checkpoints: Path) -> int:
    """Bytes free there, with those of the checkpoints that this run will replace."""
    own = sum(file.stat().st_size for file in checkpoints.glob("step-*/*"))
    return shutil.disk_usage(checkpoints).free + own


def newest_facts(checkpoints: Path, run: str | None) -> Mapping[str, Any]:
    """What the manifest of the newest checkpoint of `run` (None: of any) says; nothing where there is none."""
    folder = checkpoints if run is None else own_folder(checkpoints, run)
    manifests = [] if folder is None else sorted(folder.glob("step-*/manifest.json"), reverse=True)
    for manifest in manifests:
        try:
            return dict(json.loads(manifest.read_text())["body"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def _run_of(owner: Path) -> str | None:
    try:
        return str(json.loads(owner.read_text())["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
