"""Reservations: who is first in line gets a place and a start time, and nobody who comes later passes it.

A job gets a reservation if it could run here, cannot start now, asks for more than one accelerator, and one of
these holds:

    claim      who                                                             who gives way, and when
    priority   a job of its tenant with a lower priority runs or waits         preemptible jobs of its tenant with a
                                                                               lower priority, after `min_run_s`
    share      it is inside its tenant's fair share, and another tenant        preemptible jobs of tenants above their
               holds more than its own                                         share, of that surplus, after
                                                                               `share_run_s` (rules.py)
    patience   there are smaller jobs, and it has waited `Policy.patience`     nobody: jobs leave when they end
               times its expected duration; first of the tenant that holds
               least for its weight

The place is collected node by node. Each job on a node leaves when it ends (its remaining work at its present
speed; if the length is unknown: when it has run as long as the jobs that run now have on average, at least
`expected_run_s`, or else twice as long as now), or earlier when the claim allows to stop it. The nodes whose room is there first are chosen, and the start is when
the last of them is ready and the power domains above them carry the job: watts come free as room does, from whoever on
the domains ends first (`watt_ends.py`). Nobody is stopped before that moment: then all that still has to give way is stopped
at once, so that no node idles while the others are collected. (If the plan may disrupt no more jobs by then,
`Policy.churn`, that moment is `min_run_s` after the reservation was made, at the latest.)

What starts on a collected node meanwhile (backfilling):

    a job that will have ended by the start, if its length is known
    a preemptible training job that can run `min_run_s` and earn its restart before the start: it is stopped for
      the reservation, whoever it is, if it is still there
    a job of the same tenant with a higher priority, and a claim on a guarantee: they pass the reservation, which then
      starts when they have ended

Watts that are collected are withheld on all nodes of the power domain. Of these jobs only the first and the last kind
may have them: who is to be stopped for a reservation stands on its nodes.

A reservation for patience is used when it is due (`Shares.are_due`): a tenant that holds more than its share does not
take more by it while another lacks a part of its own, and jobs inside a share pass it until then. A job too large for
its tenant's share is due when it has its turn after others of its tenant (`turns.py`), and is patient when its own time is
in proportion; at once where nobody else takes the room.

With the objective makespan the expected duration is at least that of the whole list, and a job waits for its patience only
while newer ones come: jobs of one list do not pass each other, they run in the order in which the list ends first.

A reservation keeps its nodes from plan to plan (`Plan.reservations`, `Snapshot.reservations`). A node that is not
ready may be exchanged for one that is, and all nodes for others only if that halves the time that is left; so the
start moves back only if a job runs longer than expected. A reservation takes no node of another one, but a job
may be given what it leaves of a node. Earlier ones go first; inside a tenant, higher priorities. A place that a job
of any size has and cannot use before others have left is carried into the next plan in the same way. Answers to
events (`planner.react`) keep reservations on the nodes that they have, and leave new ones to the next full plan; a
place that a job was given already stays its own, unless it could start elsewhere now (`promised_places.py`).

Not covered: a job that only its tenant's quota holds back (there is room, but no right to it); a share that needs
whole nodes where the other tenants' surplus lies on no whole node (it waits until jobs end, for its patience, or until who
gives way by `gap` has run long enough);
a job of one accelerator that others pass because they draw less;
requests for a part of an accelerator; and guarantees, which have a deadline of their own (`preemption.py`).

Without reservations 13 scenarios of `benchmarks/scheduling` fail, without patience alone six, and then jobs of five tenants
with a backlog move 1.4 times as often.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice

from ..candidates.candidate import Candidate, SharedCandidates
from ..fairness.quota import Right
from ..model.plans import Action
from ..model.snapshot import Job, JobId, JobKind, Placement, Reservation
from ..placement.pool import PoolNodes
from .claim import Claim
from .collection import Collection
from .holds import Hold, since_of
from .promised_places import PromisedPlace
from .proposal import propose
from .round import Round
from .rules import RESERVATION
from .state import Assignment, least_m
from .surplus import spare_m
from .victim_groups import Victim, VictimGroup

OPTIONS = 4
"""Candidates that are compared for one reservation: the best pools, each with the fewest pods."""

_Unready = tuple[Assignment, Candidate, dict[int, float], Reservation]
"""A reservation whose room is not there: holder, candidate, since when each node is collected."""


# -- claims ---------------------------------------------------------------------------------------------------


def keep(
    round_: Round,
    known: Iterable[Reservation],
    thorough: bool = True,
    promised: Container[JobId] = frozenset(),
) -> None:
    """Hold the room of the reservations of the plan before. Where it is there the job starts, before another
    reservation changes over to it.

    Args:
        thorough: also look for nodes that are ready sooner; else only where a node is lost.
        promised: jobs whose reservation is a place that the plan gave them, and that they keep.
    """
    unready: list[_Unready] = []
    for reservation in known:
        carried = round_.state.carried.get(reservation.job)
        if carried is not None:
            round_.holds[reservation.job], round_.promised_places[reservation.job] = carried.hold, carried
            continue
        assignment = round_.assignments.get(reservation.job)
        place = reservation.placement
        nodes = round_.cluster.pools.get(place.pool)
        if assignment is None or assignment.job.run is not None or nodes is None:
            continue
        if assignment.job.kind is JobKind.OPAQUE and assignment.job.last_move_at_s == round_.now:
            continue  # it ends
        candidate = assignment.option.listed(place)
        if candidate is None or not round_.allows(assignment.job, candidate):
            continue
        since_s, hold = since_of(nodes, reservation), None
        if _is_there(nodes, assignment.job, candidate.placed(place.nodes)):  # a node of it may be gone
            hold = Hold(assignment, candidate, nodes, since_s, [nodes.index[name] for name in place.nodes])
            hold.turn_s = reservation.turn_s
        if (
            hold is not None
            and not _too_early(round_, hold, unready, reservation)
            and round_.shares.are_due(hold)
        ):
            _give(round_, hold)
            if reservation.job in promised and assignment.placement is not None:
                round_.promised_places[reservation.job] = PromisedPlace(
                    reservation, hold, assignment.placement
                )
        else:
            unready.append((assignment, candidate, since_s, reservation))
    for assignment, candidate, since_s, before in unready:
        others = {
            i
            for _, other, own, _ in unready
            if other.pool == candidate.pool and own is not since_s
            for i in own
        }
        collection = Collection(
            round_,
            assignment,
            candidate,
            since_s,
            others,
            None if before.backfilled is None else frozenset(before.backfilled),
            before.turn_s,
        )
        kept = _kept(round_, collection, thorough)
        if kept is not None:
            kept.patient = not _by_right(round_, assignment)
            _add(round_, kept, set(kept.places) - since_s.keys())


def reserve(round_: Round, blocked: Iterable[Assignment]) -> list[Assignment]:
    """Make reservations for blocked jobs that are first in line. Returns the jobs to try again: those whose
    room is there, and those that this round had placed on their nodes."""
    if _are_enough(round_):
        return []
    large: dict[int, bool] = {}
    waiting = [
        a
        for a in blocked
        if a.placement is None
        and a.job.run is None
        and a.job.id not in round_.holds
        and _large(a.option.shared, large)
    ]
    if not waiting:
        return []
    again: list[Assignment] = []
    smallest = min(round_.state.sizes)
    claims = [a for a in waiting if _by_right(round_, a)]
    by_right = {a.job.id for a in claims}
    patient = [
        a for a in waiting if a.job.id not in by_right and least_m(a.job) > smallest and round_.is_patient(a)
    ]
    patient.sort(key=lambda a: (round_.holdings.held_per_weight(a.job.tenant), a.job.waits_since_s, a.job.id))
    for own, first in ((False, claims), (True, patient)):
        again += _reserve_some(round_, first, own)
    return again


def _reserve_some(round_: Round, waiting: Iterable[Assignment], patient: bool) -> list[Assignment]:
    """The same for jobs of one kind; as many are tried as there may be reservations."""
    most, again = round_.policy.reservations, list[Assignment]()
    for assignment in islice(waiting, most):
        if _are_enough(round_) or (patient and 2 * sum(one.patient for one in round_.holds.values()) >= most):
            break
        hold, cleared = _found(round_, assignment)
        if hold is None:
            continue
        hold.patient = patient
        _add(round_, hold, set(hold.places))
        again += cleared
        if hold.start_s <= round_.now:
            again.append(assignment)
    return again


def _are_enough(round_: Round) -> bool:
    """Whether as many jobs wait with a reservation as may (`Policy.reservations`)."""
    waits = sum(hold.holder.placement is None for hold in round_.holds.values())
    return waits >= round_.policy.reservations


def _large(shared: SharedCandidates, known: dict[int, bool]) -> bool:
    """Whether smaller requests could pass the job: whatever becomes free is offered to the first in line, so one
    accelerator is never taken from under it. `known`: answers so far."""
    found = known.get(id(shared))
    if found is None:
        found = known[id(shared)] = any(c.accelerators_m > 1000 for c in shared.candidates) and all(
            c.per_pod.accelerators_m % 1000 == 0 for c in shared.candidates
        )
    return found


def _by_right(round_: Round, assignment: Assignment) -> bool:
    """Whether others give way to the job: by priority, or by its tenant's share."""
    return round_.outranks_one(assignment) or _below_share(round_, assignment)


