"""Preemption: reclaiming guarantees, evening out shares, priorities, and better use inside one tenant.

Who may be stopped for whom. Both jobs are in the same pool; the victim is preemptible and has run for
`min_run_s`, unless the deadline of a guarantee demands it.

    the job's right   victims
    GUARANTEED        jobs that other tenants run above their own guarantee
    ENTITLED          jobs of tenants that keep their whole fair share without them, not preempted too often; they ran
                      the longer the less of its share the job's tenant lacks (`share_run_s`)
    any               jobs of the same tenant with a lower priority
    any, inside its   jobs of the same tenant and priority whose users keep their whole share of the tenant's
    user's share      without them, not preempted too often
    too large for     training jobs of other tenants that are too large for their share as well and ran for a turn,
    its share         once the job has waited for its own
    any               training jobs of the same tenant and priority that ran min_run_s, if the value gained over
                      the job's remaining time is `move_gain_factor` times the work lost; none larger than the job
                      that has waited for its patience

All rows but the last two may also take a place that such a job was given only in this round. Their elastic
victims keep the pods that are not needed (`elastic.py`); if its tenant's fair share covers a victim in part,
only the rest is taken. The last row leaves other users their share.

A guarantee is reclaimed within its deadline. A claim that is still blocked when it is due
(`Round.reclaim_due_at_s`) may also take jobs of the first row that have only just started: otherwise a stream
of short borrowers could block it forever. All its candidates are first tried with victims that ran
`min_run_s`, so no job loses this protection without need.

A turn: a tenant whose job is larger than its share has the share in time. It runs for `Policy.rotation_s`, or longer
if its restart is more than a twentieth of that, and waits until turn / (wait + turn) is what its tenant is entitled to
of what the job takes. Not covered: smaller jobs do not give way to such a job (see `reservations.py`).

Each row is a strict order, so no job is stopped for one that it could stop in turn, before it ran for a turn of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from operator import ge, itemgetter

from ..candidates.candidates import Candidate
from ..candidates.value import SHORTEST_H, remaining_s
from ..fairness.quota import EPS, Right
from ..model.snapshot import Job, JobId, JobKind, Placement
from ..placement.feeds import LATER, NOW
from ..placement.pool import PoolNodes
from .elastic import can_shrink, keep_pods, partial_victim
from .holds import lifted
from .round import Round
from .state import Assignment
from .victims import Victim, VictimGroup, choose_victims

MARGIN = 1.1
"""What is gained must exceed what is lost by this factor, so that noise in the speeds moves nothing."""

TURN_PER_RESTART = 20.0
"""A turn is this many times a restart at least: taking turns costs a twentieth at most."""


def reclaim(round_: Round, blocked: list[Assignment]) -> bool:
    """Start blocked jobs by their rights; whether anything changed."""
    changed = False
    hopeless: set[tuple[object, ...]] = set()
    for assignment in blocked:
        due = round_.reclaim_due_at_s(assignment) <= round_.now
        if _reclaim_one(round_, assignment, hopeless) or (
            due and _reclaim_one(round_, assignment, hopeless, due)
        ):
            round_.claimed.add(assignment.job.id)
            changed = True
    return changed


def _reclaim_one(
    round_: Round, assignment: Assignment, hopeless: set[tuple[object, ...]], due: bool = False
) -> bool:
    """Whether the job could be started by its right to one of its candidates.

    Args:
        hopeless: requests that failed already; equal requests fail too.
        due: use only its guarantee, and also take jobs that have just started.
    """
    job, holdings = assignment.job, round_.holdings
    if (due or not round_.can_disrupt()) and holdings.best_right(
        job.tenant, assignment.option.shared.sizes
    ) > Right.GUARANTEED:
        return False
    for ranked in round_.ranked(assignment):
        candidate = ranked.candidate
        if holdings.refusal(job.tenant, candidate.accelerator, candidate.accelerators_m):
            continue
        right = holdings.right(job.tenant, candidate.accelerator, candidate.accelerators_m)
        if right is not Right.GUARANTEED and (due or not round_.can_disrupt()):
            continue
        key = (job.tenant, job.user, round_.priority(job), right, ranked.shape, candidate.pods, due)
        if key in hopeless:
            continue
        if (
            _start_due(round_, assignment, candidate)
            if due
            else _start_by_right(round_, assignment, candidate, right)
        ):
            return True
        hopeless.add(key)
    return False


def _start_by_right(round_: Round, assignment: Assignment, candidate: Candidate, right: Right) -> bool:
    """Start the job by its right. Jobs that this round has placed are tried as victims first, and left out if
    that fails: what may be taken of a tenant is better taken where it makes room. So a job that is blocked
    when the round ends is also blocked once these jobs run."""
    eligible = _by_right(round_, assignment, candidate, right, planned=True)
    if preempt(round_, assignment, candidate, eligible, by_right=True):
        return True
    if not any(round_.planned_victims(candidate.pool, tenant) for tenant in round_.holdings.tenants):
        return False
    return preempt(
        round_,
        assignment,
        candidate,
        _by_right(round_, assignment, candidate, right, planned=False),
        by_right=True,
    )


def _start_due(round_: Round, assignment: Assignment, candidate: Candidate) -> bool:
    """Start the job by a guarantee that is due: take what others borrowed, first what loses least work, else
    what stands on the nodes where most can be taken."""
    nodes = round_.cluster.pools[candidate.pool]
    others = [
        tenant
        for tenant in sorted(round_.holdings.tenants)
        if tenant != assignment.job.tenant
        and not round_.holdings.inside_guarantee(tenant, candidate.accelerator)
    ]
    found = {tenant: round_.due_victims(candidate.pool, tenant) for tenant in others}
    gain: dict[int, int] = {}
    for victim in (victim for victims in found.values() for victim in victims):
        for i, frees in victim.frees.items():
            gain[i] = gain.get(i, 0) + frees[nodes.key]

    def together(victim: Victim) -> tuple[int, int]:
        return min((-(gain[i] + nodes.free_later[i][nodes.key]), i) for i in victim.frees)

    for victims in (found, {tenant: sorted(found[tenant], key=together) for tenant in others}):
        groups = [VictimGroup(_lent(round_, candidate, tenant, victims[tenant]), nodes) for tenant in others]
        if preempt(round_, assignment, candidate, [group for group in groups if group.count], by_right=True):
            return True
    return False


def _lent(round_: Round, candidate: Candidate, tenant: str, victims: list[Victim]) -> list[Victim]:
    """The first of these victims without which the tenant is back inside its guarantee."""
    held = round_.holdings.held(tenant, candidate.accelerator)
    open_ = _most(lambda m: not round_.holdings.inside_guarantee(tenant, candidate.accelerator, -m), held)
    taken, found = 0, []
    for victim in victims:
        if taken > open_:
            break
        found.append(victim)
        taken += victim.amount_m
    return found


def regret(round_: Round, assignment: Assignment, candidate: Candidate) -> float:
    """Value per hour that the job loses if this accelerator type is denied to it."""
    other = max(
        (round_.profit(c) for c in assignment.option.candidates if c.accelerator != candidate.accelerator),
        default=0.0,
    )
    gross = round_.profit(candidate) - max(0.0, other)
    return gross + round_.market.price(candidate.accelerator) * candidate.accelerators_m / 1000


def claim(round_: Round, assignment: Assignment, candidate: Candidate) -> float:
    """Value per hour that a job offers for a candidate: its gain over its present place, plus the price, with
    which the victim can pay for another place. At the prices, each job that should be elsewhere has a regret
    below the price, so a profitable claim finds its victim among those."""
    now = 0.0 if assignment.candidate is None else max(0.0, round_.profit(assignment.candidate))
    price = round_.market.price(candidate.accelerator) * candidate.accelerators_m / 1000
    return round_.profit(candidate) - now + price


def hours_left(assignment: Assignment, candidate: Candidate) -> float:
    """Estimated hours that the job still runs with this candidate."""
    best = assignment.option.best_speed
    left = remaining_s(assignment.job, best) * best / max(candidate.speed, 1e-12)
    return max(left / 3600, SHORTEST_H)


def _by_right(
    round_: Round, assignment: Assignment, candidate: Candidate, right: Right, planned: bool
) -> list[VictimGroup]:
    """Victims by right, each at the cost of the work it would lose; `planned`: include jobs placed in this
    round."""
    holdings, job = round_.holdings, assignment.job
    found: list[VictimGroup] = []
    for tenant in sorted(holdings.tenants):
        if tenant == job.tenant:
            found.append(_outranked(round_, candidate, tenant, round_.priority(job), planned))
            if holdings.has_several_users(tenant) and round_.can_disrupt():
                found.append(_other_users(round_, assignment, candidate, planned))
        elif holdings.inside_guarantee(tenant, candidate.accelerator):
            continue
        elif right is not Right.BORROWING:
            run_s = share_run_s(round_, job.tenant) if right is Right.ENTITLED else 0.0
            found.append(_borrowed(round_, candidate, tenant, right, planned, run_s))
        elif right is Right.BORROWING and _has_its_turn(round_, assignment, candidate):
            found.append(_had_their_turn(round_, candidate, tenant))
    return [group for group in found if group.count]


def share_run_s(round_: Round, tenant: str) -> float:
    """How long jobs of tenants above their share must have run to give way to this tenant's fair share:
    `Policy.min_run_s` if it held nothing when the round began, longer the less it lacks, so that small differences move
    no job often."""
    policy = round_.policy
    held = round_.held_before.get(tenant, 0.0)
    lacks = 1 - held / max(round_.holdings.entitled.get(tenant, 0.0), EPS)
    longest_s = max(policy.rotation_s, policy.min_run_s)
    return longest_s if lacks <= 0 else min(policy.min_run_s / lacks, longest_s)


def _has_its_turn(round_: Round, assignment: Assignment, candidate: Candidate) -> bool:
    """Whether the job is too large for its tenant's share and has waited so long that a turn now is its share."""
    job, holdings = assignment.job, round_.holdings
    hold, turn_s = round_.holds.get(job.id), _turn_s(round_, job)
    if job.kind is not JobKind.TRAINING or (hold is not None and hold.start_s <= round_.now + turn_s):
        return False
    asked = holdings.units_of(candidate.accelerator, candidate.accelerators_m)
    share = holdings.entitled.get(job.tenant, 0.0)
    if asked <= share + EPS or share <= 0 or holdings.units(job.tenant) > EPS:
        return False
    waits_since_s = max(job.submitted_at_s, job.last_move_at_s or 0.0)
    return round_.now - waits_since_s >= turn_s * (asked / share - 1)


