"""One step of training: forward and backward by micro-batches, then the optimizer.

All code that affects the numbers is here, in `groups`, `spread`, `gradient_shards`, `norm` and `optimizer`; no other
module changes weights.
In the gated schedule `step` returns while its updates run, and the next forward pass waits for each group's own (see
`gates`). Who reads weights or state calls `drain` first. In the blocking one `step` does so itself.
Over several ranks, or in fixed order, `spread` shares the micro-batches.
The loss of a step is the sum of its micro-batches' mean losses divided by their number, as in a plain loop. Where
some tokens of the step are not learned, each micro-batch counts by its share of those that are, so that the loss is
the mean over them.
"""

from __future__ import annotations

import math
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from busbar.workloads.machine.direct_file import ScratchFile
from busbar.workloads.machine.streams import CallerStream, Streams, WorkerStream, open_streams
from busbar.workloads.training import documents, sequence_parallel, tiled_loss, tiled_mlp
from busbar.workloads.training.activations import LiveBytes, known_tensors
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.block_slots import BlockSlots
from busbar.workloads.training.demand import AGAIN, SWAP
from busbar.workloads.training.division import FIXED, divide
from busbar.workloads.training.first_weights import IN_MODEL, Source
from busbar.workloads.training.freeze import frozen
from busbar.workloads.training.gates import Gates
from busbar.workloads.training.gradient_shards import GradientShards
from busbar.workloads.training.groups import (
    FrozenBlock,
    bind,
    blocks,
    divide_frozen,
    frozen_outside,
    make_groups,
    rebind_gradients,
    settle,
)
from busbar.workloads.training.input_swap import InputSwap
from busbar.workloads.training.layer_drop import DroppedBlocks
from busbar.workloads.training.link_pace import LinkPace, has_link
from busbar.workloads.training.loaded import Loaded
from busbar.workloads.training.model import ModelRecipe, check_causal
from busbar.workloads.training.norm import Norm, ParameterNorm, RowNorm
from busbar.workloads.training.optimizer import OffloadedAdamW, Optimizer, learning_rate
from busbar.workloads.training.packing import IGNORED, Packed
from busbar.workloads.training.peer_slots import PeerSlots
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.ranks import Alone, Ranks
from busbar.workloads.training.recompute import recompute_blocks
from busbar.workloads.training.sequence_parallel import SequencePart, dividing
from busbar.workloads.training.settings import OPTIMIZER, PARAMETERS, ZEROTH_ORDER, EngineSpec
from busbar.workloads.training.snapshot import Snapshot
from busbar.workloads.training.spread import Spread
from busbar.workloads.training.step_clock import StepClock
from busbar.workloads.training.tiled_loss import loss_of, run_forward
from busbar.workloads.training.zeroth_order import Perturbation, ZerothOrder

Scale = Callable[[torch.Tensor], torch.Tensor]  # of a micro-batch's mean loss to its share of the step's