def _below_share(round_: Round, assignment: Assignment) -> bool:
    """Whether the job is inside its tenant's share and another tenant is above its own where it could run."""
    holdings, tenant = round_.holdings, assignment.job.tenant
    for candidate in assignment.option.candidates:
        if holdings.right(tenant, candidate.accelerator, candidate.accelerators_m) is not Right.ENTITLED:
            continue
        others = {name for (pool, name), held in round_.held.items() if pool == candidate.pool and held}
        if any(
            spare_m(round_, other, candidate.accelerator, Right.ENTITLED) > 0 for other in others - {tenant}
        ):
            return True
    return False


def _add(round_: Round, hold: Hold, taken: set[int]) -> None:
    """Add a hold; inside a tenant higher priorities come first. Holds whose nodes it takes are given up."""
    for job, other in list(round_.holds.items()):
        if other.nodes is hold.nodes and not taken.isdisjoint(other.places):
            other.lift()
            del round_.holds[job]
    round_.holds[hold.holder.job.id] = hold
    hold.apply()


def _is_there(nodes: PoolNodes, job: Job, place: Placement) -> bool:
    """Whether the room of a reservation is free, or will be when stopping jobs have left, beside what is kept for
    earlier ones."""
    return nodes.may_hold(job, place) and nodes.fits(place, later=True)


