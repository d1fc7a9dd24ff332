"""In which engine mode a replica of our engine starts, by the accelerator that it is placed on: also what the mix prices it by.

The model's size is known where a TrainingJob that states its config made it. Elsewhere, and where `spec.args` choose how
weights are kept, nothing is chosen here: the engine refuses what does not fit, and names what would.
"""

from __future__ import annotations

from dataclasses import dataclass

from busbar.kube.types import AcceleratorPool, ModelService, quantity
from busbar.kube.types.engines import ServiceEngine
from busbar.operator.pools.nodes import memory_mib
from busbar.operator.profiles.table import Workload
from busbar.scheduler.autoscale.predicted import Place
from busbar.scheduler.fit.accelerators import accelerator
from busbar.scheduler.fit.model import ModelShape
from busbar.scheduler.fit.serving import USABLE, ModeChoice, ServingShape, choose_mode

CONTEXT = 2048
"""Tokens that a replica must hold at least, where spec.maxModelLen says nothing."""
OWN_CHOICE = ("--weights", "--weights-dtype", "--memory", "--dtype", "--device")


@dataclass(frozen=True, slots=True)
class Fit:
    """What a replica of a known model needs in a pool, and the mode that is chosen for it there."""

    model: ModelShape
    serving: ServingShape
    place: Place
    choice: ModeChoice


def engine_mode(
    service: ModelService, made_by: Workload | None, pool: AcceleratorPool | None
) -> ModeChoice | None:
    """None: not known, or not ours to choose."""
    found = engine_fit(service, made_by, pool)
    return None if found is None else found.choice


def engine_fit(service: ModelService, made_by: Workload | None, pool: AcceleratorPool | None) -> Fit | None:
    """The mode, and what it was chosen from; None as of `engine_mode`."""
    spec = service.spec
    if pool is None or made_by is None or made_by.model is None or made_by.batch is None:
        return None
    if spec.engine is not ServiceEngine.BUILTIN or any(
        word.partition("=")[0] in OWN_CHOICE for word in spec.args or ()
    ):
        return None
    device, memory = accelerator(pool.spec.accelerator), _memory_bytes(service, pool)
    if device is None or not memory:
        return None
    serving = ServingShape(
        context=spec.max_model_len or CONTEXT,
        weight_bytes=4 if device.name == "cpu" else made_by.batch.weight_bytes,
        kv_bytes=None if spec.kv_cache_memory is None else quantity.to_bytes(spec.kv_cache_memory),
    )
    choice = choose_mode(made_by.model, serving, device, memory)
    return Fit(made_by.model, serving, Place(device, memory, choice.mode), choice)


def _memory_bytes(service: ModelService, pool: AcceleratorPool) -> int:
    """Of one accelerator, which is all that the engine uses; of the pod on a CPU. 0: not known."""
    known = accelerator(pool.spec.accelerator)
    if known is not None and known.name == "cpu":
        asked = service.spec.shape.memory
        return 0 if asked is None else quantity.to_bytes(asked)
    return int(memory_mib(pool.spec) * 2**20 * USABLE)