class MicroBatch(NamedTuple):
    """Of a step; tensors are [rows, length]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    scale: Scale
    positions: torch.Tensor | None = None  # in their documents; None: attention sees all of a row


@dataclass(frozen=True)
class StepResult:
    step: int  # finished steps, this one included
    loss: float
    gradient_norm: float  # not finite: the step was skipped and changed nothing
    learning_rate: float
    seconds: float
    tokens: int
    whole: bool = True  # its sequences

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
        ranks: Ranks | None = None,
        streams: Streams | None = None,
        swap_streams: Streams | None = None,
        scratch: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Streams are those of the device, unless they are given (`swap_streams`: for inputs of blocks on the host, apart from
        the others); `scratch` is the folder for state on disk; `clock` tells the seconds of the host."""
        ranks = ranks or Alone()
        self.spec, self.plan, self.device, self._now = spec, plan, device, clock
        source: Source = IN_MODEL
        if plan.sharding == PARAMETERS:
            self.model, source = recipe.build_in_parts()
        else:
            self.model = recipe.build()  # on the host; the arenas take their memory as it moves out
        self.device_arena = Arena("device", plan.device, device, reserved=("activations",))
        self.host_arena = Arena("host", plan.host, torch.device("cpu"), reserved=("copies",))
        if device.type == "cuda":
            self.host_arena.pin()
        self.model.train()
        streamed = plan.weight_slots > 0
        self.streams = streams or open_streams(device, gated=plan.gated, on_host=streamed)
        self.link: LinkPace | None = None
        if has_link(device):
            self.link = LinkPace(self.streams, device, clock)
            self.streams = self.link.streams
        home = self.host_arena if streamed else self.device_arena  # of weights and gradients
        self._frozen: dict[int, FrozenBlock] = {}
        if plan.sharding == PARAMETERS:
            settle(frozen_outside(self.model), home, source)
            self._frozen = divide_frozen(self.model, home, source, ranks.rank, ranks.size)
        elif not streamed:
            settle(frozen(self.model), home)
        groups = make_groups(self.model, ranks.size)
        zeroth_order = spec.optimizer.name == ZEROTH_ORDER
        self.groups = bind(
            groups,
            home,
            recipe.dtype,
            ranks.rank,
            ranks.size,
            plan.sharding,
            gradients=not zeroth_order,
            sums=recipe.gradient_dtype,
            source=source,
        )
        _move_buffers(self.model, device)
        self.clock = StepClock(device, clock)
        self.perturbation: Perturbation | None = None  # None: steps have a backward pass
        if zeroth_order:
            self.perturbation = Perturbation(self.model, self.groups, plan, self.device_arena)
        self.swap = self._make_swap(swap_streams)
        self.blocks = self._make_blocks()
        if self.perturbation is not None:
            self.perturbation.watch(self.model)
        self.sequence = self._make_sequence(ranks)
        self.peers = self._make_peers(ranks)
        self._check_model(recipe.config.vocab_size, ranks)
        if self.blocks is not None:
            self.blocks.reset()
        elif self.peers is None and plan.activations in AGAIN:
            recompute_blocks(self.model, self.swap)
        # Around all others that take over the blocks, so that these see the blocks that are kept alone.
        dropping = spec.layer_drop  # None: all steps have all blocks
        self.drop = None if dropping is None else DroppedBlocks(self.model, dropping, spec.seed)
        self.spread = self._make_spread(ranks)
        if self.sequence is not None:
            self.sequence.take(self.device_arena.carve_rest("exchange"))
        norm: Norm = ParameterNorm(self.groups) if self.spread is None else RowNorm(self.groups, ranks)
        self.disk: ScratchFile | None = None  # None: no state is there
        self.optimizer = self._make_optimizer(home, norm, scratch, fused=fused)
        self.gates = self._make_gates()
        self.snapshot = Snapshot(self.groups, self.optimizer, self.host_arena, plan)
        self._gathered = False  # after the last step
        self.done = 0  # finished steps
        self.bad_in_a_row = 0  # the newest steps that were skipped

    def _make_blocks(self) -> BlockSlots | None:
        """None: the weights are on the device."""
        if self.plan.weight_slots == 0:
            return None
        arenas = self.device_arena, self.host_arena
        slots = BlockSlots(self.model, self.groups, self.plan, *arenas, self.streams, self.clock, self.swap)
        slots.refresh()
        return slots

    def _make_sequence(self, ranks: Ranks) -> SequencePart | None:
        """None: sequences are whole on this rank."""
        if self.spec.sequence == 1:
            return None
        part = SequencePart(ranks.neighbours(self.spec.sequence))
        sequence_parallel.attach(self.model, part)
        return part

    def _make_peers(self, ranks: Ranks) -> PeerSlots | None:
        """None: the weights are whole on this rank."""
        if self.groups[0].has_whole_weights:
            return None
        again = self.plan.activations in AGAIN
        return PeerSlots(
            self.model,
            self.groups,
            ranks,
            self.device_arena,
            recomputes=again,
            swap=self.swap,
            frozen=self._frozen,
        )

    def _check_model(self, vocabulary: int, ranks: Ranks) -> None:
        """Refuses a model that does something else in the ways that were asked for; all ranks call it."""
        length, apart = self.spec.data.sequence_length, self.spec.data.keeps_documents_apart
        sequence_parallel.check(self.model, vocabulary, length, ranks.most, documents=apart)
        check_causal(self.model, vocabulary)
        if apart:
            with sequence_parallel.as_it_was(self.model):
                documents.check(self.model, vocabulary)
        tiled_loss.check(self.model, vocabulary)
        tiled_mlp.check(self.model, vocabulary)

    def _make_swap(self, streams: Streams | None) -> InputSwap | None:
        """None: inputs of the blocks stay on the device."""
        if self.plan.activations != SWAP:
            return None
        room = self.host_arena.carve("activations", self.plan.host["activations"], torch.uint8)
        queues = streams or open_streams(self.device, gated=False)
        return InputSwap(room, len(blocks(self.model)) - 1, queues, self.clock)

    def _make_spread(self, ranks: Ranks) -> Spread | None:
        """None: the plain loop's order, in one process."""
        batch, order = self.spec.batch, self.spec.order
        if ranks.size == 1 and order != FIXED:
            return None
        division = divide(batch.sequences, batch.micro_batch, ranks.size, order, self.spec.sequence)
        shards = None
        if self.plan.sharding != OPTIMIZER:
            hooks = () if self.peers is None else (self.peers.before_backward, self.peers.pass_by)
            shards = GradientShards(ranks, division, self.groups, self.device_arena, self.model, *hooks)
        return Spread(ranks, division, self.groups, self.device_arena, self.spec.seed, shards, self.model)

    def _make_optimizer(self, home: Arena, norm: Norm, scratch: Path | None, *, fused: bool) -> Optimizer:
        plan, settings, queues = self.plan, self.spec.optimizer, self.streams
        if self.perturbation is not None:
            return ZerothOrder(self.groups, settings, plan, home, queues, self.spec.seed)
        if plan.on_disk:
            self.disk = ScratchFile(scratch or Path(tempfile.gettempdir()), plan.disk_bytes)
            queues = replace(queues, load=WorkerStream("read"), store=WorkerStream("write"))
        return OffloadedAdamW(
            self.groups, settings, plan, home, self.host_arena, queues, fused=fused, norm=norm, disk=self.disk
        )

    def _make_gates(self) -> Gates:
        if self.blocks is not None:  # the host waits for updates that run there
            return Gates(self.model, self.groups, CallerStream(), self.blocks.arrive, self.clock)
        if self.peers is not None:
            return Gates(self.model, self.groups, self.streams.compute, self.peers.updated, self.clock)
        if self.spread is None or self.spread.ranks.size == 1:
            return Gates(self.model, self.groups, self.streams.compute, clock=self.clock)
        # Ranks that share sequences exchange them in the forward pass, and NCCL wants one order.
        ahead = self.spec.sequence == 1
        gather = self.spread.gather_weights
        return Gates(self.model, self.groups, self.streams.compute, gather, self.clock, ahead=ahead)

    def restore(self, loaded: Loaded) -> None:
        """Continue after the steps of a checkpoint."""
        self.snapshot.restore(loaded)
        if self.blocks is not None:
            self.blocks.refresh()
        if self.peers is not None:
            self.peers.refresh()
        elif self.spread is not None:
            for flat in self.groups:
                self.spread.gather_weights(flat).wait()
        self.done = loaded.step
        self.optimizer.updates = int(loaded.manifest["updates"])
        self.optimizer.skipped = int(loaded.manifest["skipped"])
        self.optimizer.missed = Counter(loaded.manifest.get("missedUpdates", {}))
        self.bad_in_a_row = int(loaded.manifest["badInARow"])

    def counters(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the tensors."""
        return {
            "updates": self.optimizer.updates,
            "skipped": self.optimizer.skipped,
            "badInARow": self.bad_in_a_row,
            **({"missedUpdates": dict(self.optimizer.missed)} if self.optimizer.missed else {}),
        }

    @property
    def length(self) -> int:
        """Tokens of a sequence in the next step."""
        whole, warmup = self.spec.data.sequence_length, self.spec.length_warmup
        return whole if warmup is None else warmup.length(self.done, whole)

    def micro_batches(self, data: Packed) -> list[MicroBatch | None]:
        """Those of the next step; None in the place of one from which nothing is learned."""
        batch = self.spec.batch
        tokens = torch.from_numpy(data.batch(self.done, batch.sequences))[:, : self.length].contiguous()
        labels = data.labels(self.done, batch.sequences)
        wanted = None if labels is None else torch.from_numpy(labels)[:, : self.length].contiguous()
        parts = list(_micro_batches(tokens, wanted, batch.micro_batch))
        if not self.spec.data.keeps_documents_apart:
            return parts
        places = torch.from_numpy(data.positions(self.done, batch.sequences))[:, : self.length].contiguous()
        return [
            None if part is None else part._replace(positions=own)
            for part, own in zip(parts, torch.split(places, batch.micro_batch), strict=True)
        ]

    def step(self, data: Packed) -> StepResult:
        """Train on the batch of the next step."""
        started = self._now()
        self.clock.begin()
        length, parts, left_out = self.length, self.micro_batches(data), self._left_out()
        rate = learning_rate(self.spec.optimizer, self.done, self.spec.steps)
        rebind_gradients(self.groups)
        if self.plan.gated:
            self.optimizer.prefetch(left_out)
        self.clock.ended("other")
        loss: float | torch.Tensor
        if self.perturbation is not None:
            loss = self._losses_of_two_points(self.perturbation, parts)
        elif self.spread is None:
            loss = self._forward_and_backward(parts)
            self.gates.reach_all()
        else:
            loss = self.spread.gradients(
                self.done, parts, self._measured, self.gates.reach_all, self._stand_by, left_out
            )
            self.clock.ended("exchange")
        if self.blocks is not None:
            self.blocks.collect()
        norm, done = self.optimizer.step(rate, left_out)
        if self.blocks is not None:
            self.blocks.updated(done, () if self.drop is None else self.drop.of(self.done + 1))
        self.gates.shut(done, left_out)
        value = float(loss)
        if not self.plan.gated:
            self.optimizer.drain() if self.gates.ahead else self.drain()
        self.clock.ended("update")
        self.clock.finish()
        self.done += 1
        seconds = self._now() - started
        tokens = self.spec.batch.sequences * length
        whole = length == self.spec.data.sequence_length
        result = StepResult(self.done, value, norm, rate, seconds, tokens, whole)
        self.bad_in_a_row = self.bad_in_a_row + 1 if result.skipped else 0
        return result

    def _left_out(self) -> frozenset[str]:
        """The groups that the next step leaves out, which begins."""
        if self.drop is None:
            return frozenset()
        self.drop.begin(self.done)
        return self.drop.groups

    def drain(self) -> None:
        """Wait until weights and state are those after the last step; over several ranks all of them call it."""
        self.gates.reach_all()
        self.optimizer.drain()

    def _stand_by(self) -> None:
        """Take part in a forward pass that other ranks make, and this one does not."""
        if self.peers is not None:
            shape = self.spec.batch.micro_batch, self.length
            with torch.no_grad(), dividing(self.model):
                tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
                run_forward(self.model, tokens)
        self.gates.reach_all()

    @property
    def writes_in_turn(self) -> bool:
        """Whether whole weights are there one after another only, while all ranks go through `weights`."""
        return self.peers is not None and not self.plan.gathers_result

    def weights(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """All parameters in the order of their names, with their weights, which are whole until the next one comes; where they
        are divided, all ranks go through them."""
        for name, parameter in sorted(self.model.named_parameters()):
            whole = parameter.detach()
            if self.peers is not None and not self._gathered:
                whole = self.peers.read(parameter)
            yield name, parameter, whole

    def gather_whole(self) -> None:
        """Have the model hold whole weights on rank 0, after the last step, if it writes them so; all ranks call it."""
        if self.peers is None or not self.plan.gathers_result:
            return
        adapter = self.spec.adapter  # without its base, unless it is added to it
        target = torch.device("cpu") if self.groups[0].rank == 0 else None
        self.peers.whole(target, frozen=adapter is None or adapter.merge)
        self._gathered = True

    def _forward_and_backward(self, parts: Sequence[MicroBatch | None]) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for part in parts:
            if part is not None:
                total += self._measured(part)
        return total

    def _losses_of_two_points(
        self, perturbation: Perturbation, parts: Sequence[MicroBatch | None]
    ) -> torch.Tensor:
        """Tell a zeroth-order optimizer the losses on both sides of the weights; returns their mean."""
        assert isinstance(self.optimizer, ZerothOrder)
        direction, distance = self.optimizer.direction(self.done), self.spec.optimizer.perturbation
        found = []
        self.model.eval()  # both with the same dropout: none
        for signed in (distance, -distance):
            self.gates.reach_all()
            with torch.no_grad(), perturbation.along(direction, signed):
                found.append(self._forward_and_backward(parts))
        self.model.train()
        self.optimizer.compare(self.done, *found)
        return (found[0] + found[1]) / 2

    def _measured(self, part: MicroBatch) -> torch.Tensor:
        if self.device_arena.peak["activations"] > 0 or part.tokens.shape[1] < self.spec.data.sequence_length:
            return self._micro_batch(part)
        regions = [each for arena in (self.device_arena, self.host_arena) for each in arena.regions.values()]
        with LiveBytes(
            [*known_tensors(self.model), *regions, *(each for each in part if isinstance(each, torch.Tensor))]
        ) as count:  # once, what the plan only predicted
            loss = self._micro_batch(part)
        self.device_arena.observe("activations", max(1, count.peak))
        return loss

    def loss(self, part: MicroBatch) -> torch.Tensor:
        """A micro-batch's share of the step's loss."""
        there = part.tokens.to(self.device)
        wanted = there if part.labels is part.tokens else part.labels.to(self.device)
        places = None if part.positions is None else part.positions.to(self.device)
        return part.scale(loss_of(self.model, there, wanted, places))

    def _micro_batch(self, part: MicroBatch) -> torch.Tensor:
        with dividing(self.model):
            return self._passes(part)

    def _passes(self, part: MicroBatch) -> torch.Tensor:
        loss = self.loss(part)
        self.clock.ended("forward")
        if self.perturbation is not None:
            return loss
        self.gates.reach_all()  # of what this pass did not use: gradients are zero only behind the gates
        if loss.requires_grad or self.drop is None:  # it does not if all that is trained is left out
            loss.backward()  # type: ignore[no-untyped-call]
        if self.blocks is not None:
            self.blocks.end_backward()
        self.clock.ended("backward")
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
        if self.swap is not None:
            self.swap.close()
        if self.disk is not None:
            self.optimizer.streams.load.close()
            self.optimizer.streams.store.close()
            self.disk.close()
        self.host_arena.unpin()


def _micro_batches(
    tokens: torch.Tensor, labels: torch.Tensor | None, size: int
) -> Iterator[MicroBatch | None]:
    """The micro-batches of a step; None in the place of one from which nothing is learned."""
    parts = torch.split(tokens, size)
    if labels is None:
        for part in parts:
            yield MicroBatch(part, part, lambda mean: mean / len(parts))
        return
    counts = [int((wanted[:, 1:] != IGNORED).sum()) for wanted in torch.split(labels, size)]
    for part, wanted, count in zip(parts, torch.split(labels, size), counts, strict=True):
        share = count / max(1, sum(counts))
        yield MicroBatch(part, wanted, partial(torch.mul, other=share)) if count else None


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Rotary tables and the like; the parameters are in the arena already."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
