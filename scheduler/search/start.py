"""Starting waiting jobs in free room, in order of rights.

Which tenant is next: the one whose next job has the strongest right (guarantee, fair share, borrowing).
Between guarantees, the one whose claim has been due longest (`Round.reclaim_due_at_s`). Then the one that
holds, and recently held, least for its weight.

Which of its jobs is next: highest priority, then serving (first replicas that requests wait for), then jobs that were
not recently stopped. Between jobs that are equal so far its users take turns by the same rule (inside their share of
the tenant's, then least for their weight). Of a user's jobs, most value per accelerator.

Where it starts: the candidate with the most value above its price; where its share limits its tenant, on the type
on which the job does most work for what it takes of the share (`shares.py`).

    pass   rights               candidates
    1      guaranteed           any
    2      at least entitled    worth their price
    3      at least entitled    any
    4, 5   any                  worth their price, then any

So room that was cleared by a right is never taken by a weaker one, and a job that was stopped does not take
back the place it was stopped for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import cast

from ..candidates.candidate import Candidate
from ..fairness.quota import Right
from ..model.snapshot import Job, JobId, JobKind, Resources
from ..placement.pool import request
from .holds import Hold, lifted
from .queues import Order, request_of
from .round import Round
from .state import Assignment, RankedCandidate


class Blocked:
    """Requests that did not fit. While room only shrinks, a request at least as large does not fit either."""

    def __init__(self) -> None:
        self.least: dict[int, int] = {}
        """The fewest pods that did not fit, by shape number."""
        self.notes = 0
        """How many entries were made."""

    def hopeless(self, shape: int, pods: int) -> bool:
        return pods >= self.least.get(shape, 1 << 30)

    def note(self, shape: int, pods: int) -> None:
        self.notes += 1
        self.least[shape] = min(pods, self.least.get(shape, 1 << 30))


def order(round_: Round, assignment: Assignment) -> Order:
    """Sort key of one tenant's jobs."""
    job, key = assignment.job, assignment.order
    if key is None:
        round_.ranked(assignment)
        key = assignment.order = (
            -round_.priority(job),
            _turn(job),
            False,
            -assignment.value_density,
            job.submitted_at_s,
            job.id,
        )
    if (job.run is None and job.last_move_at_s is None) or not round_.recently_stopped(job):
        return key
    return (*key[:2], True, *key[3:])


def _turn(job: Job) -> int:
    """Of a tenant's jobs with equal priority, smaller ones first."""
    if job.kind is not JobKind.SERVING:
        return 2
    return 0 if job.needed_now else 1


PASSES = (
    (Right.GUARANTEED, False),
    (Right.ENTITLED, True),
    (Right.ENTITLED, False),
    (Right.BORROWING, True),
    (Right.BORROWING, False),
)
"""The weakest right that a pass serves, and whether it considers only candidates worth their price."""


def start_waiting(
    round_: Round,
    assignments: Iterable[Assignment] | None = None,
    blocked: Blocked | None = None,
    others: Iterable[Assignment] = (),
) -> list[Assignment]:
    """Start the jobs that fit; returns those that could not start, in the order in which they were tried.

    Args:
        assignments: jobs to try; None: all that wait.
        blocked: requests known not to fit.
        others: jobs to try as long as there is room for them; they are returned only if a job of their tenant
            with a lower priority was started.
    """
    round_.sync_holds()
    _use_freed_room(round_)
    blocked = Blocked() if blocked is None else blocked
    asked = round_.waiting() if assignments is None else assignments
    wanted = [one for one in asked if not one.job.yields and not _ended(round_, one)]
    keep = {assignment.job.id for assignment in wanted}
    others = list(others)
    if round_.holds:
        _use_reservations(round_, wanted)
        wanted = [assignment for assignment in wanted if assignment.placement is None]
    left = [*wanted, *others]
    left.sort(key=lambda assignment: order(round_, assignment), reverse=True)
    tried = left
    known = -1
    full = _nothing_fits(round_, left)
    for right, worthwhile in PASSES:
        if full and (right, worthwhile) != PASSES[-1]:
            continue  # nobody starts, and only the order remains to be found
        if right is Right.BORROWING or _any_could_start(round_, left, blocked, right, worthwhile):
            tried = _pass(round_, left, blocked, right, worthwhile, full)
            left = [assignment for assignment in left if assignment.placement is None]
        if blocked.notes != known:
            known = blocked.notes
            left = [
                assignment
                for assignment in left
                if assignment.job.id in keep or not _hopeless(round_, assignment, blocked)
            ]
        full = full or all(_hopeless(round_, assignment, blocked) for assignment in left)
    if any(hold.applied and hold.withholds for hold in round_.holds.values()):
        tried = _backfill(round_, tried)
    return [assignment for assignment in tried if assignment.job.id in keep] + _passed(round_, wanted, others)


