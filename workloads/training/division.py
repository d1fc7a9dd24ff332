"""Which rank computes which micro-batches of a step, and in what order their gradients are added up. No torch here.

The batch of a step is a function of (seed, step). Where several ranks share each sequence, they count as one here
(`sequence_parallel`). Its micro-batches are numbered from 0, whoever computes them.

    fast    every rank takes a run of consecutive micro-batches, adds their gradients up as it goes, and the
            collective adds up the ranks' sums, in an order of its own
    fixed   the micro-batches are cut into `leaves` equal runs. Within a leaf gradients are added up one after the
            other; the leaves are added up pairwise, as a balanced binary tree. The sum does not depend on how many
            ranks share the leaves, so neither does any bit of the result

A rank that has several leaves of a fixed order holds a partial sum for each level of its part of the tree.

Where gradients are divided among the ranks, they are exchanged after every micro-batch (`rounds`). There the ranks
compute neighbouring leaves at the same time, so that what is added up over ranks is a lower level of the tree than
what each rank adds up in its slices.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from busbar.workloads.training.errors import InvalidJob

FAST, FIXED = "fast", "fixed"
SEQUENCE_FIELD = "spec.engine.parallelism.sequence"
MOST_LEAVES = 8
"""Of the fixed order: the most ranks that can share a step, and a bound for the partial sums that a rank holds."""


@dataclass(frozen=True)
class Round:
    """What a rank computes between two exchanges."""

    index: int | None  # of the micro-batch; None: this rank has none left, and others have
    number: int = 0  # of the leaf, among those of the rank
    begins: bool = True  # the leaf
    ends: bool = True


@dataclass(frozen=True)
class Division:
    """The micro-batches of a step over the ranks."""

    micro_batches: int
    ranks: int  # that have micro-batches of their own, or groups of ranks that have them together
    order: str
    sequence: int = 1  # ranks of such a group

    @property
    def leaves(self) -> int:
        """Of the whole step, in fixed order: the largest power of two that divides it, up to MOST_LEAVES."""
        return min(MOST_LEAVES, self.micro_batches & -self.micro_batches)

    def own(self, rank: int) -> list[range]:
        """The runs of micro-batches of `rank`; within one, gradients are added up one after the other."""
        if self.order == FAST:
            group = rank // self.sequence
            first, last = (self.micro_batches * place // self.ranks for place in (group, group + 1))
            return [range(first, last)]
        size, each = self.leaf_size, self.leaves // self.ranks
        return [range(leaf * size, (leaf + 1) * size) for leaf in range(rank * each, (rank + 1) * each)]

    @property
    def leaf_size(self) -> int:
        """Micro-batches of a leaf, in fixed order."""
        return self.micro_batches // self.leaves

    def rounds(self, rank: int) -> list[Round]:
        """The micro-batches of `rank` with an exchange after each; all ranks have the same number of rounds."""
        if self.order == FAST:
            (own,) = self.own(rank)
            most = -(-self.micro_batches // self.ranks)
            return [Round(index) for index in [*own, *[None] * (most - len(own))]]
        size = self.leaf_size
        return [
            Round((number * self.ranks + rank) * size + place, number, place == 0, place == size - 1)
            for number in range(self.leaves // self.ranks)
            for place in range(size)
        ]

    @property
    def partial_sums(self) -> int:
        """Copies of the gradients that a rank holds beside those that it is adding up."""
        return len(self.own(0)).bit_length() - 1


def divide(sequences: int, micro_batch: int, ranks: int, order: str, sequence: int = 1) -> Division:
    """How `ranks` share a step, `sequence` of them each sequence. Raises InvalidJob where they cannot."""
    if ranks % sequence:
        raise InvalidJob(
            SEQUENCE_FIELD,
            f"is {sequence}, and {ranks} processes make no groups of so many",
            f"take {sequence} processes, or a multiple of it",
        )
    if sequence > 1 and order == FIXED:
        raise InvalidJob(
            "spec.engine.parallelism.order",
            "fixed does not hold for sequences that processes share: their sums are rounded by the number of processes",
            "set order: fast, or remove parallelism.sequence",
        )
    ranks //= sequence
    division = Division(sequences // micro_batch, ranks, order, sequence)
    parts = f"spec.engine.batch makes {division.micro_batches} micro-batches a step"
    if ranks > division.micro_batches:
        raise InvalidJob(
            "spec.shape.maxPods",
            f"{parts}, which are not enough for {ranks} {'processes' if sequence == 1 else f'groups of {sequence} processes'}",
            f"raise batch.sequences to {ranks * micro_batch}, lower batch.microBatch, or take fewer processes",
        )
    if order == FIXED and division.leaves % ranks:
        raise InvalidJob(
            "spec.engine.parallelism.order",
            f"{parts}; a fixed order adds them up in {division.leaves} parts, which {ranks} processes cannot share evenly",
            f"take a number of processes that divides {division.leaves}, or order: fast",
        )
    return division


def divide_sequence(length: int, heads: int, kv_heads: int, ranks: int) -> None:
    """Whether `ranks` can share sequences of this length, of a model with so many heads. Raises InvalidJob."""
    if length % ranks:
        raise InvalidJob(
            SEQUENCE_FIELD,
            f"is {ranks}, which does not divide data.sequenceLength {length}",
            f"take a length of {length - length % ranks or ranks}, or a number that divides it",
        )
    if not heads or heads % ranks or kv_heads % ranks:
        raise InvalidJob(
            SEQUENCE_FIELD,
            f"is {ranks}, which does not divide this model's {heads} heads of queries and {kv_heads} of keys and values",
            "take a number that divides both",
        )


def micro_batch_seed(seed: int, step: int, index: int, part: int = 0) -> int:
    """Of the random numbers (dropout) of one micro-batch, wherever it is computed; of a part of its tokens, by number."""
    name = f"{seed}:{step}:{index}" + (f":{part}" if part else "")
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
