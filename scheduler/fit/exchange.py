"""What the processes of a gang hand over to each other in a step, and for how long.

N processes share a step. A group of P trained parameters (a transformer block, or what stands before or after the blocks)
has gradients of g bytes and weights of w bytes per parameter. For each of its exchanges a process hands over

    gradients    (N - 1) / N x g P
    weights      (N - 1) / N x w P

and a step has these exchanges, with R micro-batches of the process that has the most:

    sharding     gradients              weights
    optimizer    1, behind the last     1, when the next step comes to the group
    gradients    R                      1, the same
    parameters   R                      around the blocks 1; of a block 2 R, but for those that are still there: the last block
                                        when backward begins, and the first when the next micro-batch does

With the weights of a block those are exchanged that are not trained, where weights are divided.
Exchanges do not depend on the order in which gradients are added up. An exchange takes a latency and its bytes over a rate; the
probe of the training engine measures both, and `stated` makes them of what a person says of a network. Which of the
exchanges run beside the passes `timeline` counts.

Where S processes share each sequence, they exchange queries, keys, values and the result of attention in each block: of
each (S - 1) / S go to the others. Backward exchanges them once more, and so does a block that is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .memory import AGAIN
from .model import BatchShape, ModelShape
from .timeline import Beside

OPTIMIZER, GRADIENTS, PARAMETERS = "optimizer", "gradients", "parameters"
NETWORK_GB_PER_S = {
    "ethernet-10": 1.1,
    "ethernet-25": 2.8,
    "ethernet-100": 11.0,
    "infiniband-hdr": 23.0,
    "infiniband-ndr": 46.0,
}
"""One direction of a port by class, as usually reached: nine tenths of its data sheet."""
ASSUMED_NETWORK = "ethernet-25"
"""Where nothing is known."""
LATENCY_S = 30e-6
"""Of each of the N - 1 steps of an exchange: a stated guess."""


@dataclass(frozen=True, slots=True)
class Link:
    """Of one kind of exchange."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: float) -> float:
        """Of an exchange in which each process hands over so many bytes."""
        return self.latency_s + size / self.bytes_per_s if size else 0.0


@dataclass(frozen=True, slots=True)
class Links:
    """Between the processes of a gang."""

    gradients: Link
    weights: Link
    busy: float = 0.0
    """Part of an exchange's seconds for which a device that computes beside it is held up."""


@dataclass(frozen=True, slots=True)
class Part:
    """A group of parameters that are exchanged at once."""

    parameters: int
    is_block: bool
    frozen_bytes: int = 0
    """Of a block, weights that are not trained, if they are divided and exchanged with the others."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the processes of a gang share a step."""

    ranks: int
    sharding: str
    rounds: int
    """Micro-batches of the process that has the most."""
    gradient_bytes: int
    """Of one parameter."""
    weight_bytes: int
    gradients_beside: bool
    """Sums of gradients are exchanged beside the last backward pass."""
    weights_beside: bool
    """Updated weights come beside the forward pass of the group before, as far as their updates are over by then."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Seconds of one group in a step."""

    inside_s: float
    """Of those inside backward passes, and inside the forward passes of later micro-batches, which wait for them."""
    gather_s: float
    """See `timeline.GroupWork`."""
    reduce_s: float

    @property
    def whole_s(self) -> float:
        return self.inside_s + self.gather_s + self.reduce_s


@dataclass(frozen=True, slots=True)
class Counts:
    """Exchanges of one group in a step."""

    gradients: int
    first_weights: int
    """In the forward pass of the first micro-batch."""
    later_weights: int


def counts(parts: Sequence[Part], sharing: Sharing) -> list[Counts]:
    """Of each of `parts`, which stand in forward order."""
    rounds = 1 if sharing.sharding == OPTIMIZER else sharing.rounds
    if sharing.ranks == 1:
        return [Counts(0, 0, 0)] * len(parts)
    if sharing.sharding != PARAMETERS:
        return [Counts(rounds, 1, 0)] * len(parts)
    inner = [index for index, part in enumerate(parts) if part.is_block]
    found = []
    for index, part in enumerate(parts):
        again = 2 * rounds - 1
        if part.is_block:
            again -= rounds if index == inner[-1] else 0
            again -= rounds - 1 if index == inner[0] else 0
        found.append(Counts(rounds, 1, again if part.is_block else 0))
    return found