def _had_their_turn(round_: Round, candidate: Candidate, tenant: str) -> VictimGroup:
    """Jobs of the tenant that are too large for its share, and have run for a turn."""
    nodes, share = round_.cluster.pools[candidate.pool], round_.holdings.entitled.get(tenant, 0.0)
    return VictimGroup(
        [
            victim
            for victim in round_.preemptible_victims(candidate.pool, tenant)
            if victim.assignment.job.kind is JobKind.TRAINING
            and round_.holdings.units_of(candidate.accelerator, victim.amount_m) > share + EPS
            and round_.now - victim.assignment.started_at_s >= _turn_s(round_, victim.assignment.job)
        ],
        nodes,
    )


def _turn_s(round_: Round, job: Job) -> float:
    """How long a job runs before others of its kind have their turn."""
    return max(round_.policy.rotation_s, TURN_PER_RESTART * job.restart_s)


def _outranked(round_: Round, candidate: Candidate, tenant: str, priority: int, planned: bool) -> VictimGroup:
    """Jobs of the tenant with a lower priority."""
    nodes = round_.cluster.pools[candidate.pool]

    def find() -> VictimGroup:
        # `priority` is already bounded by the tenant's ceiling; so are theirs.
        found = _candidates_for_preemption(round_, candidate.pool, tenant, planned)
        return VictimGroup([victim for victim in found if victim.assignment.job.priority < priority], nodes)

    return round_.cached(("outranked", candidate.pool, tenant, priority, planned), tenant, find)


