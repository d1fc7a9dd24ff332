"""What a round does: a full plan first, then incremental plans (`react`) for changes."""

from __future__ import annotations

import weakref
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.operator.builders import NOW as NOW_UTC
from tests.operator.builders import (
    SETTINGS,
    job,
    placement,
    pool,
    queued,
    tenant,
    view,
)

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.kube.types.lost_work import GivesWayTo
from busbar.operator.decisions import Deadline, Decision, Release, Reserved
from busbar.operator.errors import PlanRefused
from busbar.operator.metrics import Metrics
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.builder import SnapshotBuilder
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.scheduling.telling import Target
from busbar.operator.training.reconcile import reconcile
from busbar.operator.watch.caches import Caches
from busbar.scheduler import (
    Action,
    ActionKind,
    Job,
    JobId,
    JobKind,
    Node,
    Plan,
    Policy,
    Pool,
    PowerPrice,
    Reservation,
    Resources,
    Snapshot,
    SolverError,
    Tenant,
    WaitCode,
    applied,
    plan,
    updated,
)
from busbar.scheduler.model.snapshot import Delta

NOW = 1_000_000.0


def _job(name: str, size: int) -> Job:
    return Job(JobId(name), name, "ns", "a", per_pod=Resources(1000 * size), submitted_at_s=NOW)


def _rounds() -> Rounds:
    unused = cast(Any, None)
    return Rounds(unused, unused, SETTINGS, unused, Policy())


def _cluster(*jobs: Job) -> Snapshot:
    return Snapshot((Pool("H100", "H100"),), (Node("n", "H100", Resources(8000)),), (Tenant("a"),), jobs)


async def test_between_full_plans_only_what_changed_is_answered() -> None:
    rounds = _rounds()
    before = _cluster(_job("wide", 16))
    first = rounds._decide(before, NOW, full=False)
    assert first.priced_at_s == NOW
    after = updated(before, Delta(jobs=(_job("new", 2),)))
    second = rounds._decide(after, NOW + 5, full=False)
    assert [str(action.job) for action in second.actions] == ["new"]
    assert second.priced_at_s == NOW
    assert second.record(JobId("wide")) == first.record(JobId("wide"))
    third = rounds._decide(after, NOW + 10, full=True)
    assert third.priced_at_s == NOW + 10
    kept = third.record(JobId("wide"))
    assert kept is not None
    assert kept.round == third.id


class _Cycle:
    """As Kopf's events are: only the collector of cycles finds it."""

    def __init__(self) -> None:
        self.itself = self


async def test_a_plan_lets_no_cycle_grow_old() -> None:
    rounds, gone = _rounds(), weakref.ref(_Cycle())
    rounds._decide(_cluster(_job("wide", 16)), NOW, full=True)
    assert gone() is None


def test_a_move_counts_as_a_preemption_if_it_is_for_another_job() -> None:
    rounds, moved = _rounds(), _job("x", 1)
    target = Target(Item("TrainingJob", Key("ns", "x")), "1", 0)
    taken = []
    for other in (None, JobId("large")):
        action = Action("id", ActionKind.MOVE, moved.id, reason="moves", makes_room_for=other)
        decision = rounds._decision(lambda _: moved, action, moved, target)
        assert isinstance(decision, Release)
        taken.append(decision.taken)
    assert taken == [False, True]


