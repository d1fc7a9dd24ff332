"""The seconds that a run will need: of a step, of waiting for checkpoints, and until one is durable. No torch here.

The step is that of `busbar.scheduler.fit.timeline`, from what is known of the machine (`Probe`), with the exchanges of a gang
(`busbar.scheduler.fit.exchange`). It assumes that the updates of a gated schedule take nothing from forward and backward,
as on a GPU; where the device is the host's CPU they share its cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from busbar.scheduler.fit.exchange import Exchanges, Links, Part, Sharing, beside, exchanges, sent_bytes
from busbar.scheduler.fit.timeline import Beside, GroupWork, Rates, step_time
from busbar.workloads.training.demand import Demand, GroupSize, chunk_sizes
from busbar.workloads.training.division import Division
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.settings import OPTIMIZER, PARAMETERS

AGREEMENTS = 2
"""Of a step, in which ranks tell each other a few numbers: the loss, and the norm."""
NO_EXCHANGES = Exchanges(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one micro-batch and of one update."""

    forward_s: float  # without a backward pass, of both points
    backward_s: float
    update_s: float
    parameters: int  # that are updated


@dataclass(frozen=True)
class Probe:
    """Of one machine, for one model: as it was measured (`probe`, `gang_probe`), or as data sheets say (`gang_plan`)."""

    block: PassTimes
    around: PassTimes  # embedding, head and loss, and what a step costs whatever is in it
    load_bytes_per_s: float  # both directions while both are used
    store_bytes_per_s: float
    disk_bytes_per_s: float  # of one process, while the others of its gang write too
    links: Links | None = None  # between the ranks of a gang


@dataclass(frozen=True)
class Prediction:
    """Seconds; of a gang those of one rank."""

    step_s: float
    compute_s: float  # of a step: forward and backward
    waited_s: float  # of a step: for updates and exchanges
    stall_s: float  # of a checkpoint: for room in its buffers, by the updates of the step beside it
    durable_s: float  # of a checkpoint, from the step that asks for it
    exchange_s: float = 0.0  # of a step: in which ranks exchange gradients and weights
    exposed_s: float = 0.0  # of them those that no computation hides
    sent_bytes: int = 0  # that a rank hands over in a step

    def to_json(
        self, step_s: float | None = None, stall_s: float | None = None, durable_s: float | None = None
    ) -> dict[str, Any]:
        """For the status, beside what was measured."""
        return {
            "predicted": {"step": self.step_s, "stall": self.stall_s, "durable": self.durable_s},
            "measured": {"step": step_s, "stall": stall_s, "durable": durable_s},
            "ratio": None if not step_s else round(self.step_s / step_s, 3),
        }

    def explain(self) -> str:
        exchanged = (
            f"; {self.sent_bytes / 2**20:.4g} MiB go to the other ranks in {self.exchange_s:.3g} s, of which "
            f"{self.exposed_s:.3g} are waited for"
            if self.sent_bytes
            else ""
        )
        return (
            f"predicted: {self.step_s:.3g} s per step, {self.compute_s:.3g} of them forward and backward{exchanged}; a "
            f"checkpoint is durable after {self.durable_s:.3g} s and holds training up for {self.stall_s:.3g}"
        )


def sharing_of(demand: Demand, division: Division) -> Sharing:
    """How the ranks of `demand` share a step."""
    whole = division.sequence == 1  # ranks that share sequences exchange these meanwhile
    return Sharing(
        demand.ranks,
        demand.divided,
        rounds=most_micro_batches(division),
        gradient_bytes=demand.gradient_element_bytes,
        weight_bytes=demand.weight_bytes,
        gradients_beside=demand.divided == OPTIMIZER and len(division.own(0)) == 1 and whole,
        weights_beside=demand.divided != PARAMETERS and whole,
    )