def _other_users(round_: Round, assignment: Assignment, candidate: Candidate, planned: bool) -> VictimGroup:
    """Jobs of the tenant's other users, of what these hold above their share, cheapest first; none for a job
    that is itself above its user's share."""
    holdings, nodes = round_.holdings, round_.cluster.pools[candidate.pool]
    tenant, priority = assignment.job.tenant, round_.priority(assignment.job)

    def find() -> VictimGroup:
        taken: dict[str, int] = {}
        found: list[Victim] = []
        for victim in _candidates_for_preemption(round_, candidate.pool, tenant, planned):
            other = victim.assignment
            equal = round_.priority(other.job) == priority
            if equal and may_be_preempted_again(round_, other) and _keeps_user_share(round_, other, taken):
                found.append(victim)
        return VictimGroup(found, nodes)

    if not holdings.user_inside_share(
        tenant, assignment.job.user, candidate.accelerator, candidate.accelerators_m
    ):
        return VictimGroup((), nodes)
    return round_.cached(("colleagues", candidate.pool, tenant, priority, planned), tenant, find)


def _keeps_user_share(round_: Round, assignment: Assignment, taken: dict[str, int]) -> bool:
    """Whether the job's user keeps its share without this job and the ones taken before; if so it counts as
    taken. All victims are of one pool."""
    job, placement = assignment.job, assignment.placement
    assert placement is not None
    amount_m = taken.get(job.user, 0) + placement.accelerators_m
    if not round_.holdings.user_keeps_share_without(job.tenant, job.user, placement.accelerator, amount_m):
        return False
    taken[job.user] = amount_m
    return True


