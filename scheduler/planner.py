"""The decision: a snapshot in, a plan out.

`plan` makes the full plan:

    1. Compute entitlements (fairness/fair_share.py) and the shares that deadlines need (candidates/deadlines.py), and
       price the accelerators and, where they are scarce, the watts (candidates/prices.py).
    2. Start waiting jobs in free room, by rights (search/start.py), or where replicas sleep (search/sleepers.py).
    3. Make room for jobs whose rights (search/preemption.py), deadlines (search/hasten.py) or value (search/swap.py)
       demand it.
    4. Move and resize running jobs where that clearly pays (search/migration.py).
       Move others where a job fits by count and not by place (search/defragment.py).
    5. Repeat from 2 until nothing changes.
    6. If the certified gap is large and the policy allows it, run the solver (search/milp.py); then steps 2 to 5
       once more, for what it has made possible.
    7. Let elastic jobs grow into room for which nobody waits (search/growth.py), and give pods to each other
       (search/transfer.py).
    8. Say why the other jobs wait (explain/).

`react` answers an event between two full plans. It takes over the last plan's policy, prices and values, and
does steps 2 and 3 (by rights, not by value) for the jobs that the event touches:

    - new or changed jobs, those of a tenant that changed, and those of a class whose speed was reported;
    - jobs that wait for room where something became free, as far as they fit;
    - jobs that the last plan started and that still wait; where others have still to leave the place, the job keeps it
      and starts as soon as there is room anywhere (search/promised_places.py);
    - jobs that are stopped for one of these.

It keeps the reservations and uses them; new ones are for the next full plan to make (search/reservations.py).
All other waiting jobs keep their record, with the id of the plan that made it. The answer depends on the
snapshot, the plan and the event alone: the memo holds the state of the last snapshot (search/state.py; after a full
plan: of the snapshot with the plan carried out), which follows the difference instead of being built again, with the
places that were promised.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import filterfalse

from .candidates.prices import prices_of
from .errors import SolverError
from .explain.records import records
from .model.alike import Together
from .model.apply import applied
from .model.events import Event, Happened
from .model.plans import ActionKind, Plan, Policy, Price, RecordIndex, SharePrice, WaitCode
from .model.snapshot import JobId, Reservation, Snapshot
from .search.actions import actions
from .search.defragment import defragment
from .search.exchange import exchange
from .search.fitting import fitting
from .search.follow import follow
from .search.growth import grow
from .search.hasten import hasten
from .search.holds import lifted
from .search.migration import move
from .search.milp import optimise, worth_trying
from .search.preemption import reclaim
from .search.promised_places import carry
from .search.reservations import keep, reservations, reserve, take
from .search.round import Round
from .search.sleepers import take_from_sleepers
from .search.start import Blocked, order, start_waiting
from .search.state import Assignment, Memo, PlanningState
from .search.swap import improve
from .search.transfer import transfer
from .search.watt_work import power_prices
from .search.watts import lift

PASSES = 6
"""Steps 2 to 4 settle after two or three passes; this is only a bound."""


def plan(snapshot: Snapshot, policy: Policy, now: float, memo: Memo | None = None) -> tuple[Plan, Memo]:
    """The plan for this moment.

    Args:
        now: seconds since the epoch; the only clock there is.
        memo: from an earlier round. The plan is the same without it.

    Raises:
        SnapshotError: a name stands twice, or a node names a pool that does not exist.
    """
    with _uncollected(grown=True):
        return _plan(snapshot, policy, now)


@contextmanager
def _uncollected(grown: bool) -> Iterator[None]:
    """Within this context the cyclic garbage collector rests. A plan makes millions of objects that live until it is done, an
    answer to an event tens of thousands; looking through all of them again and again costs a sixth of the time and finds
    nothing.

    Args:
        grown: count what is left at the end as old, which spares the collector from looking through it when it runs again:
            a tenth of a large plan's time. What a plan leaves has no cycles (`Round.end`). (What the caller had frozen,
            imported modules for example, is looked through again from then on, with all that is old, which is seldom.)
            Cycles that are young when it begins grow old, too: a caller whose process makes them collects them before.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if grown:
                gc.freeze()
                gc.unfreeze()  # what was frozen is now the oldest generation
            gc.enable()