def _use_reservations(round_: Round, wanted: Iterable[Assignment]) -> None:
    """Start the jobs whose reserved place is free, or is only waiting for those that are being stopped."""
    names = {assignment.job.id for assignment in wanted}
    for job, hold in round_.holds.items():
        assignment, candidate = hold.holder, hold.candidate
        if job not in names or assignment.placement is not None or not hold.applied:
            continue
        if not round_.shares.are_due(hold):
            continue
        if not round_.allows(assignment.job, candidate):
            continue
        place = hold.placement
        hold.lift()
        if hold.nodes.fits(place):
            round_.put(assignment, candidate, place.nodes)
        elif hold.nodes.releasing and hold.nodes.fits(place, later=True):
            round_.put(assignment, candidate, place.nodes, release=True)
        else:
            hold.apply()


def _backfill(round_: Round, tried: list[Assignment]) -> list[Assignment]:
    """Start jobs in the room of reservations that they pass, or leave in time; returns those left."""
    while True:
        known: dict[tuple[JobId, ...], Blocked] = {}
        starts = [hold.start_s for hold in round_.holds.values()]
        left: list[Assignment] = []
        for assignment in tried:
            if assignment.placement is None and not _start_in_held_room(round_, assignment, known):
                left.append(assignment)
        if starts == [hold.start_s for hold in round_.holds.values()]:
            return left
        tried = left  # a start that has moved leaves time for others


def _start_in_held_room(
    round_: Round, assignment: Assignment, known: dict[tuple[JobId, ...], Blocked]
) -> bool:
    """Whether the job was started; `known`: requests that did not fit, by the reservations that were open."""
    passed: dict[JobId, bool] = {}
    for row in assignment.ranked or round_.ranked(assignment):
        candidate = row.candidate
        holds, keep_watts = _open_to(round_, assignment, candidate, passed)
        if not holds:
            continue
        blocked = known.setdefault((*(hold.holder.job.id for hold in holds), *sorted(keep_watts)), Blocked())
        if blocked.hopeless(row.shape, candidate.pods):
            continue
        with lifted(holds, keep_watts):
            found = _open(round_, assignment, row, blocked, Right.BORROWING)
            if found is not None:
                round_.put(assignment, candidate, *found)
                for hold in holds:
                    if _may_backfill(round_, hold, assignment, candidate):
                        hold.leaving[assignment.job.id] = assignment
                        round_.leavers.add(assignment.job.id)
                        if not round_.passes(assignment, hold):
                            if hold.backfilled is not None:
                                hold.backfilled.add(assignment.job.id)
                        elif assignment is not hold.holder:  # it is not stopped for it
                            hold.start_s = max(hold.start_s, round_.stay(assignment)[0])
        if found is not None:
            return True
    return False


