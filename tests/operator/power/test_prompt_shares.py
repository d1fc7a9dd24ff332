"""What replicas spend on prompts, from the seconds that their engines count."""

from __future__ import annotations

import pytest

from busbar.kube.contracts.workload import PhaseSeconds, ServingStatus
from busbar.operator.power.prompt_shares import PromptShares


def told(prefill: float, decode: float, idle: float = 0.0) -> ServingStatus:
    return ServingStatus(phase_seconds=PhaseSeconds(prefill=prefill, decode=decode, idle=idle))


def test_a_share_is_that_of_the_busy_seconds_since_the_last_one() -> None:
    shares = PromptShares()
    assert shares.look({"a": told(100.0, 0.0)}) == {}  # since the start says little of now
    assert shares.look({"a": told(101.0, 3.0)}) == {}
    assert shares.look({"a": told(102.0, 6.0, idle=50.0)}) == {"a": 0.25}
    assert shares.look({"a": told(102.5, 6.5)}) == {"a": 0.25}  # too little since
    assert shares.look({"a": told(107.0, 11.0)}) == {"a": pytest.approx((0.25 + 0.5) / 2)}


def test_the_same_answer_again_changes_nothing() -> None:
    shares, first, second = PromptShares(), told(0.0, 0.0), told(4.0, 4.0)
    shares.look({"a": first})
    for _ in range(3):
        assert shares.look({"a": second}) == {"a": 0.5}


def test_an_engine_that_was_started_again_begins_anew() -> None:
    shares = PromptShares()
    shares.look({"a": told(50.0, 50.0)})
    assert shares.look({"a": told(60.0, 60.0)}) == {"a": 0.5}
    assert shares.look({"a": told(1.0, 1.0)}) == {}
    assert shares.look({"a": told(11.0, 1.0)}) == {"a": 1.0}


def test_pods_that_are_gone_and_engines_that_tell_nothing_have_none() -> None:
    shares = PromptShares()
    shares.look({"a": told(0.0, 0.0), "b": ServingStatus()})
    assert shares.look({"a": told(10.0, 0.0), "b": ServingStatus()}) == {"a": 1.0}
    assert shares.look({"b": ServingStatus()}) == {}
    assert shares.look({"a": told(20.0, 0.0)}) == {}