def test_training_that_makes_room_for_a_replica_is_counted_once() -> None:
    rounds = _rounds()
    replica = replace(
        _job("r", 1), id=JobId("uid-web/3"), tenant="b", kind=JobKind.SERVING, service="team/web"
    )
    other = _job("y", 1)
    known = {job.id: job for job in (replica, other, _job("x", 2), _job("z", 1))}
    actions = (
        Action("a1", ActionKind.SHRINK, JobId("x")),
        Action("a2", ActionKind.START, replica.id, after=(JobId("x"),)),
        Action("a3", ActionKind.PREEMPT, JobId("z")),
        Action("a4", ActionKind.START, other.id, after=(JobId("z"),)),
    )
    made = replace(plan(_cluster(), Policy(), NOW)[0], actions=actions)
    to = {JobId("x"): GivesWayTo(uid="uid-web", namespace="team", name="web", tenant="b")}
    assert rounds._give(known.get, made) == ({"a1"}, to)
    assert rounds._give(known.get, made) == (set(), to), "its release may not have been written yet"
    assert rounds._give(known.get, replace(made, actions=())) == (set(), {})
    assert rounds._give(known.get, made) == ({"a1"}, to)
    target = Target(Item("TrainingJob", Key("ns", "x")), "1", 0)
    decided = rounds._decision(known.get, actions[0], known[JobId("x")], target, to[JobId("x")])
    assert isinstance(decided, Release)
    assert decided.to == to[JobId("x")]


async def test_a_start_that_was_refused_is_ordered_again() -> None:
    rounds = _rounds()
    snapshot = _cluster(_job("x", 1))
    first = rounds._decide(snapshot, NOW, full=True)
    again = rounds._decide(snapshot, NOW + 1, full=False)
    assert again.actions == first.actions != ()


async def test_what_a_round_leaves_is_what_the_next_one_begins_with() -> None:
    """A preview is made on it: the places that the last round gave away are taken."""
    rounds = _rounds()
    before = _cluster(*[_job(f"x{i}", 5) for i in range(2)])
    made = rounds._decide(before, NOW, full=True)
    left = rounds.outcome
    assert left == applied(before, made, NOW)
    assert left is not None
    assert left is rounds.outcome
    assert plan(left, rounds._policy, NOW)[0].actions == ()
    rounds.forget()
    assert rounds.outcome is None


async def test_a_broken_solver_is_said_and_the_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise SolverError("out of order")

    monkeypatch.setattr("busbar.scheduler.highs.solve", broken)
    jobs = [_job(f"x{i}", 5) for i in range(2)]
    made = _rounds()._decide(_cluster(*jobs), NOW, full=True)
    assert len(made.actions) == 1
    assert "out of order" in caplog.text


def _live(controller: Controller) -> tuple[Rounds, Caches]:
    """Rounds on caches of one node with eight cores."""
    caches = Caches(
        cast(Any, None), lambda kind, key, old, new: rounds.changed(kind, key, new), inactivity_s=60.0
    )
    rounds = Rounds(caches, controller, SETTINGS, Metrics(), Policy())
    caches.pools.observe(pool().to_wire())
    caches.tenants.observe(tenant("team", ["team"]).to_wire())
    size = {"cpu": "8", "memory": "32Gi", "ephemeral-storage": "100Gi"}
    ready = [{"type": "Ready", "status": "True"}]
    caches.nodes.observe(
        {
            "metadata": {"name": "node-0", "labels": {"pool": "cpu"}, "resourceVersion": "1"},
            "status": {"allocatable": size, "conditions": ready},
        }
    )
    return rounds, caches


def _asks(name: str, size: int) -> dict[str, Any]:
    return job(name, template={"image": "own"}, shape={"acceleratorsPerPod": size}).to_wire()


async def test_a_round_waits_for_its_admissions_and_never_for_sentences() -> None:
    """Nobody tells anything here; the round ends all the same, and the second one admits what was submitted."""
    controller = Controller(Metrics(), workers=1)
    seen: list[tuple[str, tuple[Decision, ...]]] = []

    async def note(key: Key, decisions: tuple[Decision, ...]) -> None:
        seen.append((key.name, decisions))

    controller.handles("TrainingJob", note)
    rounds, caches = _live(controller)
    caches.jobs.observe(_asks("wide", 16))
    await rounds.once()
    assert (seen, len(rounds.sentences)) == ([], 1)
    caches.jobs.observe(_asks("new", 2))
    await rounds.once(full=False)
    assert [(name, type(d[0]).__name__) for name, d in seen] == [("new", "Admit")]
    assert len(rounds.sentences) == 1