def _open_to(
    round_: Round, assignment: Assignment, candidate: Candidate, passed: dict[JobId, bool]
) -> tuple[list[Hold], frozenset[JobId]]:
    """The reservations whose room the job may have with this candidate, and the holders of those whose watts it may not
    have: a job that would have to be stopped for one must stand on its nodes.

    Args:
        passed: by their holders, of the reservations that were looked at whether the job passes them.
    """
    holds: list[Hold] = []
    keep_watts: set[JobId] = set()
    domains = round_.cluster.pools[candidate.pool].limiting if candidate.draw_w else frozenset[int]()
    for hold in round_.holds.values():
        here = hold.candidate.pool == candidate.pool
        if not hold.applied or not (hold.withholds if here else hold.withholds_of(domains)):
            continue
        passes, holder = _ends_in_time(round_, hold, assignment, candidate), hold.holder.job.id
        if not passes:
            known = passed.get(holder)
            passes = passed[holder] = round_.passes(assignment, hold) if known is None else known
        if passes:
            holds.append(hold)
        elif here and _may_backfill(round_, hold, assignment, candidate):
            holds.append(hold)
            if hold.withholds_watts:
                keep_watts.add(hold.holder.job.id)
    return holds, frozenset(keep_watts)


def _may_backfill(round_: Round, hold: Hold, assignment: Assignment, candidate: Candidate) -> bool:
    """Whether the job may start in the room of a reservation: it is gone in time, or can be stopped then."""
    job, policy = assignment.job, round_.policy
    if _ends_in_time(round_, hold, assignment, candidate):
        return True
    earns_s = policy.min_run_s + policy.move_gain_factor * job.restart_s
    able = job.kind is JobKind.TRAINING and job.preemptible and round_.may_be_preempted_again(assignment)
    return able and hold.candidate.pool == candidate.pool and hold.start_s - round_.now >= earns_s


def _ends_in_time(round_: Round, hold: Hold, assignment: Assignment, candidate: Candidate) -> bool:
    """Whether the job will have ended when the place of the reservation is used."""
    left = assignment.job.remaining_work if assignment.job.kind is JobKind.TRAINING else None
    return left is not None and left <= (hold.start_s - round_.now) * candidate.speed


def _passed(round_: Round, wanted: list[Assignment], others: list[Assignment]) -> list[Assignment]:
    """Of the others, the jobs without a place that outrank a job that was started: a pass that considers only
    candidates worth their price may start the lower priority first."""
    lowest: dict[str, int] = {}
    for assignment in [*wanted, *others] if others else ():
        if assignment.placement is not None:
            tenant, priority = assignment.job.tenant, round_.priority(assignment.job)
            lowest[tenant] = min(priority, lowest.get(tenant, priority))
    found = [
        assignment
        for assignment in others
        if assignment.placement is None
        and round_.priority(assignment.job)
        > lowest.get(assignment.job.tenant, round_.priority(assignment.job))
    ]
    return sorted(found, key=lambda assignment: order(round_, assignment))


def _nothing_fits(round_: Round, assignments: Iterable[Assignment]) -> bool:
    """Whether no request of these jobs fits."""
    least: dict[int, tuple[int, Assignment, RankedCandidate]] = {}
    """The fewest pods of each shape, and whose request that is."""
    for assignment in {request_of(one): one for one in assignments}.values():
        for row in assignment.ranked or round_.ranked(assignment):
            known, pods = least.get(row.shape), row.candidate.pods
            if known is None or pods < known[0]:
                least[row.shape] = pods, assignment, row
    return all(
        round_.pods_that_fit(assignment.job, row.candidate) < pods for pods, assignment, row in least.values()
    )


def _ended(round_: Round, assignment: Assignment) -> bool:
    """Whether it is a foreign pod that has been stopped: it ends there and does not start elsewhere in the
    same round."""
    job = assignment.job
    return job.kind is JobKind.OPAQUE and (job.run is not None or job.last_move_at_s == round_.now)


def _use_freed_room(round_: Round) -> None:
    """Jobs whose place waits for a release start in room that has become free since."""
    waiting, free = round_.waiting_for_release(), _Free(round_)
    if not any(map(free.could_hold, waiting)):
        return
    for assignment in sorted(waiting, key=lambda one: order(round_, one)):
        if not free.could_hold(assignment):
            continue
        placement, candidate, started = assignment.placement, assignment.candidate, assignment.started_at_s
        assert placement is not None
        assert candidate is not None
        round_.clear(assignment)
        found = round_.find(assignment.job, candidate)
        if found is None or found[1]:
            round_.restore(assignment, placement, candidate, started, release=True)
        else:
            round_.put(assignment, candidate, *found)
            free = _Free(round_)


