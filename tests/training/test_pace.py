"""Which rank of a gang the others wait for."""

from __future__ import annotations

import pytest

from busbar.workloads.training.pace import EVERY_STEPS, Pace


class Gang:
    """Ranks that take steps together, as one of them sees it."""

    def __init__(self, *others: float) -> None:
        self.others = list(others)
        self.waited, self.notes = 0.0, list[str]()
        self.pace = Pace(lambda own: [own, *self.others], lambda: self.waited, self.notes.append)

    def steps(self, seconds: float, waited: float) -> list[tuple[int, float]]:
        """What is said after as many steps as it takes."""
        for _ in range(EVERY_STEPS - 1):
            self.waited += waited
            assert self.pace.finished(seconds) is None
        self.waited += waited
        found = self.pace.finished(seconds)
        assert found is not None
        return [(each["rank"], each["ownSeconds"]) for each in found]


def test_the_slowest_comes_first() -> None:
    gang = Gang(1.25, 0.875)
    assert gang.steps(seconds=1.5, waited=0.5) == [(1, 1.25), (0, 1.0), (2, 0.875)]
    assert gang.steps(seconds=1.5, waited=0.1)[0] == (0, 1.4)  # only the last steps count
    assert gang.notes == []


def test_a_slow_rank_is_named_once_and_again_after_it_was_not() -> None:
    gang = Gang(1.0, 1.0)
    for _ in range(2):
        gang.steps(seconds=2.0, waited=0.2)
    assert gang.notes == [
        "warning: the others wait for rank 0: of each step it takes 1.8 s for itself, and they 1 s (median)"
    ]
    gang.steps(seconds=2.0, waited=0.9)
    gang.steps(seconds=2.0, waited=0.2)
    assert len(gang.notes) == 2
    gang.others = [9.0, 1.0]
    gang.steps(seconds=10.0, waited=9.0)
    assert "wait for rank 1" in gang.notes[-1]


def test_of_two_each_is_compared_with_the_other() -> None:
    gang = Gang(0.6)
    gang.steps(seconds=1.0, waited=0.0)
    assert len(gang.notes) == 1


def test_what_is_not_measured_exactly_is_never_below_zero() -> None:
    assert Gang(0.1).steps(seconds=0.1, waited=0.2) == [(1, 0.1), (0, pytest.approx(0.0))]
