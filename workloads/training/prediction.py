"""The seconds that a run will need: of a step, of waiting for checkpoints, and until one is durable. No torch here.

The step is that of `busbar.scheduler.fit.timeline`, from what `probe` measured. It assumes that the updates of a gated
schedule take nothing from forward and backward, as on a GPU; where the device is the host's CPU they share its cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from busbar.scheduler.fit.timeline import GroupWork, Rates, step_time
from busbar.workloads.training.plan import Demand, MemoryPlan, chunk_sizes

if TYPE_CHECKING:
    from busbar.workloads.training.probe import PassTimes, Probe


@dataclass(frozen=True)
class Prediction:
    """Seconds."""

    step_s: float
    compute_s: float  # of a step: forward and backward
    waited_s: float  # of a step: for updates
    stall_s: float  # of a checkpoint: for room in its buffers, by the updates of the step beside it
    durable_s: float  # of a checkpoint, from the step that asks for it

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
        return (
            f"predicted: {self.step_s:.3g} s per step, {self.compute_s:.3g} of them forward and backward; a checkpoint "
            f"is durable after {self.durable_s:.3g} s and holds training up for {self.stall_s:.3g}"
        )


def predict(plan: MemoryPlan, demand: Demand, probe: Probe, micro_batches: int) -> Prediction:
    """Of one process without others, which is what the probe measured."""
    outer = [group.name for group in demand.groups if not group.is_block]
    blocks = len(demand.groups) - len(outer)
    groups = []
    for group in demand.groups:
        chunks = tuple(chunk_sizes(group.parameters, plan.chunk_parameters))
        # what stands around the blocks was measured as one: most of its time is the output's and the loss's
        times = probe.block if group.is_block else probe.around if group.name == outer[-1] else None
        groups.append(_work(times, chunks, group.name in plan.offloaded, micro_batches))
    update_s = blocks * probe.block.update_s + probe.around.update_s
    rates = Rates(probe.load_bytes_per_s, probe.store_bytes_per_s, demand.parameters / max(update_s, 1e-9))
    step = step_time(groups, plan.slots, demand.state_bytes_per_parameter, rates, gated=plan.gated)
    durable = plan.checkpoint_bytes / probe.disk_bytes_per_s
    held = plan.snapshot_blocks * plan.snapshot_block_bytes
    stall = (plan.checkpoint_bytes - held) / probe.disk_bytes_per_s - step.compute_s
    return Prediction(step.seconds, step.compute_s, step.waited_s, max(0.0, stall), durable)


def _work(times: PassTimes | None, chunks: tuple[int, ...], travels: bool, micro_batches: int) -> GroupWork:
    if times is None:
        return GroupWork(0.0, 0.0, chunks, travels)
    later = (micro_batches - 1) * (times.forward_s + times.backward_s)
    return GroupWork(times.forward_s, times.backward_s + later, chunks, travels)