class _Free:
    """How many pods fit now, at most, as long as nobody moves: where others would have to leave for a job, no search is
    needed to know that it cannot start."""

    def __init__(self, round_: Round) -> None:
        self._pools = round_.cluster.pools
        self._pods: dict[tuple[str, Resources], int] = {}

    def could_hold(self, assignment: Assignment) -> bool:
        """Whether a job could have its candidate now if it left the place that it has."""
        place = assignment.placement
        assert place is not None
        nodes, key = self._pools[place.pool], (place.pool, place.per_pod)
        ask = request(place.per_pod, nodes.pool.is_cpu)
        pods = self._pods.get(key)
        if pods is None:
            pods = self._pods[key] = sum(room for _, room in nodes.rooms(ask, False, None))
        if not pods and any(nodes.free_now[nodes.index[name]][nodes.key] < 0 for name in place.nodes):
            return False  # nor is what it has free yet
        for i, amounts in nodes.holds(place).items():
            free = nodes.free_now[i]
            pods += nodes.room_in([has + takes for has, takes in zip(free, amounts, strict=True)], ask)
        return pods >= place.pods


def _any_could_start(
    round_: Round, assignments: list[Assignment], blocked: Blocked, weakest: Right, worthwhile: bool
) -> bool:
    """Whether any of these jobs could start in a pass: within a pass rights only weaken and room only
    shrinks."""
    holdings = round_.holdings
    return any(
        holdings.best_right(assignment.job.tenant, assignment.option.shared.sizes) <= weakest
        and not (worthwhile and round_.ranked(assignment)[0].profit < -1e-9)
        and not _hopeless(round_, assignment, blocked)
        for assignment in assignments
    )


def _hopeless(round_: Round, assignment: Assignment, blocked: Blocked) -> bool:
    least = blocked.least
    for row in assignment.ranked or round_.ranked(assignment):
        pods = least.get(row.shape)
        if pods is None or row.candidate.pods < pods:
            return False
    return True


class _TenantQueue:
    """The waiting jobs of one tenant in a pass.

    If several users have jobs, each user has its own queue. Among jobs that are equal in the first three
    parts of `order`, the user with the lowest `Holdings.user_order` is next.
    """

    def __init__(self, round_: Round, assignments: list[Assignment]) -> None:
        """`assignments` are sorted last first."""
        self.round = round_
        self.users: dict[str, list[Assignment]] = {}
        for assignment in assignments:
            self.users.setdefault(assignment.job.user, []).append(assignment)
        self.first = next(iter(self.users))
        self.shared = len(self.users) > 1
        self._version = -1
        self._turns: dict[int, tuple[Right, float, float]] = {}
        """By request, if its guarantee is not due."""
        self._held_per_weight = 0.0
        self.heap = [self._key(user) for user in self.users] if self.shared else []
        heapify(self.heap)

    def _key(self, user: str) -> tuple[object, ...]:
        assignment = self.users[user][-1]
        turn = self.round.holdings.user_order(assignment.job.tenant, user, assignment.option.shared.sizes)
        own = order(self.round, assignment)
        return (*own[:3], *turn, *own[3:], user)

    def turn(self) -> tuple[Right, float, float]:
        """When it is the tenant's turn among others, for its next job: by right, by when a guarantee is due, by what it
        holds."""
        assignment, holdings, now = self.next(), self.round.holdings, self.round.now
        job, shared = assignment.job, assignment.option.shared
        version = holdings.version.get(job.tenant, 0)
        if version != self._version:
            self._version, self._turns = version, {}
            self._held_per_weight = holdings.held_per_weight(job.tenant)
        known = self._turns.get(id(shared))
        if known is None:
            right = holdings.best_right(job.tenant, shared.sizes)
            known = self._turns[id(shared)] = right, math.inf, self._held_per_weight
        if known[0] is not Right.GUARANTEED:
            return known
        due = self.round.reclaim_due_at_s(assignment)
        return known if due > now else (known[0], due, known[2])

    def __bool__(self) -> bool:
        """Whether a job is left."""
        return bool(self.heap if self.shared else self.users[self.first])

    def next(self) -> Assignment:
        """The next job."""
        return self.users[cast(str, self.heap[0][-1]) if self.shared else self.first][-1]

    def pop(self) -> Assignment:
        """Remove the next job; call `requeue` when it has started or failed to."""
        if self.shared:
            self.first = cast(str, heappop(self.heap)[-1])
        return self.users[self.first].pop()

    def requeue(self) -> None:
        """Sort the user of the removed job in again, by what it holds now."""
        if self.shared and self.users[self.first]:
            heappush(self.heap, self._key(self.first))


