"""The bucket on a node: what passes, and that it begins empty."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.operator.agent.boards import Boards, Clock, lease

from busbar.kube.contracts.power import LeaseState
from busbar.operator.agent.bucket import Bucket
from busbar.operator.agent.leases import Held
from busbar.operator.agent.limits import Limiter

HELD = Held(LeaseState.LEASED, 1, 1500.0, 500.0, 1e9, burst_j=150.0)


@given(st.lists(st.floats(0, 1600), min_size=1, max_size=80))
def test_over_any_time_the_boards_draw_the_lease_one_depth_and_one_look_more(wants: list[float]) -> None:
    bucket, drawn_j = Bucket(), 0.0
    for want in wants:
        watts = min(want, 1000.0 + bucket.passes * 600.0)
        drawn_j += 0.1 * watts
        bucket = bucket.after(HELD, watts, 0.1)
    assert drawn_j <= 0.1 * 1000.0 * len(wants) + 150.0 + 0.1 * 600.0 + 1e-6


def test_a_bucket_begins_empty_and_is_lost_with_its_lease() -> None:
    assert not Bucket().passes
    saved = Bucket().after(HELD, 400.0, 0.2)
    assert (saved.joules, saved.passes) == (120.0, 0.875)
    assert saved.within(replace(HELD, burst_j=50.0)) == Bucket(50.0, passes=0.875)
    for lost in (
        replace(HELD, burst_j=0.0),
        replace(HELD, state=LeaseState.STANDING),
        Held(LeaseState.RELEASED),
    ):
        assert saved.within(lost) == saved.after(lost, 400.0, 0.2) == Bucket()


def test_the_limits_of_boards_follow_the_bucket_and_the_report_says_what_it_holds() -> None:
    clock, boards = Clock(), Boards()
    limiter = Limiter("e1", boards, clock, 0.9)
    limiter.look({})
    message = lease(1300.0, 1, clock.now_s).model_copy(update={"burst_j": 130.0})
    limiter.take(message)
    assert boards.total_w == 800.0, "the bucket is empty"
    assert limiter.report().bucket_j == 0.0

    def looked(draw_w: float) -> tuple[float, float | None, bool]:
        clock.now_s += 0.1
        limiter.look(dict.fromkeys("abcd", draw_w))
        told = limiter.report()
        return boards.total_w, told.bucket_j, told.free

    assert looked(100.0) == (1200.0, 40.0, True), (
        "40 of 130 J, clearly above nine sixty-fourths: half the way"
    )
    looked(100.0)
    looked(100.0)
    assert looked(100.0) == (1600.0, 130.0, True)
    assert limiter.report().sequence == 1
    assert looked(300.0) == (1500.0, 90.0, True)
    assert looked(300.0) == (1300.0, 50.0, True)
    assert looked(300.0) == (1100.0, 10.0, True)
    assert looked(300.0) == (800.0, -30.0, False)
    clock.now_s += 20.0
    limiter.look(dict.fromkeys("abcd", 100.0))
    assert (boards.total_w, limiter.bursts, limiter.report().bucket_j) == (400.0, False, None)


def test_no_bucket_lifts_a_board_above_the_cap_of_its_job() -> None:
    clock, boards = Clock(), Boards()
    limiter = Limiter("e1", boards, clock, 0.9)
    limiter.look({})
    limiter.take(lease(1300.0, 1, clock.now_s).model_copy(update={"burst_j": 130.0, "board_part": 0.75}))
    for _ in range(4):
        clock.now_s += 0.1
        limiter.look(dict.fromkeys("abcd", 100.0))
    assert boards.total_w == 1200.0