def _borrowed(
    round_: Round, candidate: Candidate, tenant: str, right: Right, planned: bool, run_s: float
) -> VictimGroup:
    """Jobs of another tenant that ran for so many seconds, of what it holds above its guarantee or fair share,
    cheapest first."""
    holdings, nodes = round_.holdings, round_.cluster.pools[candidate.pool]
    fair = right is Right.ENTITLED

    def find() -> VictimGroup:
        found: list[Victim] = []
        spare = spare_m(round_, tenant, candidate.accelerator, right)
        if spare < 0:
            return VictimGroup(found, nodes)
        held = holdings.held(tenant, candidate.accelerator)
        open_ = _most(lambda m: not holdings.inside_guarantee(tenant, candidate.accelerator, -m), held)
        taken = 0
        for victim in _above_first(
            round_, _candidates_for_preemption(round_, candidate.pool, tenant, planned)
        ):
            other = victim.assignment
            if fair and not (may_be_preempted_again(round_, other) and _ran(round_, other, run_s)):
                continue
            amount_m = victim.amount_m
            if taken + amount_m > spare:
                some = partial_victim(round_, victim.assignment, partial(ge, spare - taken))
                if some is None:
                    continue
                amount_m = some.freed_m
                victim = Victim(victim.assignment, victim.cost, nodes, some)
            if taken > open_:
                break
            found.append(victim)
            taken += amount_m
        return VictimGroup(found, nodes)

    return round_.cached(("borrowed", candidate.pool, tenant, right, planned, run_s), tenant, find)


def _ran(round_: Round, assignment: Assignment, run_s: float) -> bool:
    """Whether it ran so long; what this round has placed or shrunk loses no work."""
    placed = assignment.job.run is None or round_.shrunk(assignment)
    return placed or round_.now - assignment.started_at_s >= run_s


def spare_m(round_: Round, tenant: str, accelerator: str, right: Right) -> int:
    """What may be taken of a tenant by another's right: by a fair share, what it holds above its own; negative:
    nothing."""
    holdings = round_.holdings

    def find() -> int:
        if holdings.inside_guarantee(tenant, accelerator):
            return -1
        held = holdings.held(tenant, accelerator)
        if right is not Right.ENTITLED:
            return held
        return _most(lambda m: holdings.keeps_share_without(tenant, accelerator, m), held)

    return round_.cached(("spare", tenant, accelerator, right), tenant, find)


def _most(holds: Callable[[int], bool], most: int) -> int:
    """The largest amount up to `most` for which a monotone condition holds; -1: for none."""
    if holds(most):
        return most
    return bisect_left(range(most), True, key=lambda amount: not holds(amount)) - 1