def _plan(snapshot: Snapshot, policy: Policy, now: float) -> tuple[Plan, Memo]:
    together = Together.of(snapshot)
    state = PlanningState(together.snapshot, policy, now)
    round_ = Round(state, now)
    keep(round_, together.snapshot.reservations)
    blocked = _settled(round_)
    gained, solver_error = 0.0, state.candidates.solver_error
    if policy.solver and worth_trying(state.value(), state.market.bound, policy):
        try:
            gained = optimise(round_)
        except SolverError as error:
            solver_error = str(error)
        if gained:
            round_.recall_delayed()
            blocked = _settled(round_)
    blocked = take_from_sleepers(round_, blocked, last=True)
    grow(round_)
    transfer(round_)
    lift(round_, blocked)
    prices = tuple(Price(kind, price) for kind, price in sorted(state.market.prices.items()))
    value = state.value()
    identity = _identity(snapshot, policy, now)
    made = actions(round_)
    kept = reservations(round_, made)
    record_index = records(round_, blocked, made, identity, reservations=kept)
    result = Plan(
        id=identity,
        at_s=now,
        actions=made,
        waiting=record_index.records,
        reservations=kept,
        prices=prices,
        share_prices=tuple(SharePrice(*item) for item in sorted(state.share_prices.items())),
        power_prices=power_prices(state),
        deadlines=state.deadlines,
        value=value,
        bound=max(state.market.bound, value),
        policy=policy,
        priced_at_s=now,
        solver_gain=gained,
        solver_error=solver_error,
    )
    state.rank()
    state.queues.settled(partial(order, round_))  # so that the first event need not do that
    round_.end()
    _expect(state, result)
    result = together.parted(result)
    return result, Memo(state, record_index.renewed(result.waiting))


def _expect(state: PlanningState, made: Plan) -> None:
    """Take the state to the snapshot with the plan carried out, which is what the first event most likely finds: to follow the
    changes of a whole plan is a part of the plan. Those that were not carried out are followed back by the next answer."""
    if made.actions:
        follow(state, applied(state.snapshot, made, made.at_s))
    state.queues.groups(state.ranked)


def _settled(round_: Round) -> list[Assignment]:
    """Steps 2 to 5; the jobs that could not start, in the order in which they were tried."""
    blocked = take_from_sleepers(round_, start_waiting(round_))
    for _ in range(PASSES):
        changed = take(round_)
        changed = reclaim(round_, _without_place(blocked)) or changed
        changed = hasten(round_) or changed
        changed = round_.sync_holds() or changed
        blocked = _without_place(blocked)
        if reserve(round_, blocked):
            round_.recall_delayed()
            blocked = start_waiting(round_)
            continue
        changed = improve(round_, blocked) or changed
        changed = move(round_) or changed
        changed = exchange(round_) or changed
        changed = defragment(round_, blocked) or changed
        if not changed:
            break
        round_.recall_delayed()
        blocked = start_waiting(round_)
    if round_.sync_holds():  # the last start has taken the room of a reservation
        blocked = start_waiting(round_)
    return blocked


def _without_place(assignments: Iterable[Assignment]) -> list[Assignment]:
    return [assignment for assignment in assignments if assignment.placement is None]


def react(snapshot: Snapshot, last: Plan, event: Event, memo: Memo | None = None) -> tuple[Plan, Memo]:
    """The quick answer to an event: starts and reclaims for the jobs it touches.

    Args:
        snapshot: after the event.
        last: the plan so far, from `plan` or `react`. Its actions need not have been carried out.
        event: what happened, and the time (`at_s`).
        memo: from the call that made `last`. Without it the answer is the same and takes longer.

    Raises:
        SnapshotError: as for `plan`.
    """
    with _uncollected(grown=False):
        return _react(snapshot, last, event, memo)


def _react(snapshot: Snapshot, last: Plan, event: Event, memo: Memo | None) -> tuple[Plan, Memo]:
    together = Together.of(snapshot)
    last, event = together.joined(last), together.event(event)
    state = _planning_state(together.snapshot, last, memo)
    known = None if memo is None else memo.waiting
    if known is None or known.records is not last.waiting:
        known = RecordIndex.of(last.waiting)
    promised, others = _promised(last, known)
    given, rest = carry(state, [*promised, *_delayed(last)], event.at_s)
    round_ = Round(state, event.at_s)
    listed = {one.job for one in promised}
    given += [one for one in rest if one.job in listed]  # a delayed start is tried anew
    keep(round_, [*given, *others], thorough=False, promised={one.job for one in given})
    blocked = Blocked()
    touched = _touched(state, last, known, event)
    with lifted(round_.holds.values()):  # some may use the room of a reservation
        pools = round_.cluster.on_feeds_of({one.pool for one in event.happened if one.frees})
        fit = fitting(round_, pools, blocked, touched)
    left = take_from_sleepers(round_, start_waiting(round_, touched.values(), blocked, fit))
    for _ in range(PASSES):
        changed = take(round_)
        changed = reclaim(round_, _without_place(left)) or changed
        changed = round_.sync_holds() or changed
        if not changed:
            break
        lost = *round_.stopped(), *round_.lost_promised_places(), *round_.recall_delayed()
        touched |= {one.job.id: one for one in lost}
        left = start_waiting(round_, _without_place(touched.values()))
    left = take_from_sleepers(round_, left, last=True)
    lift(round_, left, (record.domain for record in last.waiting if record.code is WaitCode.POWER))
    identity = _next_identity(last, event)
    made = actions(round_)
    kept = reservations(round_, made)
    record_index = records(round_, left, made, identity, known, touched.keys(), kept)
    value = state.value()
    result = replace(
        last,
        id=identity,
        at_s=event.at_s,
        actions=made,
        waiting=record_index.records,
        reservations=kept,
        value=value,
        bound=max(state.bound(), value),
        solver_gain=0.0,
        solver_error=state.candidates.solver_error,
    )
    round_.end()
    result = together.parted(result)
    return result, Memo(state, record_index.renewed(result.waiting))