def most_micro_batches(division: Division) -> int:
    """Of a step, those of the rank that has the most."""
    return -(-division.micro_batches // division.ranks)


def units_of(demand: Demand) -> list[GroupSize]:
    """What is exchanged at once, in forward order: the groups, and of divided weights the blocks of which nothing is trained."""
    if demand.divided != PARAMETERS:
        return list(demand.groups)
    trained = {group.name for group in demand.groups}
    others = [GroupSize(name, 0) for name in demand.frozen_in_blocks if name not in trained]

    def place(group: GroupSize) -> float:
        ends = {"embedding": -1.0, "head": math.inf}
        return int(group.name.removeprefix("block-")) if group.is_block else ends[group.name]

    return sorted([*demand.groups, *others], key=place)


def parts_of(demand: Demand) -> list[Part]:
    """The same as the formulas of exchanges take it."""
    inside = demand.frozen_in_blocks if demand.divided == PARAMETERS else {}
    return [Part(unit.parameters, unit.is_block, inside.get(unit.name, 0)) for unit in units_of(demand)]


def predict(plan: MemoryPlan, demand: Demand, probe: Probe, division: Division) -> Prediction:
    """Of each of the ranks of `demand`, or of one process without others; raises ValueError where the probe of a gang has
    not measured what is between its ranks."""
    if demand.ranks > 1 and probe.links is None:
        raise ValueError("what is between the ranks was not measured")
    sharing = sharing_of(demand, division)
    exchanged, shared = [NO_EXCHANGES] * len(units_of(demand)), Beside()
    if probe.links is not None and demand.ranks > 1:
        exchanged = exchanges(parts_of(demand), sharing, probe.links)
        shared = beside(sharing, probe.links)
    groups = _works(plan, demand, probe, sharing.rounds, exchanged)
    alone = _works(plan, demand, probe, sharing.rounds, [NO_EXCHANGES] * len(exchanged))
    blocks = sum(group.is_block for group in demand.groups)
    update_s = blocks * probe.block.update_s + probe.around.update_s  # of all parameters
    rates = Rates(
        probe.load_bytes_per_s,
        probe.store_bytes_per_s,
        demand.parameters / max(update_s, 1e-9),
        norm_s=0.0 if probe.links is None else AGREEMENTS * probe.links.weights.latency_s,
    )
    state = demand.state_bytes_per_parameter
    step = step_time(groups, plan.slots, state, rates, gated=plan.gated, beside=shared)
    without = step_time(alone, plan.slots, state, rates, gated=plan.gated)
    own = plan.checkpoint_bytes / demand.ranks
    held = plan.snapshot_blocks * plan.snapshot_block_bytes
    stall = (own - held) / probe.disk_bytes_per_s - without.compute_s
    return Prediction(
        step.seconds,
        without.compute_s,
        step.seconds - without.compute_s,
        max(0.0, stall),
        own / probe.disk_bytes_per_s,
        exchange_s=sum(each.whole_s for each in exchanged),
        exposed_s=max(0.0, step.seconds - without.seconds),
        sent_bytes=sent_bytes(parts_of(demand), sharing),
    )


def _works(
    plan: MemoryPlan, demand: Demand, probe: Probe, micro_batches: int, exchanged: Sequence[Exchanges]
) -> list[GroupWork]:
    """Of each group, what one rank has to do."""
    outer = [group.name for group in demand.groups if not group.is_block]
    found = []
    for group, exchange in zip(units_of(demand), exchanged, strict=True):
        if not group.parameters:
            found.append(_work(None, (), False, micro_batches, exchange))
            continue
        chunks = tuple(chunk_sizes(group.parameters // demand.ranks, plan.chunk_parameters))
        # what stands around the blocks was measured as one: most of its time is the output's and the loss's
        times = probe.block if group.is_block else probe.around if group.name == outer[-1] else None
        found.append(_work(times, chunks, group.name in plan.offloaded, micro_batches, exchange))
    if not outer:  # nothing around the blocks is trained, and it is computed all the same
        found.append(_work(probe.around, (), False, micro_batches, NO_EXCHANGES))
    return found


def _work(
    times: PassTimes | None, chunks: tuple[int, ...], travels: bool, micro_batches: int, exchange: Exchanges
) -> GroupWork:
    forward_s, last_s = (0.0, 0.0) if times is None else (times.forward_s, times.backward_s)
    later = (micro_batches - 1) * (forward_s + last_s)
    return GroupWork(
        forward_s,
        last_s + later + exchange.inside_s,
        chunks,
        travels,
        gather_s=exchange.gather_s,
        reduce_s=exchange.reduce_s,
        last_backward_s=last_s,
    )