def _pass(
    round_: Round,
    assignments: list[Assignment],
    blocked: Blocked,
    weakest: Right,
    worthwhile: bool,
    full: bool,
) -> list[Assignment]:
    """One pass over the jobs, which are sorted last first; returns those left, in the order tried (`full`:
    none of them fits)."""
    queues: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        queues.setdefault(assignment.job.tenant, []).append(assignment)
    queues_of = {name: _TenantQueue(round_, queue) for name, queue in queues.items()}
    heap = [(*queue.turn(), name) for name, queue in queues_of.items()]
    heapify(heap)
    left: list[Assignment] = []
    while heap:
        right, _, _, name = heappop(heap)
        queue = queues_of[name]
        while True:
            assignment = queue.pop()
            if full or right > weakest or not start_one(round_, assignment, blocked, weakest, worthwhile):
                left.append(assignment)
            queue.requeue()
            if not queue:
                break
            fresh = queue.turn()
            if heap and (*fresh, name) > heap[0]:
                heappush(heap, (*fresh, name))
                break
            right = fresh[0]
    return left


def start_one(
    round_: Round, assignment: Assignment, blocked: Blocked, weakest: Right, worthwhile: bool
) -> bool:
    """Start one job on its best candidate that fits and for which its right is strong enough; of equally good
    candidates on the one that costs the rest of the cluster least."""
    if blocked.least and _hopeless(round_, assignment, blocked):
        return False
    rows = round_.shares.ordered(assignment)
    for place, row in enumerate(rows):
        if worthwhile and row.profit < -1e-9:
            return False
        found = _open(round_, assignment, row, blocked, weakest)
        if found is None:
            continue
        rival = rows[place + 1] if place + 1 < len(rows) else None
        if rival is not None and rival.profit == row.profit and row.candidate.pods == 1:
            equal = [
                other for other in rows[place:] if other.profit == row.profit and other.candidate.pods == 1
            ]
            row, found = _least_loss(round_, assignment, equal, blocked, weakest) or (row, found)
        round_.put(assignment, row.candidate, *found)
        return True
    return False


_Found = tuple[tuple[str, ...], bool]


def _open(
    round_: Round, assignment: Assignment, row: RankedCandidate, blocked: Blocked, weakest: Right
) -> _Found | None:
    """Nodes for the job with this candidate, if its right is strong enough and it fits."""
    candidate, shape = row.candidate, row.shape
    if candidate.pods >= blocked.least.get(shape, 1 << 30):
        return None
    job, asked = assignment.job, (candidate.accelerator, candidate.accelerators_m)
    if weakest < Right.BORROWING and round_.holdings.right(job.tenant, *asked) > weakest:
        return None
    if not round_.allows(job, candidate):
        return None
    found = round_.find(job, candidate)
    if found is None:
        blocked.note(shape, candidate.pods)
    return found


def _least_loss(
    round_: Round, assignment: Assignment, rows: Iterable[RankedCandidate], blocked: Blocked, weakest: Right
) -> tuple[RankedCandidate, _Found] | None:
    """Of several candidates of one pod, the one whose node is left most useful; room that is free now comes
    before room that will be."""
    best: tuple[tuple[bool, float], RankedCandidate, _Found] | None = None
    for row in rows:
        found = _open(round_, assignment, row, blocked, weakest)
        if found is not None:
            key = (
                found[1],
                round_.cluster.loss(assignment.job, row.candidate, found[1]),
            )
            if best is None or key < best[0]:
                best = key, row, found
    return None if best is None else best[1:]