async def test_a_job_that_waits_no_longer_is_told_nothing() -> None:
    rounds, caches = _live(Controller(Metrics(), workers=1))
    caches.jobs.observe(_asks("wide", 16))
    await rounds.once()
    assert len(rounds.sentences) == 1
    caches.jobs.forget(Key("team", "wide"))
    await rounds.once(full=False)
    assert len(rounds.sentences) == 0


async def test_after_a_fault_in_between_the_next_round_reads_all_objects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, caches = _live(Controller(Metrics(), workers=1))
    await rounds.once()
    caches.jobs.observe(_asks("wide", 16))

    def broken(self: SnapshotBuilder, now: datetime, *, full: bool = True) -> Snapshot:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotBuilder, "snapshot", broken)
        with pytest.raises(RuntimeError):
            await rounds.once(full=False)
    made = await rounds.once(full=False)
    assert [record.job for record in made.waiting] == ["uid-wide"]


async def test_what_the_status_says_already_is_not_said_again() -> None:
    """A restarted operator remembers nothing, and finds the reasons in the statuses."""
    waiting = queued()
    assert waiting.status is not None
    caches = SimpleNamespace(jobs=SimpleNamespace(items={Key("team", "job"): waiting}))
    rounds = Rounds(cast(Any, caches), cast(Any, None), SETTINGS, cast(Any, None), Policy())
    made, _ = plan(_cluster(_job("uid-job", 16)), Policy(), NOW)
    record, target = made.waiting[0], Target(Item("TrainingJob", Key("team", "job")), "7")
    said = waiting.status.model_copy(update={"reason": str(record.code), "message": "An older sentence."})
    caches.jobs.items[Key("team", "job")] = waiting.model_copy(update={"status": said})
    assert rounds._telling.explain(record, target) == (None, False)
    other = waiting.status.model_copy(update={"reason": "FairShare", "message": "Another reason."})
    caches.jobs.items[Key("team", "job")] = waiting.model_copy(update={"status": other})
    wait, is_new = rounds._telling.explain(record, target)
    assert wait is not None
    assert (wait.reason, is_new) == (str(record.code), True)


def _with_place(of: TrainingJob, place: Reservation | None) -> TrainingJob:
    """The job as it is after its place was written."""
    update = reconcile(view(of), reserved=Reserved(place))
    return of if update.status is None else of.model_copy(update={"status": update.status})


async def test_a_place_is_told_once_and_again_when_it_is_lost() -> None:
    waiting = queued()
    items = {Key("team", "job"): waiting}
    caches = SimpleNamespace(jobs=SimpleNamespace(items=items))
    rounds = Rounds(cast(Any, caches), cast(Any, None), SETTINGS, cast(Any, None), Policy())
    target = Target(Item("TrainingJob", Key("team", "job")), "7")
    now_s = NOW_UTC.timestamp()
    place = Reservation(JobId("uid-job"), placement(2), (now_s, now_s), now_s + 3600, 1)
    assert rounds._telling.reserved(None, target, now_s) == (None, False)
    assert rounds._telling.reserved(place, target, now_s) == (Reserved(place), True)
    items[Key("team", "job")] = _with_place(waiting, place)
    assert rounds._telling.reserved(place, target, now_s + 60) == (None, False)
    nearer = replace(place, collected=2)
    assert rounds._telling.reserved(nearer, target, now_s) == (Reserved(nearer), False)
    exchanged = replace(place, since_s=(now_s, now_s + 5))
    assert rounds._telling.reserved(exchanged, target, now_s) == (Reserved(exchanged), False)
    assert rounds._telling.reserved(None, target, now_s) == (Reserved(None), True)
    service = Target(Item("ModelService", Key("team", "job")), "7")
    assert rounds._telling.reserved(place, service, now_s) == (None, False)


