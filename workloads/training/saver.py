"""The asynchronous side of checkpoints: copy at a step's end, write while training goes on.

The training loop is blocked for the copy only (`take`), plus for the rest of the previous write if that is
still going on: there is one snapshot buffer, and the plan has counted it. The copy is of views: weights from
the groups' flat buffers, state from wherever its chunks live, gathered per parameter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.checkpoint import CheckpointFolder, Loaded
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.groups import FlatGroup, members
from busbar.workloads.training.optimizer import OffloadedAdamW

LABELS = ("m", "v", "master")


class Snapshot:
    """Host copies of weights and optimizer state, one tensor per parameter and kind."""

    def __init__(self, groups: Sequence[FlatGroup], optimizer: OffloadedAdamW, host: Arena) -> None:
        self._groups, self._optimizer = groups, optimizer
        self.tensors: dict[str, torch.Tensor] = {}
        parts = 2 if groups[0].weights.dtype == torch.float32 else 3
        for flat in groups:
            elements = flat.group.elements
            weights = host.carve("checkpoint", elements, flat.weights.dtype)
            state = host.carve("checkpoint", elements * parts, torch.float32).view(parts, elements)
            for member in flat.group.members:
                extent = slice(member.start, member.start + member.parameter.numel())
                self.tensors[f"weights/{member.name}"] = weights[extent]
                for label, part in zip(LABELS, state, strict=False):
                    self.tensors[f"{label}/{member.name}"] = part[extent]

    def take(self) -> None:
        """Copy everything as it is now. Call between steps, when no update is under way."""
        for _, member in members(self._groups):
            self.tensors[f"weights/{member.name}"].copy_(member.parameter.detach().view(-1))
        for name, part, extent in self._optimizer.atoms():
            self.tensors[name][extent].copy_(part)

    def restore(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Put a checkpoint's tensors where this run's plan keeps them."""
        with torch.no_grad():
            for _, member in members(self._groups):
                member.parameter.detach().view(-1).copy_(loaded[f"weights/{member.name}"])
            for name, part, extent in self._optimizer.atoms():
                part.copy_(loaded[name][extent])


def random_states() -> dict[str, torch.Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"rng/cuda-{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(loaded: Loaded) -> None:
    torch.set_rng_state(loaded.tensors["rng/cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            state = loaded.tensors.get(f"rng/cuda-{index}")
            if state is not None:
                torch.cuda.set_rng_state(state, index)


class Saver:
    """Writes snapshots in a background thread, in which `before` and `on_durable(step, saved_at, size)` run."""

    def __init__(
        self,
        folder: CheckpointFolder,
        snapshot: Snapshot,
        facts: Mapping[str, Any],
        before: Callable[[], None],
        on_durable: Callable[[int, float, int], None],
    ) -> None:
        self._folder, self._snapshot, self._facts = folder, snapshot, facts
        self._before, self._on_durable = before, on_durable
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self.durable_step: int | None = None
        self.stalled_seconds = 0.0  # time the training loop lost to checkpoints

    def save(self, step: int) -> None:
        """Snapshot the state after `step` steps and start writing it.

        Raises what the previous write raised; this one has been started all the same.
        """
        if self.durable_step == step:
            return
        started = time.monotonic()
        failure = self._join()
        self._snapshot.take()
        tensors = {**self._snapshot.tensors, **random_states()}
        self._writer = threading.Thread(
            target=self._write, args=(step, tensors), name="checkpoint-writer", daemon=True
        )
        self._writer.start()
        self.stalled_seconds += time.monotonic() - started
        if failure is not None:
            raise failure

    def drain(self) -> None:
        """Wait until the last save is durable. Raises CheckpointError if it failed."""
        failure = self._join()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for a write under way; a run that fails keeps the checkpoint that it had begun."""
        self._join()

    def _join(self) -> CheckpointError | None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        return failure

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            self._before()
            size = self._folder.write(step, tensors, self._facts)
        except CheckpointError as problem:
            self._failure = problem
            return
        except Exception as problem:
            self._failure = CheckpointError(f"checkpoint of step {step} failed: {problem!r}")
            return
        self.durable_step = step
        self._on_durable(step, time.time(), size)
