"""Replicas by demand, by an external target, and around zero."""

from __future__ import annotations

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
