"""What limits cost jobs, from the limits in force and from what engines count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from busbar.operator.profiles import paces
from busbar.operator.profiles.paces import Cost, LimitCurves, LimitedRun, Told, Work
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import KNOWN_S, USED_S, Compared, Evidence, curve_of, slowdown

LLAMA = Work("llama-1b", "A100", "resident")
STEP_TOKENS, POLL_S = 4096, 6


def cost(part: float) -> float:
    """By what factor the jobs here are slower."""
    return 1.0 + (1.0 - part)


class Job:
    """An engine whose steps take two seconds without a limit, asked every six seconds."""

    def __init__(self, name: str = "job-1", work: Work = LLAMA) -> None:
        self.name, self.work = name, work
        self._spent_s = self._done = 0.0
        self._tokens, self._seconds = 0, 0.0
        self.told: Told | None = None

    def second(self, now_s: float, part: float | None, busy: float = 1.0) -> LimitedRun:
        self._spent_s += busy
        self._done += busy / (2.0 * cost(1.0 if part is None else part))
        if self._done >= 1.0:
            self._tokens, self._seconds = self._tokens + STEP_TOKENS, self._seconds + self._spent_s
            self._done, self._spent_s = self._done - 1.0, 0.0
        if now_s % POLL_S == 0:
            self.told = Told(self._tokens, self._seconds)
        return LimitedRun(self.name, self.work, part, self.told)


def minutes(
    curves: LimitCurves, job: Job, limit: Callable[[float], float | None], count: int, busy: float = 1.0
) -> None:
    for second in range(60 * count):
        curves.look([job.second(float(second), limit(float(second)), busy)], float(second))


def turns(*parts: float) -> Callable[[float], float]:
    """Each of them for two minutes, again and again."""
    return lambda now_s: parts[int(now_s // 120) % len(parts)]


def test_a_job_under_changing_limits_teaches_what_they_cost() -> None:
    curves = LimitCurves()
    minutes(curves, Job(), turns(1.0, 0.8, 0.6), 60)
    found = curves.curve(LLAMA)
    assert found is not None
    assert curves.is_measured(LLAMA)
    for part in (0.6, 0.8):
        assert slowdown(found, part) == pytest.approx(cost(part), rel=0.05)


def test_other_work_has_a_curve_of_its_own() -> None:
    curves = LimitCurves()
    minutes(curves, Job(), turns(1.0, 0.6), 60)
    assert curves.curve(LLAMA._replace(mode="optimizer-offload")) is None
    assert curves.curve(LLAMA._replace(accelerator="V100")) is None


def test_a_curve_counts_before_trials_end() -> None:
    def stored(seconds: float) -> LimitCurves:
        curves = LimitCurves(lambda name: {Work(name, *LLAMA[1:]): {(60, 100): Compared(seconds, 0.2)}})
        curves.look([Job().second(0.0, 1.0)], 0.0)
        return curves

    assert stored(USED_S - 1).curve(LLAMA) is None
    assert stored(USED_S).curve(LLAMA) is not None
    assert not stored(USED_S).is_measured(LLAMA)
    assert stored(KNOWN_S).is_measured(LLAMA)


def test_what_was_stored_is_read_once_and_learned_from_there() -> None:
    asked: list[str] = []

    def stored(name: str) -> dict[Work, Evidence]:
        asked.append(name)
        return {LLAMA: {(60, 100): Compared(1000.0, 1.0)}}

    curves = LimitCurves(stored)
    minutes(curves, Job(), turns(1.0, 0.6), 30)
    assert asked == [LLAMA.workload_class]
    assert curves.of_class(LLAMA.workload_class)[LLAMA][60, 100].seconds > 1000.0
    assert curves.of_class("other") == {}


def test_runs_that_can_teach_are_tried_until_their_work_is_measured() -> None:
    curves, job = LimitCurves(), Job()
    run = job.second(0.0, 1.0)
    assert {curves.weight(run, float(second)) for second in range(900)} == {0.5, 1.0, 2.0}
    assert {curves.weight(replace(run, part=None), float(second)) for second in range(900)} == {1.0}
    assert {curves.weight(replace(run, told=None), float(second)) for second in range(900)} == {1.0}
    minutes(curves, job, turns(1.0, 0.6), 60)
    assert {curves.weight(run, float(second)) for second in range(900)} == {1.0}


def test_what_limits_cost_a_run_is_a_mean_over_the_time_that_its_limits_were_known() -> None:
    curves = LimitCurves()
    published = slowdown(curve_of({}), 0.5)
    for second, part in enumerate([1.0] * 11 + [0.5] * 10 + [None] * 10):
        curves.look([LimitedRun("a", LLAMA, part, None)], float(second))
    found = curves.cost("a")
    assert found is not None
    assert found[0].seconds == 20
    assert found[0].slowdown == pytest.approx((1 + published) / 2)
    assert found[1] is None
    curves.look([LimitedRun("b", LLAMA, None, None)], 40.0)
    assert curves.cost("b") is None, "nothing is known of its limits"
    assert curves.cost("c") is None


def test_limits_that_hold_nothing_and_the_cap_of_the_job_cost_nothing() -> None:
    curves = LimitCurves()
    for second in range(10):
        loose = LimitedRun("loose", LLAMA, 0.5, None, binds=False)
        curves.look([loose, LimitedRun("capped", LLAMA, 0.5, None, cap=0.5)], float(second))
    for name in ("loose", "capped"):
        found = curves.cost(name)
        assert found is not None
        assert found[0].slowdown == 1.0


def test_a_restarted_operator_goes_on_from_what_is_written() -> None:
    curves = LimitCurves()
    for second in range(101):
        run = LimitedRun("a", LLAMA, 1.0, None, before=Cost(100.0, 1.5))
        curves.look([run], float(second))
    found = curves.cost("a")
    assert found is not None
    assert found[0].seconds == 200.0
    assert found[0].slowdown == pytest.approx(1.25)


def test_an_operator_that_was_stopped_counts_nothing_of_the_time_between() -> None:
    curves = LimitCurves()
    for second in (0.0, 1.0, 1000.0):
        curves.look([LimitedRun("a", LLAMA, 1.0, None)], second)
    found = curves.cost("a")
    assert found is not None
    assert found[0].seconds == 4.0


def test_the_number_of_works_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paces, "MOST_WORKS", 3)
    curves = LimitCurves(lambda name: {Work(name, "A100", "resident"): {(60, 100): Compared(100.0, 0.1)}})
    for number in range(5):
        curves.look([LimitedRun("a", Work(f"class-{number}", "A100", "resident"), 1.0, None)], 0.0)
    assert [work.workload_class for work in curves.evidence] == ["class-2", "class-3", "class-4"]


def _learned(told: Iterator[Told | None]) -> LimitCurves:
    """What is learned from these answers, one every ten seconds, the limit falling after ten minutes."""
    curves, now = LimitCurves(), None
    for second in range(1200):
        if second % 10 == 0:
            now = next(told)
        curves.look([LimitedRun("job-1", LLAMA, 0.6 if second > 600 else 1.0, now)], float(second))
    return curves


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("it tells nothing", lambda k: None),
        ("it does no steps", lambda k: Told(0, 0.0)),
        ("its clock runs faster than time", lambda k: Told(1000 * k, 30.0 * k)),
        ("its counters run backwards", lambda k: Told(10**6 - 1000 * k, 10.0 * k)),
        ("it is mostly not in steps", lambda k: Told(1000 * k, 4.0 * k)),
        ("its seconds are no numbers", lambda k: Told(1000 * k, math.nan)),
    ],
)
def test_what_cannot_be_teaches_nothing(why: str, told: Callable[[int], Told | None]) -> None:
    assert _learned(map(told, range(1000))).evidence == {}, why
    assert _learned(Told(1000 * k, 10.0 * k) for k in range(1000)).evidence != {}


def test_limits_that_are_not_known_or_move_all_the_time_teach_nothing() -> None:
    curves = LimitCurves()
    minutes(curves, Job(), lambda now_s: None, 20)
    minutes(curves, Job(), lambda now_s: 0.6 if int(now_s) % 20 < 10 else 1.0, 20)
    assert curves.evidence == {}


def test_what_is_known_of_a_run_goes_with_it() -> None:
    curves = LimitCurves()
    minutes(curves, Job(), lambda now_s: 1.0, 10)
    curves.look([], 600.0)
    minutes(curves, Job(), lambda now_s: 0.6, 10)
    assert curves.evidence == {}


SERVES = Work("serve-llama-1b", "A100", "resident", Phase.DECODE)


def served(busy: float, binds: bool, limits: Callable[[float], float], count: int) -> LimitCurves:
    """A replica that is in steps for a part of each second, asked every second."""
    curves, done, seconds = LimitCurves(), 0.0, 0.0
    for second in range(60 * count):
        part = limits(float(second))
        seconds, done = seconds + busy, done + busy / cost(part)
        told = Told(done, seconds)
        curves.look([LimitedRun("r", SERVES, part, told, binds=binds, pauses=True)], float(second))
    return curves


def test_few_seconds_of_steps_of_a_replica_are_enough() -> None:
    for busy in (0.1, 1.0):
        found = served(busy, True, turns(1.0, 0.6), 240).curve(SERVES)
        assert found is not None
        assert slowdown(found, 0.6) == pytest.approx(cost(0.6), rel=0.05)
    assert served(0.01, True, turns(1.0, 0.6), 240).evidence == {}, "less than any stretch needs"


def test_a_limit_that_holds_no_replica_shows_nothing_of_what_it_costs() -> None:
    assert served(0.5, False, turns(0.8, 0.6), 60).evidence == {}
    assert served(0.5, True, turns(0.8, 0.6), 60).evidence != {}


def test_each_phase_starts_from_what_is_published_for_it() -> None:
    curves = LimitCurves(lambda name: {SERVES: {(95, 100): Compared(KNOWN_S, 0.0)}})
    curves.look([LimitedRun("r", SERVES, 1.0, None)], 0.0)
    known = curves.curve(SERVES)
    assert known is not None
    assert slowdown(known, 0.5) < slowdown(curve_of({}), 0.5), "decoding waits for memory"