def sent_bytes(parts: Sequence[Part], sharing: Sharing) -> int:
    """That each process hands over in a step."""
    return sum(
        found.gradients * _sent(part, sharing, sharing.gradient_bytes)
        + (found.first_weights + found.later_weights) * _sent_weights(part, sharing)
        for part, found in zip(parts, counts(parts, sharing), strict=True)
    )


def exchanges(parts: Sequence[Part], sharing: Sharing, links: Links) -> list[Exchanges]:
    """Of each of `parts`, which stand in forward order."""
    made = []
    for part, found in zip(parts, counts(parts, sharing), strict=True):
        gradients_s = found.gradients * links.gradients.seconds(_sent(part, sharing, sharing.gradient_bytes))
        weights_s = links.weights.seconds(_sent_weights(part, sharing))
        inside_s, behind_s = (0.0, gradients_s) if sharing.sharding == OPTIMIZER else (gradients_s, 0.0)
        made.append(
            Exchanges(inside_s + found.later_weights * weights_s, found.first_weights * weights_s, behind_s)
        )
    return made


def beside(sharing: Sharing, links: Links) -> Beside:
    """What of them runs beside the passes."""
    return Beside(sharing.gradients_beside, sharing.weights_beside, links.busy)


def stated(network_bytes_per_s: float | None, host_bytes_per_s: float, ranks: int, per_pod: int) -> Links:
    """Of `ranks` processes, `per_pod` in each pod, that pass the parts of an exchange on in a ring, which is as fast as its
    slowest link: between pods the network, inside a pod (None: there is one pod) the link to the host."""
    rates = [host_bytes_per_s] if per_pod > 1 else []
    rates += [network_bytes_per_s] if network_bytes_per_s is not None else []
    link = Link((ranks - 1) * LATENCY_S, min(rates))
    return Links(link, link)


@dataclass(frozen=True, slots=True)
class SequenceExchange:
    """What a process that shares sequences exchanges in one block, of one micro-batch."""

    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float


def of_sequences(model: ModelShape, batch: BatchShape, link: Link) -> SequenceExchange:
    """In four exchanges of each pass through the block."""
    shared = batch.sequence_parallel
    queries = batch.micro_batch_tokens * batch.weight_bytes * model.heads * model.head_dim
    keys = queries * model.kv_heads // max(1, model.heads)
    sizes = [each * (shared - 1) // shared for each in (queries, keys, keys, queries)]
    seconds = sum(link.seconds(each) for each in sizes)
    passes = 2 if batch.activations in AGAIN else 1
    return SequenceExchange(sum(sizes), passes * sum(sizes), seconds, passes * seconds)


def among_neighbours(
    network_bytes_per_s: float | None, host_bytes_per_s: float, neighbours: int, per_pod: int
) -> Link:
    """Between consecutive processes that share sequences, each of which sends as much to each other one. What goes to other
    pods shares the network with what the pod's other processes send there."""
    inside = min(neighbours, per_pod)
    rates = [host_bytes_per_s] if inside > 1 else []
    if network_bytes_per_s is not None and neighbours > inside:
        abroad = (neighbours - inside) / (neighbours - 1)
        rates.append(network_bytes_per_s / (per_pod * abroad))
    return Link(LATENCY_S, min(rates, default=host_bytes_per_s))


def _sent_weights(part: Part, sharing: Sharing) -> int:
    own = part.frozen_bytes // sharing.ranks
    return _sent(part, sharing, sharing.weight_bytes) + (sharing.ranks - 1) * own


def _sent(part: Part, sharing: Sharing, element: int) -> int:
    """By one process in one exchange."""
    return (sharing.ranks - 1) * (part.parameters // sharing.ranks) * element