def _too_early(round_: Round, hold: Hold, earlier: Iterable[_Unready], known: Reservation) -> bool:
    """Whether its watts are there before its start only because earlier reservations still collect them."""
    if hold.watts is None or known.start_s <= round_.now:
        return False
    collects = {number for _, other, *_ in earlier for number in round_.cluster.pools[other.pool].limiting}
    return not collects.isdisjoint(hold.watts.asked)


def _give(round_: Round, hold: Hold) -> None:
    """Give the holder its place, whose whole room is there: who can leave in time may stay beside it, and the others
    know it as a job that will leave."""
    hold.start_s, hold.collected = round_.now, len(set(hold.places))
    round_.holds[hold.holder.job.id] = hold
    place, nodes = hold.placement, hold.nodes
    # Where jobs are leaving, who may have what is free now is decided by the order of the waiting jobs (`start.py`).
    round_.put(hold.holder, hold.candidate, place.nodes, release=nodes.releasing > 0 or not nodes.fits(place))


def _found(round_: Round, assignment: Assignment) -> tuple[Hold | None, list[Assignment]]:
    """The best place of the job, and the jobs of this round that were cleared from it. What may be taken of a tenant
    is less without these; so the place is looked for again until it holds without them."""
    found: list[Assignment] = []
    with round_.trial() as trial:
        hold = _best(round_, assignment)
        while hold is not None:
            cleared = _cleared(round_, hold)
            if not cleared:
                trial.keep()
                return hold, found
            found += cleared
            hold = Collection(round_, assignment, hold.candidate, {}).hold()
    return None, []


def _cleared(round_: Round, hold: Hold) -> list[Assignment]:
    """Take the places of jobs that this round put on the nodes. They are tried again as the next plan would: other
    room first, then beside the reservation. A claim that has stopped others for its place keeps it."""
    found = [
        a
        for a in hold.leaving.values()
        if a.job.run is None and a.placement is not None and a.job.id not in round_.claimed
    ]
    for assignment in found:
        round_.clear(assignment)
    return found


# -- places ---------------------------------------------------------------------------------------------------


def _best(round_: Round, assignment: Assignment) -> Hold | None:
    """The place where the job would be done first."""
    found: tuple[float, Hold] | None = None
    for candidate in _options(round_, assignment):
        hold = Collection(round_, assignment, candidate, {}).hold()
        if hold is not None:
            duration_s = (
                round_.expected_s(assignment) * assignment.option.best_speed / max(candidate.speed, 1e-12)
            )
            done_s = hold.start_s + duration_s
            if found is None or done_s < found[0] - 1e-6:
                found = done_s, hold
    return None if found is None else found[1]


