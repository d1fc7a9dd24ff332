"""Replicas by demand, by an external target, and around zero."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler.autoscale import Demand, Scaling, ScalingState, decide

AUTO = Scaling(min_replicas=0, max_replicas=4, target_in_flight=8, idle_s=60, down_after_s=30)


def run(scaling: Scaling, steps: list[tuple[float, Demand]], state: ScalingState | None = None) -> list[int]:
    state = state or ScalingState()
    out = []
    for now, demand in steps:
        wanted, state = decide(scaling, demand, state, now)
        out.append(wanted)
    return out


def test_a_request_at_zero_wakes_one_replica_at_once() -> None:
    assert run(AUTO, [(0, Demand()), (1, Demand(waiting=1, last_request_age_s=0))]) == [0, 1]


def test_many_requests_raise_replicas_at_once_and_never_above_the_maximum() -> None:
    assert run(AUTO, [(0, Demand(waiting=17)), (1, Demand(in_flight=90))]) == [3, 4]


def test_replicas_decrease_one_at_a_time_and_after_a_delay() -> None:
    steps = [(0.0, Demand(in_flight=24)), (1.0, Demand(in_flight=1)), (20.0, Demand(in_flight=1))]
    steps += [(32.0, Demand(in_flight=1)), (33.0, Demand(in_flight=1)), (64.0, Demand(in_flight=1))]
    assert run(AUTO, steps) == [3, 3, 3, 2, 2, 1]


def test_a_short_lull_does_not_lower_the_number_of_replicas() -> None:
    steps = [(0.0, Demand(in_flight=24)), (1.0, Demand(in_flight=1)), (20.0, Demand(in_flight=24))]
    assert run(AUTO, [*steps, (31.0, Demand(in_flight=24))]) == [3, 3, 3, 3]


def test_an_idle_service_goes_to_zero_only_after_the_idle_time() -> None:
    steps = [(0.0, Demand(in_flight=1)), (30.0, Demand(last_request_age_s=30)), (59.0, Demand())]
    assert run(AUTO, [*steps, (61.0, Demand(last_request_age_s=61))]) == [1, 1, 1, 0]


def test_the_minimum_holds_without_demand() -> None:
    assert run(Scaling(min_replicas=2, max_replicas=4), [(0, Demand()), (9999, Demand())]) == [2, 2]


def test_missing_information_lowers_nothing() -> None:
    steps = [(0.0, Demand(in_flight=24)), (100.0, Demand(known=False)), (900.0, Demand(known=False))]
    assert run(AUTO, steps) == [3, 3, 3]


def test_an_external_target_is_obeyed() -> None:
    state = ScalingState(1, busy_at_s=0)
    assert run(Scaling(min_replicas=0, replicas=2), [(0, Demand()), (9999, Demand())], state) == [2, 2]


def test_scaled_to_zero_by_hand_it_drains_at_once_and_a_later_request_wakes_it() -> None:
    zero = Scaling(min_replicas=0, max_replicas=2, replicas=0, idle_s=60)
    steps = [(0.0, Demand(in_flight=3, last_request_age_s=1)), (5.0, Demand(waiting=1, last_request_age_s=0))]
    steps += [(9.0, Demand(in_flight=1)), (50.0, Demand(last_request_age_s=40)), (70.0, Demand())]
    assert run(zero, steps, ScalingState(2, busy_at_s=0)) == [0, 1, 1, 1, 0]


def test_a_suspended_service_has_no_replicas_whatever_the_demand() -> None:
    assert run(Scaling(suspend=True), [(0, Demand(waiting=5))]) == [0]


def test_a_target_that_keeps_going_up_and_down_takes_no_replica_away_until_it_stays() -> None:
    state, found = ScalingState(2, busy_at_s=0), []
    for now, target in ((0, 2), (60, 4), (61, 2), (62, 3), (120, 2), (180, 4), (181, 3), (361, 3), (363, 3)):
        wanted, state = decide(replace(AUTO, replicas=target), Demand(), state, now)
        found.append(wanted)
    # Up, down and up is obeyed; after these two turns 3 stays, and the next 4, until they are five minutes old.
    assert found == [2, 4, 2, 3, 3, 4, 4, 4, 3]


def test_a_target_is_not_raised_to_what_was_asked_before_it_turned() -> None:
    state, found = ScalingState(5, busy_at_s=0), []
    for now, target in ((0, 5), (10, 2), (20, 3), (30, 2), (40, 0)):
        wanted, state = decide(replace(AUTO, replicas=target), Demand(), state, now)
        found.append(wanted)
    assert found == [5, 2, 3, 2, 2]


def test_one_way_or_slowly_or_after_a_pause_of_the_target_it_is_obeyed() -> None:
    def wanted(*steps: tuple[float, int | None]) -> int:
        state = ScalingState(9, busy_at_s=0)
        for now, target in steps:
            found, state = decide(replace(AUTO, replicas=target), Demand(in_flight=99), state, now)
        return found

    assert wanted((0, 9), (1, 7), (2, 5), (3, 2)) == 2
    assert wanted((0, 4), (200, 2), (400, 4), (600, 2)) == 2
    assert wanted((0, 4), (1, 2), (2, 4), (3, None), (4, 2)) == 2


def test_what_is_remembered_of_a_target_that_never_rests_has_an_end() -> None:
    state = ScalingState(2, busy_at_s=0)
    for step in range(1000):
        _, state = decide(replace(AUTO, replicas=2 + step % 3), Demand(), state, step / 10)
    assert len(state.asked) == 100
