"""What a node holds after messages that are new, old, late, foreign or impossible."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError
from tests.operator.agent.boards import EPOCH, lease, release

from busbar.kube.contracts.power import LeaseMessage, LeaseState
from busbar.operator.agent.leases import Held, LeaseRefused, at, standing, taken


def test_a_lease_counts_from_the_clock_of_the_report_that_it_answers_and_ends_half_a_second_early() -> None:
    held = taken(Held(), EPOCH, lease(2000.0, 1, 1000.0), 1004.0)
    assert (held.state, held.boards_w) == (LeaseState.LEASED, 1500.0)
    assert at(held, 1009.4) is held
    assert at(held, 1009.5) == Held(sequence=1)


@pytest.mark.parametrize(
    ("message", "clock_s", "why"),
    [
        (lease(2000.0, 5), 1000.0, "its sequence is 5, and 5 was taken already"),
        (lease(2000.0, 4), 1000.0, "its sequence is 4"),
        (release(5), 1000.0, "was taken already"),
        (lease(2000.0, 6, epoch="e0"), 1000.0, "another start of this agent"),
        (release(6, "e0"), 1000.0, "another start of this agent"),
        (lease(2000.0, 6, 1000.0), 1010.0, "it has ended 0.5 s before it arrived"),
        (lease(2000.0, 6, 1001.0), 1000.0, "has not reached"),
    ],
)
def test_what_is_old_foreign_or_over_is_refused_with_a_sentence(
    message: LeaseMessage, clock_s: float, why: str
) -> None:
    held = taken(Held(), EPOCH, lease(1500.0, 5), 1000.0)
    with pytest.raises(LeaseRefused, match=why):
        taken(held, EPOCH, message, clock_s)


def test_only_a_release_releases_and_the_sequence_outlives_every_state() -> None:
    held = taken(Held(), EPOCH, lease(1500.0, 5), 1000.0)
    assert standing(held) == Held(sequence=5)
    free = taken(held, EPOCH, release(6), 1001.0)
    assert (free.state, free.sequence) == (LeaseState.RELEASED, 6)
    assert at(free, 1e9) is free, "silence changes nothing"
    again = taken(free, EPOCH, lease(1500.0, 7, 1001.0), 1002.0)
    assert again.state is LeaseState.LEASED


@pytest.mark.parametrize(
    ("change", "fine"),
    [
        ({"watts": math.nan}, {"watts": 0.0}),
        ({"watts": math.inf}, {"watts": 1e8}),
        ({"watts": -1.0}, {"watts": 0.5}),
        ({"hostWatts": -1.0}, {"hostWatts": 0.0}),
        ({"ttlS": 0.0}, {"ttlS": 0.1}),
        ({"ttlS": 61.0}, {"ttlS": 60.0}),
        ({"ttlS": None}, {"ttlS": None, "watts": None}),
        ({"sequence": 0}, {"sequence": 1}),
        ({"sequence": 2**53 + 1}, {"sequence": 2**53}),
        ({"clockS": math.nan}, {"clockS": 0.0}),
        ({"boardPart": 0.0}, {"boardPart": 0.01}),
        ({"boardParts": {"a": 0.0}}, {"boardParts": {"a": 0.01}}),
        ({"boardParts": {"a": 1.01}}, {"boardParts": {"a": 1.0}}),
        ({"boardParts": {"": 0.5}}, {"boardParts": {}}),
        (
            {"boardParts": {f"b{i}": 0.5 for i in range(65)}},
            {"boardParts": {f"b{i}": 0.5 for i in range(64)}},
        ),
    ],
)
def test_impossible_numbers_are_refused_and_their_neighbours_are_not(
    change: dict[str, object], fine: dict[str, object]
) -> None:
    base = {"node": "n", "epoch": EPOCH, "sequence": 1, "watts": 1.0, "ttlS": 10.0}
    LeaseMessage.model_validate({**base, **fine})
    with pytest.raises(ValidationError):
        LeaseMessage.model_validate({**base, **change})