def _candidates_for_preemption(round_: Round, pool: str, tenant: str, planned: bool) -> list[Victim]:
    """Jobs that may be stopped by a right: first those that have not started yet."""
    first = round_.planned_victims(pool, tenant) if planned else []
    return first + round_.preemptible_victims(pool, tenant)


def _above_first(round_: Round, victims: list[Victim]) -> list[Victim]:
    """Sort jobs first whose users keep their share of the tenant's without them."""
    if not victims or not round_.holdings.has_several_users(victims[0].assignment.job.tenant):
        return victims
    taken: dict[str, int] = {}
    return sorted(victims, key=lambda victim: not _keeps_user_share(round_, victim.assignment, taken))


def may_be_preempted_again(round_: Round, assignment: Assignment) -> bool:
    """Whether it was preempted fewer than `max_preemptions` times."""
    return assignment.job.preemptions < round_.policy.max_preemptions


def by_value(round_: Round, assignment: Assignment, candidate: Candidate, worth: float) -> VictimGroup:
    """Victims inside the tenant, each at the cost of its regret and of its lost work over the job's time."""
    nodes = round_.cluster.pools[candidate.pool]
    found: list[Victim] = []
    if assignment.job.kind is JobKind.OPAQUE:
        return VictimGroup(found, nodes)
    hours = hours_left(assignment, candidate)
    taken: dict[str, int] = {}
    for victim in round_.preemptible_victims(candidate.pool, assignment.job.tenant):
        other = victim.assignment
        if (
            other is assignment
            or other.candidate is None
            or round_.priority(other.job) != round_.priority(assignment.job)
            or other.job.kind is not JobKind.TRAINING
            or not may_be_preempted_again(round_, other)
            or (victim.amount_m > candidate.accelerators_m and round_.was_patient(other))
        ):
            continue
        cost = regret(round_, other, other.candidate) + charge(round_, other, hours)
        if cost <= worth and (
            other.job.user == assignment.job.user or _keeps_user_share(round_, other, taken)
        ):
            found.append(Victim(other, cost, nodes))
    return VictimGroup(found, nodes)


def charge(round_: Round, assignment: Assignment, hours: float) -> float:
    """The work lost by stopping a job, as value per hour over this many hours."""
    return (
        round_.policy.move_gain_factor * assignment.option.weight * round_.lost_s(assignment) / 3600 / hours
    )


def own_charge(round_: Round, assignment: Assignment, candidate: Candidate) -> float:
    """The same for a running job that itself moves to the candidate."""
    return charge(round_, assignment, hours_left(assignment, candidate))


def preempt(
    round_: Round,
    assignment: Assignment,
    candidate: Candidate,
    eligible: Sequence[VictimGroup],
    most: float | None = None,
    by_right: bool = False,
    inside: frozenset[int] | None = None,
) -> bool:
    """Stop the cheapest eligible jobs and put the job in their place; False (and no change) if that fails.

    Args:
        most: upper limit on the victims' total cost.
        by_right: costs are work lost: search for the least, and let elastic victims keep the pods that are not needed.
        inside: indices of the only nodes that the job may use; None: all but those collected for others.
    """
    if not eligible:
        return False
    if not round_.holds:
        return _preempt(round_, assignment, candidate, eligible, most, by_right, inside)
    with lifted(hold for hold in round_.holds.values() if round_.passes(assignment, hold)):
        return _preempt(round_, assignment, candidate, eligible, most, by_right, inside)


