"""Sequences and starts between the operator and one node."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.power.parts import reading

from busbar.kube.contracts.power import MOST_SEQUENCE, LeaseState, LimitsReport
from busbar.operator.power.lines import GAP, REMEMBERED, STARTS, Line, opened
from busbar.operator.power.readings import Reading


def says(sequence: int, state: LeaseState = LeaseState.LEASED, epoch: str = "e1") -> Reading:
    limits = LimitsReport(state=state, sequence=sequence)
    return replace(reading("n", 300.0), limits=limits, epoch=epoch)


def test_a_new_leader_begins_far_above_what_the_node_has_taken() -> None:
    line = opened(says(41)).sent(7)
    assert line.last == 41 + GAP + 1
    assert line.told(says(41)) == 0, "somebody else's"
    assert line.told(says(line.last)) == 7
    assert line.told(says(line.last, LeaseState.STANDING)) == 7, "it has ended, and nothing older can come"
    assert line.told(says(line.last, LeaseState.RELEASED)) == 0
    assert line.told(reading("n", 1.0)) == 0, "it may not set limits"


def test_a_sequence_above_ours_is_somebody_elses_and_is_left_behind() -> None:
    line = opened(says(0)).sent(1)
    assert line.heard(says(line.last)) == (line, False)
    above, rival = line.heard(says(line.last + 5))
    assert rival
    assert above == Line(line.last + 5 + GAP, line.starts)


def test_starts_get_rising_numbers_and_late_answers_of_earlier_ones_keep_theirs() -> None:
    line = opened(says(0))
    line, _ = line.heard(says(0, epoch="e2"))
    assert (line.number_of("e1"), line.number_of("e2")) == (1, 2)
    line, _ = line.heard(says(0, epoch="e1"))
    assert line.number_of("e1") == 1
    for i in range(3, 40):
        line, _ = line.heard(says(0, epoch=f"e{i}"))
    assert (line.number_of("e39"), len(line.starts)) == (39, STARTS)


def test_what_is_in_force_is_known_however_many_messages_were_sent_since() -> None:
    line = opened(says(0)).sent(100)
    in_force = line.last
    for number in range(101, 400):
        line, _ = line.heard(says(in_force))
        line = line.sent(number)
    assert len(line.ours) == REMEMBERED + 1
    assert line.told(says(in_force)) == 100
    assert line.told(says(line.last)) == 399
    assert line.forgetting().told(says(line.last)) == 0
    assert line.forgetting().sent(400).last == line.last + 1


def test_a_node_without_room_for_sequences_cannot_be_told_anything() -> None:
    assert not opened(says(0)).is_full
    assert opened(says(MOST_SEQUENCE)).is_full
