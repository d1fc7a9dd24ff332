"""One step of training: forward and backward by micro-batches, then the optimizer.

All code that affects the numbers is here, in `groups` and in `optimizer`; no other module changes weights.
The loss of a step is the sum of its micro-batches' mean losses divided by their number, as in a plain loop.
"""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass

import torch

from busbar.workloads.training.activations import LiveBytes, known_tensors
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.checkpoint import Loaded
from busbar.workloads.training.groups import bind, make_groups, rebind_gradients
from busbar.workloads.training.model import ModelRecipe, check_causal
from busbar.workloads.training.optimizer import OffloadedAdamW, learning_rate
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.settings import EngineSpec
from busbar.workloads.training.snapshot import Snapshot
from busbar.workloads.training.streams import open_streams


@dataclass(frozen=True)
class StepResult:
    step: int  # finished steps, this one included
    loss: float
    gradient_norm: float  # not finite: the step was skipped and changed nothing
    learning_rate: float
    seconds: float
    tokens: int

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.gradient_norm)


class Trainer:
    """The model, its optimizer and their memory, as the plan laid them out."""

    def __init__(
        self,
        spec: EngineSpec,
        recipe: ModelRecipe,
        plan: MemoryPlan,
        device: torch.device,
        *,
        fused: bool = True,
    ) -> None:
        self.spec, self.plan, self.device = spec, plan, device
        self.model = recipe.build()  # on the host; the arenas take their memory as it moves out
        self.device_arena = Arena("device", plan.device, device, reserved=("activations",))
        self.host_arena = Arena("host", plan.host, torch.device("cpu"))
        if device.type == "cuda":
            self.host_arena.pin()
        self.model.train()
        groups = make_groups(self.model)
        self.groups = bind(groups, self.device_arena, recipe.dtype)
        _move_buffers(self.model, device)
        check_causal(self.model, recipe.config.vocab_size)
        self.streams = open_streams(device)
        self.optimizer = OffloadedAdamW(
            self.groups, spec.optimizer, plan, self.device_arena, self.host_arena, self.streams, fused=fused
        )
        self.snapshot = Snapshot(self.groups, self.optimizer, self.host_arena, plan)
        self.done = 0  # finished steps
        self.bad_in_a_row = 0  # the newest steps that were skipped

    def restore(self, loaded: Loaded) -> None:
        """Continue after the steps of a checkpoint."""
        self.snapshot.restore(loaded)
        self.done = loaded.step
        self.optimizer.updates = int(loaded.manifest["updates"])
        self.optimizer.skipped = int(loaded.manifest["skipped"])
        self.bad_in_a_row = int(loaded.manifest["badInARow"])

    def counters(self) -> dict[str, int]:
        """What a checkpoint must hold beside the tensors."""
        return {
            "updates": self.optimizer.updates,
            "skipped": self.optimizer.skipped,
            "badInARow": self.bad_in_a_row,
        }

    def step(self, data: Packed) -> StepResult:
        """Train on the batch of the next step."""
        started = time.monotonic()
        batch = self.spec.batch
        tokens = torch.from_numpy(data.batch(self.done, batch.sequences))
        rate = learning_rate(self.spec.optimizer, self.done, self.spec.steps)
        rebind_gradients(self.groups)
        loss = self._forward_and_backward(tokens)
        norm = self.optimizer.step(rate)
        value = float(loss)
        self.done += 1
        seconds = time.monotonic() - started
        result = StepResult(self.done, value, norm, rate, seconds, tokens.numel())
        self.bad_in_a_row = self.bad_in_a_row + 1 if result.skipped else 0
        return result

    def _forward_and_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = torch.split(tokens, self.spec.batch.micro_batch)
        total = torch.zeros((), device=self.device)
        for part in parts:
            if self.device_arena.peak["activations"] == 0:  # measure once what the plan only predicted
                with LiveBytes([*known_tensors(self.model), part]) as count:
                    total += self._micro_batch(part, len(parts))
                self.device_arena.observe("activations", max(1, count.peak))
            else:
                total += self._micro_batch(part, len(parts))
        return total

    def _micro_batch(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        there = tokens.to(self.device)
        loss: torch.Tensor = self.model(input_ids=there, labels=there, use_cache=False).loss / count
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def peak_host_bytes(self) -> int:
        """Largest resident set of this process so far; on a CPU it contains the device arena."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_device_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device))
        return self.device_arena.peak_bytes

    def close(self) -> None:
        self.streams.close()
        self.host_arena.unpin()


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Rotary tables and the like; the parameters are in the arena already."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