def _preempt(
    round_: Round,
    assignment: Assignment,
    candidate: Candidate,
    eligible: Sequence[VictimGroup],
    most: float | None,
    by_right: bool,
    inside: frozenset[int] | None,
) -> bool:
    nodes = round_.cluster.pools[candidate.pool]
    allowed = allowed_nodes(round_, assignment, nodes, inside)
    chosen = cheapest_victims(nodes, assignment.job, candidate, eligible, by_right, allowed)
    if chosen is None or (most is not None and sum(v.cost for v in chosen) > most + EPS):
        return False
    with round_.trial() as trial:
        shrunk = _stop(round_, chosen, by_right)
        tenant, accelerator = assignment.job.tenant, candidate.accelerator
        refused = round_.holdings.refusal(tenant, accelerator, candidate.accelerators_m)
        found = None if refused else round_.find(assignment.job, candidate)
        if found is None and not refused and round_.cluster.feeds is not None:
            more = _for_watts(round_, assignment, candidate, eligible, {victim.id for victim in chosen})
            if more and (most is None or sum(victim.cost for victim in (*chosen, *more)) <= most + EPS):
                shrunk += _stop(round_, more, by_right)
                found = round_.find(assignment.job, candidate)
        if found is None:
            return False
        round_.put(assignment, candidate, *found)
        for other, placement in shrunk:
            keep_pods(round_, other, placement)
        return trial.keep()


def _stop(round_: Round, victims: Iterable[Victim], by_right: bool) -> list[tuple[Assignment, Placement]]:
    """Take their places, or the parts that were offered. Returns those of which some pods may be kept when the stronger
    job has its place, and where they were."""
    elastic: list[tuple[Assignment, Placement]] = []
    for victim in victims:
        assignment, placement = victim.assignment, victim.assignment.placement
        if by_right and placement is not None and can_shrink(assignment):
            elastic.append((assignment, placement))
        round_.clear(assignment)
        if victim.part is not None:
            round_.put(assignment, victim.part.candidate, victim.part.stays)
    return elastic


def _for_watts(
    round_: Round,
    assignment: Assignment,
    candidate: Candidate,
    eligible: Sequence[VictimGroup],
    gone: Set[JobId],
) -> list[Victim]:
    """More victims for a job that has room and lacks only watts, which any job on its power domains gives back: the
    least cost per watt first. None, if they do not give enough. (The search for room does not know watts.)"""
    feeds, later = round_.cluster.feeds, round_.cluster.is_releasing(candidate.pool)
    place = round_.cluster.nearest(assignment.job, candidate, later) if candidate.draw_w else None
    if feeds is None or place is None:
        return []
    short = feeds.missing(place, LATER if later else NOW)
    victims = {
        offer.id: offer.victim for group in eligible for offers in group.on_node.values() for offer in offers
    }
    gives = [
        (victim.cost / sum(gives.values()), victim.id, gives)
        for victim in victims.values()
        if victim.id not in gone and (gives := feeds.given_back(victim.placement, short))
    ]
    found: list[Victim] = []
    for _, victim_id, back in sorted(gives, key=itemgetter(0, 1)):
        if any(short[number] > 0 for number in back):
            found.append(victims[victim_id])
            for number, watts in back.items():
                short[number] -= watts
    return found if all(watts <= 0 for watts in short.values()) else []


def allowed_nodes(
    round_: Round, assignment: Assignment, nodes: PoolNodes, inside: frozenset[int] | None
) -> frozenset[int] | None:
    """The nodes that the job may use; None: all."""
    allowed = nodes.selected_nodes(assignment.job)
    if inside is not None:
        return inside if allowed is None else allowed & inside
    barred = round_.barred(assignment, nodes.pool.name) if round_.holds else frozenset()
    if not barred:
        return allowed
    return (frozenset(range(len(nodes.nodes))) if allowed is None else allowed) - barred


def cheapest_victims(
    nodes: PoolNodes,
    job: Job,
    candidate: Candidate,
    eligible: Sequence[VictimGroup],
    thorough: bool,
    allowed: frozenset[int] | None,
) -> list[Victim] | None:
    """The cheapest victims; for a gang that must stay inside one domain: of the domain where they cost least."""
    depth = job.required_domain
    if depth is None or depth <= 0 or candidate.pods == 1:
        return choose_victims(nodes, candidate, eligible, allowed, thorough)
    best: tuple[float, list[Victim]] | None = None
    for inside in nodes.nodes_by_domain(depth, allowed):
        chosen = choose_victims(nodes, candidate, eligible, inside, thorough)
        if chosen is not None:
            cost = sum(victim.cost for victim in chosen)
            if best is None or cost < best[0]:
                best = cost, chosen
    return None if best is None else best[1]
