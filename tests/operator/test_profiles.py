"""Profiles keep what jobs measured: across the end of the jobs, restarts of the operator, and crashes between writes."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.operator.builders import ENGINE as ENGINE_SPEC
from tests.operator.builders import NOW, SETTINGS, job, pool, tenant
from tests.operator.test_speeds import CONFIG, STEPS, done, ran, tokens

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import CellSource, HeldTime, ProfileCell
from busbar.operator.evidence import Stay, digests, fold, hold, read, slack_at
from busbar.operator.pods import Node
from busbar.operator.profile_keeper import MOST_PROFILES, made_room
from busbar.operator.profiles import Decision, ProfileView, leaves, left_behind, reconcile
from busbar.operator.snapshot import Seen, build
from busbar.operator.table import performance_table, said_by, workload
from busbar.scheduler import Policy, Snapshot, Source, plan
from busbar.scheduler.learning import EXPLORED
from busbar.scheduler.reports import MOST_RECORDS
from busbar.scheduler.table import Exploration, Fault

POOLS = (
    pool("a100", accelerator="A100", resourceName="nvidia.com/gpu"),
    pool("v100", accelerator="V100", resourceName="nvidia.com/gpu"),
)
TEAM = tenant("team", ["team"])
TENANT_OF = {"team": "team"}
KEYS = digests((TEAM,))
NODES = tuple(
    Node(
        f"n-{p.metadata.name}",
        (("pool", p.metadata.name),),
        (),
        64_000,
        512_000,
        0,
        (("nvidia.com/gpu", 8),),
        True,
    )
    for p in POOLS
)
CLASS = workload(ran(1.0)).workload_class


def profile(
    name: str = "of-class", status: Any = None, created: str = "2026-11-01T00:00:00Z", **spec: Any
) -> PerformanceProfile:
    meta = {"name": name, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"}
    return PerformanceProfile.model_validate(
        {
            "metadata": {**meta, "creationTimestamp": created},
            "spec": {"workloadClass": CLASS, **spec},
            "status": status,
        }
    )


def look(of: PerformanceProfile, *jobs: TrainingJob, now: datetime = NOW, **fields: Any) -> Decision:
    view = ProfileView(
        profile=of,
        counts=of.metadata.name,
        table=performance_table(jobs, POOLS, TENANT_OF, (of,), (TEAM,)),
        jobs=jobs,
        uids=frozenset(j.metadata.uid for j in jobs),
        left=(),
        tenant_of=TENANT_OF,
        keys=KEYS,
        now=now,
        settings=SETTINGS,
    )
    return reconcile(replace(view, **fields))


def written(of: PerformanceProfile, *jobs: TrainingJob, **fields: Any) -> PerformanceProfile:
    """The profile after a look, by way of the wire."""
    decision = look(of, *jobs, **fields)
    assert decision.status is not None
    return PerformanceProfile.model_validate({**of.to_wire(), "status": decision.status.to_wire()})


def cell(of: PerformanceProfile, accelerator: str) -> ProfileCell:
    assert of.status is not None
    found = [c for c in of.status.cells or () if (c.accelerator, c.mode) == (accelerator, "resident")]
    assert len(found) == 1
    return found[0]


def waiting(name: str = "next") -> TrainingJob:
    engine = {**ENGINE_SPEC, "model": {"config": CONFIG}, "steps": 1000, "mode": "resident"}
    return job(name, engine=engine)


def formula(accelerator: str) -> float:
    table = performance_table((waiting(),), POOLS, TENANT_OF)
    return next(c.speed for c in table.cells if c.accelerator == accelerator)


def snapshot(*profiles: PerformanceProfile, jobs: tuple[TrainingJob, ...]) -> Snapshot:
    return build(Seen(jobs, (), POOLS, (TEAM,), NODES, (), profiles), NOW)


def finished(factor: float, name: str = "job", on: str = "A100") -> TrainingJob:
    speed = formula(on) * factor
    return done(speed, tokens() / speed + 60, name=name, on=on)


# -- what was measured outlives its jobs ---------------------------------------------------------------


def test_what_an_ended_job_measured_is_there_when_the_job_is_gone() -> None:
    kept = written(profile(), finished(0.4), waiting())
    table = performance_table((waiting(),), POOLS, TENANT_OF, (kept,), (TEAM,))
    [record] = table.records
    assert (record.tenant, record.job, record.verified) == ("team", "", True)
    learned = {c.accelerator: c for c in table.learned if not c.tenant}
    assert learned["A100"].source is Source.MEASURED
    assert learned["A100"].speed == pytest.approx(formula("A100") * 0.4, rel=0.1)
    assert learned["V100"].speed < 0.75 * formula("V100")


def test_an_end_is_told_by_the_lowest_speed_believed_of_the_place() -> None:
    of = written(profile(), finished(0.4), waiting())
    admission = ran(1.0).status.admission  # type: ignore[union-attr]
    assert admission is not None
    measured = cell(of, "A100")
    assert measured.low is not None
    assert slack_at(of, admission) == measured.tokens_per_second / measured.low > 1
    guessed = slack_at(of, admission.model_copy(update={"accelerator": "V100"}))
    assert guessed is not None
    assert guessed > measured.tokens_per_second / measured.low  # nobody has run there
    assert slack_at(of, admission.model_copy(update={"pods": 64})) is None
    assert slack_at(profile(), admission) is None


def test_a_restarted_operator_without_the_jobs_makes_the_same_plan() -> None:
    of = profile()
    jobs = (finished(0.2, "slow"), finished(2.0, "fast", on="V100"), waiting())
    before = snapshot(of, jobs=jobs)
    kept = written(of, *jobs)
    after = snapshot(kept, jobs=(waiting(),))
    plain = snapshot(jobs=(waiting(),))
    now = NOW.timestamp()
    actions = [plan(s, Policy(), now)[0].actions for s in (before, after, plain)]
    assert [(a.kind, a.job, a.to) for a in actions[0]] == [(a.kind, a.job, a.to) for a in actions[1]]
    assert [a.to and a.to.accelerator for a in actions[0]] == ["V100"]
    assert [a.to and a.to.accelerator for a in actions[2]] == ["A100"]
    # Both believe the same of every cell, to the last digit: the second only from the profile.
    assert {c.accelerator: c.speed for c in before.table.learned} == pytest.approx(
        {c.accelerator: c.speed for c in after.table.learned}, rel=1e-5
    )
    assert before.table.records == after.table.records
    assert before.table.conduct == after.table.conduct
    assert not plain.table.learned


def test_a_snapshot_is_the_same_before_and_after_the_write_and_again_after_the_next() -> None:
    jobs = (finished(0.4), waiting())
    first = written(profile(), *jobs)
    second = look(first, *jobs, now=NOW + timedelta(seconds=30))
    assert second.status is None
    one, two = snapshot(profile(), jobs=jobs), snapshot(first, jobs=jobs)
    assert one.table.records == two.table.records
    assert Snapshot.from_json(two.to_json()).table == two.table


def test_each_run_is_counted_once_however_often_it_is_seen() -> None:
    of = profile()
    jobs: tuple[TrainingJob, ...] = (finished(0.4), waiting())
    for minute in range(3):
        of = written(of, *jobs, now=NOW + timedelta(hours=minute)) if minute == 0 else of
        jobs = (*jobs, finished(0.4, name=f"more-{minute}"))
        of = written(of, *jobs, now=NOW + timedelta(hours=minute + 1))
    assert of.status is not None
    [evidence] = of.status.evidence or []
    assert (evidence.reports, evidence.runs) == (4, 4)
    assert (of.status.conduct or [])[0].passed == 4
    assert cell(of, "A100").reports == 4


def test_counted_runs_of_jobs_that_are_gone_need_not_be_listed() -> None:
    of = written(profile(), finished(0.4), waiting())
    assert of.status is not None
    assert of.status.counted is not None
    assert of.status.counted.runs == ["uid-job-1"]
    of = written(of, finished(0.4, name="more"), now=NOW + timedelta(minutes=1))
    assert of.status is not None
    assert of.status.counted is not None
    assert of.status.counted.runs == ["uid-more-1"]
    assert (of.status.evidence or [])[0].runs == 2


def test_an_attempt_that_gave_its_place_back_is_kept_too() -> None:
    speed = formula("A100") * 0.4
    old = ran(speed)
    assert old.status is not None
    queued = old.model_copy(update={"status": old.status.model_copy(update={"admission": None})})
    admitted = old.status.model_copy(
        update={
            "admission": old.status.admission and old.status.admission.model_copy(update={"admitted_at": NOW})
        }
    )
    old = old.model_copy(update={"status": admitted})
    assert leaves(old, queued)
    assert leaves(old, None)
    assert not leaves(old, old)
    left = left_behind(old, said_by(old, TENANT_OF), NOW + timedelta(hours=1))
    assert left is not None
    of = written(profile(), queued, left=(left,), now=NOW + timedelta(hours=1))
    assert of.status is not None
    [evidence] = of.status.evidence or []
    assert evidence.log_mean == pytest.approx(math.log(speed), abs=0.05)
    assert not evidence.verified
    assert of.status.held is not None
    assert of.status.held.unmeasured == pytest.approx(3600)


# -- whose word ----------------------------------------------------------------------------------------


def test_a_profile_names_no_tenant_and_no_job() -> None:
    text = str(written(profile(), finished(0.4, name="secret-job"), ran(20_000.0, name="other")).to_wire())
    assert "'team'" not in text
    assert "secret-job'" not in text
    assert KEYS["team"] in text


def test_a_liar_is_still_known_when_its_jobs_are_gone_and_told_once() -> None:
    true = formula("A100")
    liar = done(true * 2, tokens() / true)
    decision = look(profile(), liar, waiting())
    assert decision.refuted == ("uid-job",)
    kept = written(profile(), liar, waiting())
    assert cell(kept, "A100").quarantined == 1
    assert look(kept, liar, waiting(), now=NOW + timedelta(hours=1)).refuted == ()
    table = performance_table((ran(true * 0.8, name="next"),), POOLS, TENANT_OF, (kept,), (TEAM,))
    assert table.conduct[0].failed == 1
    assert {r.fault for r in table.records if r.job == ""} == {Fault.COUNTERS}


# -- what people state ---------------------------------------------------------------------------------


def stating(speed: float, **more: Any) -> PerformanceProfile:
    return profile(cells=[{"accelerator": "A100", "accelerators": 1, "tokensPerSecond": speed, **more}])


def test_a_stated_speed_wins_over_the_formula_and_teaches_the_other_types() -> None:
    table = performance_table((waiting(),), POOLS, TENANT_OF, (stating(formula("A100") / 2),), (TEAM,))
    learned = {c.accelerator: c for c in table.learned if not c.tenant}
    assert learned["A100"].speed == pytest.approx(formula("A100") / 2, rel=0.05)
    assert learned["V100"].speed < 0.9 * formula("V100")
    assert learned["A100"].memory_mib == next(c.memory_mib for c in table.cells if c.accelerator == "A100")


def test_a_measurement_refines_a_stated_speed_but_not_an_override() -> None:
    speed = formula("A100") / 2
    plain = performance_table((finished(0.4), waiting()), POOLS, TENANT_OF, (stating(speed),), (TEAM,))
    assert next(c.speed for c in plain.learned if c.accelerator == "A100") < 0.99 * speed
    final = stating(speed, override=True)
    snap = snapshot(final, jobs=(finished(0.4), waiting()))
    assert not [c for c in snap.table.learned if c.accelerator == "A100"]
    status = written(final, finished(0.4), waiting())
    assert cell(status, "A100").source is CellSource.STATED
    assert cell(status, "A100").tokens_per_second == speed
    assert cell(status, "A100").predicted == pytest.approx(formula("A100"), rel=1e-5)


def test_a_statement_that_is_taken_back_leaves_the_formula() -> None:
    stated = written(stating(1234.0), waiting())
    assert cell(stated, "A100").source is CellSource.STATED
    bare = profile(status=stated.to_wire()["status"])
    later = written(bare.model_copy(deep=True), waiting(), now=NOW + timedelta(minutes=1))
    assert cell(later, "A100").source is CellSource.PRIOR
    assert cell(later, "A100").tokens_per_second == pytest.approx(formula("A100"), rel=1e-5)


def test_a_speed_of_zero_says_that_the_class_cannot_run_there() -> None:
    snap = snapshot(stating(0), jobs=(waiting(),))
    [action] = plan(snap, Policy(), NOW.timestamp())[0].actions
    assert action.to is not None
    assert action.to.accelerator == "V100"


def test_of_two_profiles_of_a_class_the_first_counts_and_the_other_says_so() -> None:
    late = stating(99.0).model_copy(deep=True)
    first = profile("first")
    table = performance_table(
        (waiting(),), POOLS, TENANT_OF, (profile("late", created="2026-11-02T00:00:00Z"), first), (TEAM,)
    )
    assert not table.learned
    status = look(late, waiting(), counts="first").status
    assert status is not None
    assert [c.reason for c in status.conditions or ()] == ["ClassTaken"]
    assert status.cells is None


# -- when it is written --------------------------------------------------------------------------------


def test_a_first_look_writes_and_a_second_without_news_does_not() -> None:
    of = written(profile(), waiting())
    assert cell(of, "A100").source is CellSource.PRIOR
    later = look(of, waiting(), now=NOW + timedelta(days=1))
    assert (later.status, later.again_s) == (None, None)


def test_a_speed_within_a_step_is_not_written_and_one_beyond_it_is() -> None:
    def at(speed: float) -> TrainingJob:
        return ran(speed)

    speed = math.exp(round(math.log(formula("A100") * 0.6) / 0.05) * 0.05)
    of = written(profile(), at(speed))
    later = NOW + timedelta(seconds=20)
    assert look(of, at(speed * 1.01), now=later).status is None
    assert look(of, at(speed * 1.3), now=later).status is not None


def test_news_waits_until_the_period_since_the_last_write_is_over() -> None:
    of = written(profile(), waiting())
    decision = look(of, finished(0.4), waiting(), now=NOW + timedelta(seconds=4))
    assert decision.status is None
    assert decision.again_s == pytest.approx(SETTINGS.profile_period_s - 4)


# -- exploration ---------------------------------------------------------------------------------------


def test_held_time_counts_as_unmeasured_until_a_measurement_is_written() -> None:
    known = read(profile(), {})
    place = ("A100", 2000, "resident", 1.0)
    first = hold(known, [Stay(place, NOW)], NOW + timedelta(seconds=100))
    assert (first.measured, first.unmeasured) == (0.0, 200.0)
    there = replace(known, held=first)
    again = hold(there, [Stay(place, NOW)], NOW + timedelta(seconds=150))
    assert again.unmeasured == pytest.approx(300.0, rel=1e-3)
    ended = hold(there, [Stay(place, NOW, NOW + timedelta(seconds=120))], NOW + timedelta(seconds=150))
    assert ended.unmeasured == pytest.approx(240.0, rel=1e-3)


def test_held_time_fades_by_half_in_a_week() -> None:
    known = replace(read(profile(), {}), held=HeldTime(measured=1000, unmeasured=10, as_of=NOW))
    later = hold(known, [], NOW + timedelta(days=7))
    assert (later.measured, later.unmeasured) == (500.0, 5.0)


@pytest.mark.parametrize(
    ("guaranteed", "held", "tempted"),
    [
        (0, {"measured": 1000.0, "unmeasured": 1000.0 * EXPLORED / 2}, True),
        (0, {"measured": 1000.0, "unmeasured": 1000.0 * EXPLORED * 2}, False),
        (1, {"measured": 1000.0, "unmeasured": 0.0}, False),
    ],
    ids=["room left", "used up", "has a guarantee"],
)
def test_only_who_is_guaranteed_nothing_is_tempted_and_only_while_there_is_room(
    guaranteed: float, held: dict[str, float], tempted: bool
) -> None:
    of = written(profile(), ran(formula("A100") * 0.8), waiting())
    assert of.status is not None
    account = HeldTime(**held, as_of=NOW)
    of = of.model_copy(update={"status": of.status.model_copy(update={"held": account})})
    team = tenant("team", ["team"], quota=[{"accelerator": "V100", "guaranteed": guaranteed}])
    table = performance_table((ran(formula("A100") * 0.8), waiting()), POOLS, TENANT_OF, (of,), (team,))
    trials = [c for c in table.learned if c.trial]
    assert {(c.accelerator, c.tenant) for c in trials} == ({("V100", "team")} if tempted else set())
    assert table.explored == Exploration(held["unmeasured"], held["unmeasured"] + held["measured"])


# -- bounds --------------------------------------------------------------------------------------------


def test_evidence_of_a_class_is_bounded_and_the_least_informative_goes() -> None:
    one = said_by(finished(0.4), TENANT_OF)
    assert one is not None
    runs = [
        replace(
            one,
            run=f"u-{i}",
            record=replace(one.record, accelerators_m=1000 * (i + 1), tenant=f"t{i}"),
            agrees=None if i % 2 else True,
        )
        for i in range(MOST_RECORDS + 50)
    ]
    whole = fold(read(profile(), {}), runs)
    assert len(whole.records) == MOST_RECORDS
    assert sum(r.verified for r in whole.records) == (MOST_RECORDS + 50) // 2
    assert len(whole.counted.runs) == MOST_RECORDS
    assert not fold(whole, runs[-50:]) is not whole


def test_profiles_are_bounded_and_the_one_that_was_idle_longest_goes() -> None:
    label = {"busbar.dev/discovered": "true"}

    def made(i: int, **more: Any) -> PerformanceProfile:
        of = profile(f"p{i}", workloadClass=f"c{i}", **more)
        written_at = {"last_updated": NOW + timedelta(minutes=i)}
        status = written(profile(), waiting()).status
        assert status is not None
        of = of.model_copy(update={"status": status.model_copy(update=written_at)})
        of.metadata.labels = label
        return of

    there = [made(i) for i in range(MOST_PROFILES)]
    there[0].metadata.labels = {}
    actions = made_room(["new", "newer"], there, {"c1"})
    assert [type(a).__name__ for a in actions] == ["Delete", "Create", "Delete", "Create"]
    assert [a.key.name for a in actions] == ["p2", "new", "p3", "newer"]
    assert made_room(["new"], there, {p.spec.workload_class for p in there}) == ()


def test_a_profile_is_named_after_its_class_unless_the_name_is_taken() -> None:
    [plain] = made_room(["llama-7B-3f9a0c11"], (), set())
    assert plain.key.name == "llama-7b-3f9a0c11"
    [other] = made_room(["llama-7B-3f9a0c11"], (profile("llama-7b-3f9a0c11"),), set())
    assert other.key.name.startswith("llama-7b-3f9a0c11-")


# -- a cluster that lives ------------------------------------------------------------------------------


TRUTH = {"A100": 10_000.0, "V100": 16_000.0}
"""Tokens per second of every class; the formula has it the other way round."""


class Life:
    """Jobs come, run at true speeds that nobody was told, report, and end; objects are written as the operator does.

    Each job runs for up to two hours where the plan says. One node with one accelerator per type.
    """

    step = timedelta(minutes=5)

    def __init__(self, tenant_quota: list[dict[str, Any]]) -> None:
        self.team = tenant("team", ["team"], quota=tenant_quota)
        self.now = NOW
        self.jobs: dict[str, TrainingJob] = {}
        self.profiles: dict[str, PerformanceProfile] = {}
        self.seen: set[tuple[str, str]] = set()
        self.first_s = 0.0
        self.total_s = 0.0
        self.count = 0

    def submit(self, layers: int) -> None:
        self.count += 1
        config = {**CONFIG, "num_hidden_layers": layers}
        steps = round(2 * 3600 * TRUTH["A100"] / (tokens() / STEPS))
        engine = {**ENGINE_SPEC, "model": {"config": config}, "steps": steps, "mode": "resident"}
        made = job(f"j{self.count}", engine=engine)
        self.jobs[made.metadata.name] = made

    def build(self) -> Snapshot:
        nodes = tuple(replace(n, devices=(("nvidia.com/gpu", 1),)) for n in NODES)
        profiles = tuple(self.profiles.values())
        return build(Seen(tuple(self.jobs.values()), (), POOLS, (self.team,), nodes, (), profiles), self.now)

    def tick(self) -> None:
        """A round, and what happens until the next."""
        made = plan(self.build(), Policy(), self.now.timestamp())[0]
        by_uid = {j.metadata.uid: name for name, j in self.jobs.items()}
        for action in made.actions:
            if action.kind == "start" and action.to is not None:
                self._start(by_uid[action.job], action.to.pool, action.to.accelerator)
        self.now += self.step
        for name in list(self.jobs):
            self._live(name)
        self._write()

    def _start(self, name: str, of_pool: str, accelerator: str) -> None:
        at = {
            "id": name, "pool": of_pool, "accelerator": accelerator, "mode": "resident", "pods": 1,
            "nodes": [f"n-{of_pool}"], "perPod": {"acceleratorsM": 1000},
            "admittedAt": self.now.isoformat(), "startedAt": self.now.isoformat(),
        }  # fmt: skip
        self._set(name, {"phase": "Running", "attempt": 1, "admission": at})

    def _set(self, name: str, status: dict[str, Any]) -> None:
        old = self.jobs[name].to_wire()
        self.jobs[name] = TrainingJob.model_validate(
            {**old, "status": {**(old.get("status") or {}), **status}}
        )

    def _live(self, name: str) -> None:
        of = self.jobs[name]
        if of.status is None or of.status.admission is None or of.status.admission.admitted_at is None:
            return
        at, load = of.status.admission, workload(of)
        if of.status.completion_time is not None:
            del self.jobs[name]  # its time to live is over
            return
        held = self.step / timedelta(seconds=1)
        place = (load.workload_class, at.accelerator)
        self.total_s += held
        self.first_s += held if place not in self.seen else 0.0
        truth = TRUTH[at.accelerator]
        self.seen.add(place)
        self._set(name, {"progress": {"step": 1, "totalSteps": 100, "tokensPerSecond": truth, "tokens": 1}})
        assert at.admitted_at is not None
        end = at.admitted_at + timedelta(seconds=(load.remaining(0) or 0.0) / truth)
        if self.now >= end:
            self._set(name, {"phase": "Succeeded", "completionTime": end.isoformat()})

    def _write(self) -> None:
        jobs = tuple(self.jobs.values())
        for of in jobs:
            name = workload(of).workload_class
            if of.status is not None and name not in self.profiles:
                self.profiles[name] = profile(name.lower(), workloadClass=name)
        for name, of_class in self.profiles.items():
            view = ProfileView(
                of_class,
                of_class.metadata.name,
                performance_table(
                    jobs, POOLS, TENANT_OF, self.profiles.values(), (self.team,), absent_too=True
                ),
                tuple(j for j in jobs if workload(j).workload_class == name),
                frozenset(j.metadata.uid for j in jobs),
                (),
                TENANT_OF,
                digests((self.team,)),
                self.now,
                SETTINGS,
            )
            status = reconcile(view).status
            if status is not None:
                self.profiles[name] = of_class.model_copy(update={"status": status})


def test_a_cluster_with_jobs_tries_every_type_within_its_bound() -> None:
    life = Life([])
    for number in range(12):
        life.submit(12 + number % 3)
        life.submit(12 + number % 3)
        for _ in range(26):
            life.tick()
    assert {kind for _, kind in life.seen} == {"A100", "V100"}
    assert 0 < life.first_s / life.total_s < 0.05
    explored = life.build().table.explored
    assert explored.share < 0.05
    # The account agrees with what happened: it counts until the first report is written down.
    assert explored.unmeasured_s == pytest.approx(life.first_s, rel=0.35, abs=600)
    assert sum(len(p.status.evidence or ()) for p in life.profiles.values() if p.status) >= 3