def _options(round_: Round, assignment: Assignment) -> list[Candidate]:
    """In each pool and mode the candidate with the fewest pods, the most profitable pools first; under the highest power
    cap, or none, with which the domains could ever carry it."""
    least: dict[tuple[str, str], Candidate] = {}
    for row in round_.ranked(assignment):
        candidate = row.candidate
        key = (candidate.pool, candidate.mode)
        known = least.get(key)
        better = known is None or (candidate.pods, -candidate.power_cap) < (known.pods, -known.power_cap)
        if better and _possible(round_, assignment, candidate) and round_.allows(assignment.job, candidate):
            least[key] = candidate
    return list(least.values())[:OPTIONS]


def _possible(round_: Round, assignment: Assignment, candidate: Candidate) -> bool:
    """Whether the power domains would carry the candidate if no job ran; whether there would be room is for `Collection`
    to find out."""
    return not candidate.draw_w or round_.cluster.could_hold(assignment.job, candidate)


def _kept(round_: Round, collection: Collection, thorough: bool) -> Hold | None:
    """The same place as before with nodes that are not ready exchanged for ready ones, or one that is ready in
    half the time."""
    own = collection.since_s.keys()
    if not thorough:
        same = collection.hold(among=own)
        if same is not None:
            return same
    same = collection.hold(among=collection.ready() | own)
    if same is not None and same.start_s <= round_.now:
        return same
    other = collection.hold()
    if same is None or (other is not None and other.start_s - round_.now < (same.start_s - round_.now) / 2):
        return other
    return same


# -- using a reservation ------------------------------------------------------------------------------------------


def take(round_: Round) -> bool:
    """Start the jobs whose place is collected, in place of those that give way; whether any started."""
    changed = False
    for hold in list(round_.holds.values()):
        assignment = hold.holder
        if (
            assignment.placement is not None
            or hold.start_s > round_.now + 1e-6
            or not round_.shares.are_due(hold)
        ):
            continue
        held_s = round_.now - min(hold.since_s.values())
        if not round_.can_disrupt() and held_s < round_.policy.min_run_s:
            continue
        victims = [
            Victim(victim, round_.lost_units(victim), hold.nodes)
            for _, victim in sorted(hold.victims.items())
            if victim.placement is not None and victim.placement.pool == hold.candidate.pool
        ]
        claim, places = Claim(round_, assignment, hold.candidate), frozenset(hold.places)
        if victims and propose(claim, (RESERVATION,), [VictimGroup(victims, hold.nodes)], inside=places):
            round_.claimed.add(assignment.job.id)
            changed = True
    return round_.sync_holds() or changed


def reservations(round_: Round, made: Iterable[Action]) -> tuple[Reservation, ...]:
    """The reservations of the plan: of jobs that do not start with it, in order of precedence; then the places of
    jobs that wait for others to leave."""
    delayed = {action.job for action in made if action.after}
    found = []
    for job, hold in round_.holds.items():
        assignment = hold.holder
        place = assignment.placement
        if round_.keeps_promised_place(assignment):
            found.append(round_.promised_places[job].reservation)
            continue
        if place is None:
            place = hold.placement
        elif not (assignment.waits_for_release or job in delayed) or place.pool != hold.candidate.pool:
            continue
        started = assignment.placement is not None
        index = hold.nodes.index
        since_s = tuple(hold.since_s.get(index[name], round_.now) for name in place.nodes)
        count = len(set(place.nodes))
        found.append(
            Reservation(
                job,
                place,
                since_s,
                round_.now if started else hold.start_s,
                count if started else hold.collected,
                None if hold.backfilled is None else tuple(sorted(hold.backfilled & hold.leaving.keys())),
                0.0 if started else hold.turn_s,
            )
        )
    return (*found, *_promised(round_, delayed))


def _promised(round_: Round, delayed: set[JobId]) -> list[Reservation]:
    """Places that jobs have in this plan and cannot use before other jobs have left: the next plan must not give
    them to somebody else, although this plan's starts change who is entitled to what."""
    found = sorted(
        (a for a in round_.waiting_for_release() if a.job.run is None and a.job.id not in round_.holds),
        key=lambda a: (-round_.priority(a.job), a.job.submitted_at_s, a.job.id),
    )
    return [
        Reservation(
            a.job.id, a.placement, (round_.now,) * a.placement.pods, round_.now, len(set(a.placement.nodes))
        )
        for a in found
        if a.placement is not None and a.job.id not in delayed and not a.placement.devices
    ]
