"""Whatever ranks are lost, the others' chunks and parities give their bytes back."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from busbar.kube.types.checkpoint import MOST_PROCESSES_OF_PARITIES
from busbar.workloads.training import parity
from busbar.workloads.training.gang_copies import Bytes, add_times
from busbar.workloads.training.parity import Stripes

SIZES = [(2, 1), (3, 1), (4, 1), (4, 2), (4, 3), (5, 2), (6, 3), (8, 1), (8, 4)]


def times(one: int, other: int) -> int:
    """The product of two polynomials, bit by bit, modulo x^8 + x^4 + x^3 + x^2 + 1."""
    found = 0
    for bit in range(8):
        if other >> bit & 1:
            found ^= one << bit
    for bit in range(15, 7, -1):
        if found >> bit & 1:
            found ^= 0x11D << bit - 8
    return found


def test_the_field_is_that_of_polynomials() -> None:
    for one, other in itertools.product(range(256), repeat=2):
        assert parity.multiply(one, other) == times(one, other)
    assert all(times(element, parity.inverse(element)) == 1 for element in range(1, 256))


def parts_of(stripes: Stripes, chunks: list[Bytes], stripe: int) -> list[Bytes]:
    """Every part of a stripe, as `sent` lets the ranks add them up. `chunks[rank]`: [chunks, bytes]."""
    found = [np.zeros_like(chunks[0][0]) for _ in range(stripes.ranks)]
    for rank in range(stripes.ranks):
        if (own := stripes.part(rank, stripe)) >= stripes.parity:
            found[own] = chunks[rank][own - stripes.parity]
    for offset, chunk, row in stripes.sent():
        receiver = stripes.holder(row, stripe)
        sender = (receiver - offset) % stripes.ranks
        assert stripes.part(sender, stripe) == stripes.parity + chunk
        add_times(found[row], chunks[sender][chunk], stripes.generator[row][chunk])
    return found


@pytest.mark.parametrize(("ranks", "lost"), SIZES)
def test_any_ranks_that_may_be_lost_come_back(ranks: int, lost: int) -> None:
    stripes = Stripes(ranks, lost)
    numbers = np.random.default_rng(7)
    chunks = [numbers.integers(0, 256, (stripes.chunks, 64), dtype=np.uint8) for _ in range(ranks)]
    every = [parts_of(stripes, chunks, stripe) for stripe in range(ranks)]
    for gone in itertools.combinations(range(ranks), lost):
        for stripe in range(ranks):
            left = [stripes.part(rank, stripe) for rank in range(ranks) if rank not in gone]
            random.Random(stripe).shuffle(left)
            known = left[: stripes.chunks]
            for rank in gone:
                wanted = stripes.part(rank, stripe)
                found = np.zeros(64, dtype=np.uint8)
                for part, weight in zip(known, stripes.weights(wanted, known), strict=True):
                    add_times(found, every[stripe][part], weight)
                assert np.array_equal(found, every[stripe][wanted])


@pytest.mark.parametrize(("ranks", "lost"), SIZES)
def test_every_rank_has_one_part_of_each_stripe_and_sends_each_chunk_once_for_each_parity(
    ranks: int, lost: int
) -> None:
    stripes = Stripes(ranks, lost)
    for rank in range(ranks):
        parts = [stripes.part(rank, stripe) for stripe in range(ranks)]
        assert sorted(parts) == list(range(ranks))
        assert all(stripes.holder(part, stripe) == rank for stripe, part in enumerate(parts))
    assert len(set(stripes.sent())) == len(stripes.sent()) == lost * stripes.chunks


def test_one_parity_is_the_exclusive_or() -> None:
    assert all(Stripes(ranks, 1).generator[0] == [1] * (ranks - 1) for ranks in (2, 3, 20, 1000))


def test_a_rank_holds_its_part_more() -> None:
    page = 4096
    assert Stripes(4, 1).held_bytes(30 * page) == 40 * page
    assert Stripes(4, 2).held_bytes(30 * page) == 60 * page
    assert Stripes(2, 1).held_bytes(30 * page + 1) == 62 * page
    assert Stripes(3, 0).held_bytes(30 * page) == 30 * page


@pytest.mark.parametrize(("ranks", "lost"), [(1, 1), (2, 2), (2, -1), (257, 2)])
def test_what_cannot_be_is_refused(ranks: int, lost: int) -> None:
    with pytest.raises(ValueError, match="cannot be lost"):
        Stripes(ranks, lost)


def test_the_api_knows_how_many_ranks_the_field_has_elements_for() -> None:
    assert MOST_PROCESSES_OF_PARITIES == parity.MOST_RANKS


def test_equations_without_a_single_solution_are_refused() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        parity.solve([[1, 2], [1, 2]], [3, 4])