def _planning_state(snapshot: Snapshot, last: Plan, memo: Memo | None) -> PlanningState:
    """The state of this snapshot at the last plan's values and prices."""
    state = None if memo is None else memo.state
    shares = {share.share_m: share.price for share in last.share_prices}
    watts = {one.domain: one.price for one in last.power_prices if one.price > 0}
    basis = (last.policy, last.priced_at_s, prices_of(last.prices), shares, last.deadlines, watts)
    if state is not None and state.basis == basis and follow(state, snapshot):
        return state
    return PlanningState(snapshot, *basis)


def _touched(state: PlanningState, last: Plan, known: RecordIndex, event: Event) -> dict[JobId, Assignment]:
    """Waiting jobs to try whether they fit or not."""
    names = {action.job for action in last.actions if action.to is not None}
    names |= {reservation.job for reservation in last.reservations}
    names.update(filterfalse(known.by_job.__contains__, state.waiting))
    freed, tenants, classes = set[str](), set[str](), set[str]()
    stopped = {action.job for action in last.actions if action.to is None}
    for one in event.happened:
        if one.kind is Happened.RELEASED and not (one.name in stopped and _says_why(known, JobId(one.name))):
            names.add(JobId(one.name))
        if one.kind is Happened.ARRIVED or one.kind is Happened.CHANGED:
            names.add(JobId(one.name))
        elif one.frees:
            freed.add(one.tenant)
        elif one.kind is Happened.TENANT:
            tenants.add(one.name)
        elif one.kind is Happened.SPEED:
            classes.add(one.name)
    for job, record in known.with_react_code.items():
        limited = record.code in (WaitCode.CEILING, WaitCode.BORROW_LIMIT)
        if record.code is WaitCode.PREEMPTING or (limited and record.tenant in freed):
            names.add(job)
    if tenants or classes:
        names |= {
            name
            for name, assignment in state.waiting.items()
            if assignment.job.tenant in tenants or assignment.job.workload_class in classes
        }
    return {name: state.waiting[name] for name in names if name in state.waiting}


def _promised(last: Plan, known: RecordIndex) -> tuple[list[Reservation], list[Reservation]]:
    """The places of the last plan's reservations that it gave to their jobs, and those that it only collects."""
    given, others = list[Reservation](), list[Reservation]()
    for one in last.reservations:
        record = known.with_react_code.get(one.job)
        (given if record is not None and record.code is WaitCode.PREEMPTING else others).append(one)
    return given, others


def _delayed(last: Plan) -> Iterator[Reservation]:
    """The places where the last plan starts jobs as soon as others have left."""
    listed = {one.job for one in last.reservations}
    for action in last.actions:
        if action.kind is ActionKind.START and action.after and action.to and action.job not in listed:
            place, at_s = action.to, last.at_s
            yield Reservation(action.job, place, (at_s,) * place.pods, at_s, len(set(place.nodes)))


def _says_why(known: RecordIndex, job: JobId) -> bool:
    """Whether the plan that stopped a job has said why it will wait then: nothing has changed for it since."""
    return job in known.by_job and job not in known.with_react_code


def _identity(snapshot: Snapshot, policy: Policy, now: float) -> str:
    """Digest of what the plan was made from, whatever the order of the snapshot's tuples."""
    jobs = sorted((j.id, "" if j.run is None else repr(j.run.placement)) for j in snapshot.jobs)
    kept = [[r.job, r.placement.nodes, r.since_s] for r in snapshot.reservations]
    text = json.dumps([policy.hash, now, jobs, sorted(n.name for n in snapshot.nodes), kept])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _next_identity(last: Plan, event: Event) -> str:
    """The same for an answer to an event: a digest of the plan before and the event."""
    happened = sorted(["\0".join((one.kind, one.name, one.pool, one.tenant)) for one in event.happened])
    text = "\n".join((last.id, repr(event.at_s), *happened))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
