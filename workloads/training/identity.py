"""What a checkpoint belongs to: only a run with the same settings, data and untrained weights goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from busbar.workloads.training.chat import ChatTemplate
from busbar.workloads.training.corpus import Corpus
from busbar.workloads.training.division import FIXED
from busbar.workloads.training.errors import ResumeRefused
from busbar.workloads.training.export import digest_of
from busbar.workloads.training.gang import weights_sum
from busbar.workloads.training.preparation import Prepared
from busbar.workloads.training.saved_model import weights_identity

if TYPE_CHECKING:
    from busbar.workloads.training.plan import MemoryPlan
    from busbar.workloads.training.run import Run
    from busbar.workloads.training.settings import EngineSpec
    from busbar.workloads.training.trainer import Trainer

FORMAT = 3  # of checkpoints and of the order of the data
_FACTS = {
    "corpus": "corpus",
    "tokenizer": "tokenizer",
    "chatTemplate": "chat template",
    "base": "base model",
    "frozen": "frozen weights",
}


def facts_of(
    run: Run, corpus: Corpus, prepared: Prepared, device: torch.device, trainer: Trainer
) -> dict[str, Any]:
    """What is written into every checkpoint of the run; all ranks of a gang call it."""
    base = None if run.spec.adapter is None else run.places.model  # whose weights are not in its checkpoints
    template = ChatTemplate(run.places.tokenizer, run.spec.data.chat_template)
    return {
        "format": FORMAT,
        "identity": run.spec.identity,
        "settings": dict(run.spec.settings),
        "numerics": _numerics(run, device),
        "corpus": corpus.digest,
        "tokenizer": prepared.tokenizer_hash,
        "chatTemplate": template.digest if corpus.has_rows else None,
        "base": None if base is None else weights_identity(base),
        "frozen": _frozen_digest(trainer) if run.spec.freeze else None,  # nor are these
        "attempt": run.attempt,
    }


def _frozen_digest(trainer: Trainer) -> str:
    return digest_of(
        (name, whole) for name, parameter, whole in trainer.weights() if not parameter.requires_grad
    )


def same_plan(spec: EngineSpec, plan: MemoryPlan) -> dict[str, Any]:
    """What the ranks of a gang must have alike before they make the model: settings, placement and division."""
    return {
        **{f"settings {path}": value for path, value in spec.settings.items()},
        "parallelism.sharding": spec.sharding,
        "plan": [plan.mode, plan.activations, *plan.offloaded],
    }


def same_on_all_ranks(facts: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """What they must have alike before the first step: facts and weights.

    In fast order ranks may have other threads and processors, whose last bits differ, but not another torch.
    """
    numerics = dict(facts.get("numerics", {}))
    if trainer.spec.order != FIXED:
        numerics = {"torch": numerics.get("torch")}
    return {
        **{name: value for name, value in facts.items() if name not in ("numerics", "settings")},
        **numerics,
        "weights": weights_sum(trainer.groups),
    }


def _numerics(run: Run, device: torch.device) -> dict[str, Any]:
    """What must stay as it is for a resumed run to repeat the bits of one that was never stopped."""
    on_cpu = device.type == "cpu"
    name = torch.backends.cpu.get_cpu_capability() if on_cpu else torch.cuda.get_device_name(device)
    return {"threads": run.threads, "torch": torch.__version__, "device": f"{device.type} {name}"}


def changed_numerics(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    before, now = manifest["numerics"], facts["numerics"]
    return [f"{key} was {before.get(key)} and is {now[key]}" for key in now if before.get(key) != now[key]]


def check_same_run(manifest: Mapping[str, Any], facts: Mapping[str, Any], folder: Path) -> None:
    """Raises ResumeRefused."""
    if manifest.get("format") != facts["format"]:
        raise ResumeRefused(
            f"the checkpoints in {folder} were written by another version of the engine; finish the run with that "
            "version, or use another output folder"
        )
    before, now = manifest["settings"], facts["settings"]
    changed = [
        f"{path} {before.get(path)!r} (now {now.get(path)!r})"
        for path in sorted({*before, *now})
        if before.get(path) != now.get(path)
    ]
    changed += [
        shown
        for name, shown in _FACTS.items()
        if manifest.get(name, facts[name]) != facts[name]  # older ones do not have all of them
    ]
    if changed:
        raise ResumeRefused(
            f"the checkpoints in {folder} belong to a run with another {' and '.join(changed)}; "
            "restore the old settings, or use another output folder, or remove these checkpoints"
        )