async def test_a_job_is_told_of_its_deadline_with_its_admission_and_while_it_waits_and_once() -> None:
    controller = Controller(Metrics(), workers=1)
    seen: list[tuple[Decision, ...]] = []

    async def note(key: Key, decisions: tuple[Decision, ...]) -> None:
        seen.append(decisions)

    controller.handles("TrainingJob", note)
    rounds, caches = _live(controller)
    starts = job("starts", deadline="2030-01-01T00:00:00Z")
    waits = job("waits", deadline="2030-01-01T00:00:00Z", shape={"acceleratorsPerPod": 16})
    for each in (starts, waits):
        caches.jobs.observe(each.to_wire())
    await rounds.once()
    [decisions] = seen
    assert [type(decision).__name__ for decision in decisions] == ["Admit", "Deadline"]

    item = Item("TrainingJob", Key("team", "waits"))
    [word] = [d for d in rounds.sentences._told[item].decisions() if isinstance(d, Deadline)]
    known = reconcile(view(waits), deadline=word)
    assert known.status is not None
    newer = waits.metadata.model_copy(update={"resource_version": "8"})
    caches.jobs.observe(waits.model_copy(update={"status": known.status, "metadata": newer}).to_wire())
    rounds.sentences.drop(item)
    await rounds.once()
    again = rounds.sentences._told.get(item)
    assert again is None or not any(isinstance(d, Deadline) for d in again.decisions())


def test_statuses_say_what_is_collected_until_there_is_a_plan() -> None:
    rounds = _rounds()
    read = Reservation(JobId("x"), placement(2), (NOW, NOW), NOW + 60)
    kept = replace(read, since_s=(NOW - 60, NOW - 60))
    snapshot = replace(_cluster(_job("x", 16)), reservations=(read,))
    assert rounds._with_reservations(snapshot).reservations == (read,)
    made, _ = plan(snapshot, Policy(), NOW)
    rounds._last = (snapshot, replace(made, reservations=(kept,)))
    assert rounds._with_reservations(snapshot).reservations == (kept,)
    rounds.forget()
    assert rounds._with_reservations(snapshot).reservations == (read,)


def test_the_price_of_a_watt_hour_is_that_of_the_last_plan() -> None:
    rounds = _rounds()
    assert rounds.watt_prices() == {}
    snapshot = _cluster(_job("x", 16))
    made = replace(plan(snapshot, Policy(), NOW)[0], power_prices=(PowerPrice("row", 0.5, 0.002),))
    rounds._last = (snapshot, made)
    assert rounds.watt_prices() == {"row": 0.002}


def test_the_domains_on_which_jobs_lack_watts_are_those_of_the_last_plan() -> None:
    rounds = _rounds()
    assert rounds.lacking_watts() == frozenset()
    snapshot = _cluster(_job("x", 4000))
    made = plan(snapshot, Policy(), NOW)[0]
    [record] = made.waiting
    rounds._last = (snapshot, made)
    assert rounds.lacking_watts() == frozenset(), "it lacks accelerators"
    record = replace(record, code=WaitCode.POWER, domain="row")
    rounds._last = (snapshot, replace(made, waiting=(record,)))
    assert rounds.lacking_watts() == {"row"}
    never = replace(record, above_limit=True)
    rounds._last = (snapshot, replace(made, waiting=(never,)))
    assert rounds.lacking_watts() == frozenset(), "it could not start with all watts of the domain"


async def test_what_the_statuses_say_is_left_out_after_a_round_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, _ = _live(Controller(Metrics(), workers=1))
    read = Reservation(JobId("x"), placement(2), (NOW, NOW), NOW + 60)
    begun_with: list[tuple[Reservation, ...]] = []
    works = False

    def decide(given: Snapshot, now: float, full: bool) -> Plan:
        begun_with.append(given.reservations)
        if not works:
            raise PlanRefused("it never fits")
        return plan(given, Policy(), now)[0]

    monkeypatch.setattr(SnapshotBuilder, "_reservations", lambda self: (read,))
    monkeypatch.setattr(rounds, "_decide", decide)
    for _ in range(2):
        with pytest.raises(PlanRefused):
            await rounds.once()
    works = True
    for _ in range(2):
        await rounds.once()
    assert begun_with == [(read,), (), (), (read,)]
