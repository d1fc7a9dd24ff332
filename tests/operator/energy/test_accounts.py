"""Totals in statuses: every joule once, whatever becomes of the writes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.operator.energy.accounts import Accounts


def test_nothing_is_told_of_an_object_that_was_never_metered() -> None:
    accounts = Accounts()
    assert accounts.total("u", None) is None
    assert accounts.total("u", 7.0) == 7.0


def test_what_a_former_process_has_written_is_kept() -> None:
    accounts = Accounts()
    accounts.book("u", 5.0)
    assert accounts.total("u", 100.0) == 105.0


def test_a_write_that_failed_is_repeated_and_one_that_was_only_not_confirmed_is_not() -> None:
    accounts = Accounts()
    accounts.book("u", 5.0)
    accounts.sent("u", accounts.total("u", None))
    accounts.book("u", 2.0)
    assert accounts.total("u", None) == 7.0
    assert accounts.total("u", 5.0) == 7.0


def test_joules_that_come_while_a_status_is_made_wait_for_the_next() -> None:
    accounts = Accounts()
    accounts.book("u", 5.0)
    total = accounts.total("u", None)
    accounts.book("u", 2.0)
    accounts.sent("u", total)
    assert accounts.total("u", 5.0) == 7.0


def test_a_total_that_somebody_else_has_set_is_gone_on_from() -> None:
    accounts = Accounts()
    accounts.book("u", 5.0)
    accounts.sent("u", accounts.total("u", None))
    accounts.book("u", 2.0)
    assert accounts.total("u", 1000.0) == 1002.0


def test_a_new_leader_counts_on_from_what_the_one_before_has_written() -> None:
    accounts = Accounts()
    assert accounts.total("u", 6.0) == 6.0
    accounts.book("u", 1.0)
    assert accounts.total("u", 6.0) == 7.0


def test_a_status_that_is_ahead_of_the_checkpoint_is_ahead_until_as_much_was_counted() -> None:
    """The process before has booked 14 J since its checkpoint that this one finds to be somebody else's."""
    accounts = Accounts()
    accounts.resume("u", 100.0)
    accounts.book("u", 1.0)
    assert accounts.peek("u", 115.0) == 101.0
    assert accounts.total("u", 115.0) == 115.0
    accounts.sent("u", 115.0)  # with something else that has changed
    assert accounts.peek("u", 115.0) == 101.0
    accounts.book("u", 4.0)
    assert accounts.total("u", 115.0) == 115.0
    accounts.sent("u", 115.0)
    accounts.book("u", 20.0)
    assert accounts.total("u", 115.0) == 125.0


def test_objects_that_are_gone_are_forgotten() -> None:
    accounts = Accounts()
    accounts.book("u", 5.0)
    accounts.keep(frozenset())
    assert accounts.total("u", None) is None


@settings(max_examples=50, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_every_joule_is_written_once(seed: int) -> None:
    """Writes fail, or arrive without an answer; the object is sometimes read some writes late, then writes fail."""
    rng = random.Random(seed)
    accounts, booked, written = Accounts(), 0.0, 100.0
    for _ in range(100):
        joules = rng.choice((0.0, 0.25, 1000 / 3))
        booked += joules
        accounts.book("u", joules)
        total = accounts.total("u", written)
        if rng.random() < 0.7:
            accounts.sent("u", total)
            if rng.random() < 0.6 and total is not None:
                written = total
    final = accounts.total("u", written)
    assert final == pytest.approx(100.0 + booked, abs=0.1)
