"""Making room: taking back guarantees, evening out shares, priorities, and better use inside one tenant.

Who may be stopped for whom (both in the same pool; the victim must be preemptible and have run for
`min_run_s`, so that nothing is ever stopped and started in a flicker, unless a guarantee's deadline demands it):

    the job's right   victims
    GUARANTEED        jobs that other tenants run above their own guarantee
    ENTITLED          jobs of tenants that keep their whole fair share without them, not preempted too often
    any               jobs of the same tenant with a lower priority
    any, inside its   jobs of the same tenant and priority whose users keep their whole share of the tenant's
    user's share      without them, not preempted too often
    any               settled training jobs of the same tenant and priority, where the value gained over the
                      job's remaining time is `move_gain_factor` times the work lost

All but the last may also take a place that was given to such a job only in this round, and an elastic victim of
theirs goes on with the pods that are not needed (`shrink.py`); a job that its tenant's fair share covers in part
gives no more than the rest. The last leaves other users their share.

A guarantee is taken back within its reclaim deadline. A job that is still blocked when it is due
(`Round.due_at_s`) may also take jobs of the first row that have only just started: otherwise borrowers that start
in every hole would be protected, each for a while, for ever. First those that have run for `min_run_s` are tried
on all its columns, so nobody loses this protection without need.

Each of these is a strict order, so no job
is stopped for one that it could stop in turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from operator import ge

from .books import Seat
from .columns import Candidate
from .ledger import EPS, Right
from .pool_nodes import PoolNodes
from .round import Round
from .shrink import keep, part, smaller
from .types import Job, JobKind
from .value import SHORTEST_H, remaining_s
from .victims import Group, Victim, choose

MARGIN = 1.1
"""What is gained must be more than what is lost by this factor: noise in the speeds moves nothing."""


def reclaim(round_: Round, blocked: list[Seat]) -> bool:
    """Start blocked jobs on the strength of their rights; whether anything changed."""
    changed = False
    hopeless: set[tuple[object, ...]] = set()
    for seat in blocked:
        due = round_.due_at_s(seat) <= round_.now
        if _reclaimed(round_, seat, hopeless) or (due and _reclaimed(round_, seat, hopeless, due)):
            changed = True
    return changed


def _reclaimed(round_: Round, seat: Seat, hopeless: set[tuple[object, ...]], due: bool = False) -> bool:
    """Whether the job could be started on the strength of its right to one of its columns.

    Args:
        hopeless: what was tried in vain, of jobs that are alike.
        due: only of its guarantee, also from those who have just started.
    """
    job, ledger = seat.job, round_.ledger
    if (due or not round_.calm()) and ledger.best_right(job.tenant, seat.option.row.sizes) > Right.GUARANTEED:
        return False
    for ranked in round_.ranked(seat):
        column = ranked.column
        if ledger.refusal(job.tenant, column.accelerator, column.accelerators_m):
            continue
        right = ledger.right(job.tenant, column.accelerator, column.accelerators_m)
        if right is not Right.GUARANTEED and (due or not round_.calm()):
            continue
        key = (job.tenant, job.user, round_.priority(job), right, ranked.shape, column.pods, due)
        if key in hopeless:
            continue
        if _take_due(round_, seat, column) if due else _take(round_, seat, column, right):
            return True
        hopeless.add(key)
    return False


def _take(round_: Round, seat: Seat, column: Candidate, right: Right) -> bool:
    """Start the job by its right. Jobs that only this round has placed go first, and are left out if that is in
    vain: what may be taken of a tenant is better taken where it makes room. So whoever is still blocked when the
    round ends is blocked just the same when these jobs run."""
    eligible = _by_right(round_, seat, column, right, planned=True)
    if displace(round_, seat, column, eligible, by_right=True):
        return True
    if not any(round_.planned(column.pool, tenant) for tenant in round_.ledger.tenants):
        return False
    return displace(
        round_, seat, column, _by_right(round_, seat, column, right, planned=False), by_right=True
    )


def _take_due(round_: Round, seat: Seat, column: Candidate) -> bool:
    """Start the job by a guarantee that is due: of what others borrowed, whatever loses least, or else what stands
    on the nodes where most can be had."""
    nodes = round_.cluster.pools[column.pool]
    others = [
        tenant
        for tenant in sorted(round_.ledger.tenants)
        if tenant != seat.job.tenant and not round_.ledger.covered(tenant, column.accelerator)
    ]
    found = {tenant: round_.takeable(column.pool, tenant) for tenant in others}
    gain: dict[int, int] = {}
    for victim in (victim for victims in found.values() for victim in victims):
        for i, frees in victim.frees.items():
            gain[i] = gain.get(i, 0) + frees[nodes.key]

    def together(victim: Victim) -> tuple[int, int]:
        return min((-(gain[i] + nodes.later[i][nodes.key]), i) for i in victim.frees)

    for victims in (found, {tenant: sorted(found[tenant], key=together) for tenant in others}):
        groups = [Group(_lent(round_, column, tenant, victims[tenant]), nodes) for tenant in others]
        if displace(round_, seat, column, [group for group in groups if group.count], by_right=True):
            return True
    return False


def _lent(round_: Round, column: Candidate, tenant: str, victims: list[Victim]) -> list[Victim]:
    """The first of these without which the tenant is back inside its guarantee."""
    held = round_.ledger.held(tenant, column.accelerator)
    open_ = _most(lambda m: not round_.ledger.covered(tenant, column.accelerator, -m), held)
    taken, found = 0, []
    for victim in victims:
        if taken > open_:
            break
        found.append(victim)
        taken += victim.amount_m
    return found


def regret(round_: Round, seat: Seat, column: Candidate) -> float:
    """Value per hour that the job loses if this accelerator is denied to it."""
    other = max(
        (round_.profit(c) for c in seat.option.columns if c.accelerator != column.accelerator), default=0.0
    )
    gross = round_.profit(column) - max(0.0, other)
    return gross + round_.market.price(column.accelerator) * column.accelerators_m / 1000


def claim(round_: Round, seat: Seat, column: Candidate) -> float:
    """Value per hour that a job offers for a column: what it gains over where it is, and the price, which
    whoever leaves can buy another place with. At the prices everybody who should be somewhere else has a
    regret below the price, so a claim with a profit finds its victim among those."""
    now = 0.0 if seat.column is None else max(0.0, round_.profit(seat.column))
    price = round_.market.price(column.accelerator) * column.accelerators_m / 1000
    return round_.profit(column) - now + price


def hours_left(seat: Seat, column: Candidate) -> float:
    """How long the job will probably run in this column."""
    best = seat.option.best_speed
    left = remaining_s(seat.job, best) * best / max(column.speed, 1e-12)
    return max(left / 3600, SHORTEST_H)


def _by_right(round_: Round, seat: Seat, column: Candidate, right: Right, planned: bool) -> list[Group]:
    """Victims by rights, each costing the work it would lose; `planned`: with jobs placed in this round only."""
    ledger, job = round_.ledger, seat.job
    found: list[Group] = []
    for tenant in sorted(ledger.tenants):
        if tenant == job.tenant:
            found.append(_outranked(round_, column, tenant, round_.priority(job), planned))
            if ledger.shared(tenant) and round_.calm():
                found.append(_colleagues(round_, seat, column, planned))
        elif right is not Right.BORROWING and not ledger.covered(tenant, column.accelerator):
            found.append(_borrowed(round_, column, tenant, right, planned))
    return [group for group in found if group.count]


def _outranked(round_: Round, column: Candidate, tenant: str, priority: int, planned: bool) -> Group:
    """Jobs of the tenant with a lower priority."""
    nodes = round_.cluster.pools[column.pool]

    def find() -> Group:
        # The tenant's ceiling bounds the given priority as it does theirs.
        found = _in_the_way(round_, column.pool, tenant, planned)
        return Group([victim for victim in found if victim.seat.job.priority < priority], nodes)

    return round_.remembered(("outranked", column.pool, tenant, priority, planned), tenant, find)


def _colleagues(round_: Round, seat: Seat, column: Candidate, planned: bool) -> Group:
    """Jobs of the tenant's other users on what these hold above their share of it, cheapest first; none for a
    job that is itself above its user's."""
    ledger, nodes = round_.ledger, round_.cluster.pools[column.pool]
    tenant, priority = seat.job.tenant, round_.priority(seat.job)

    def find() -> Group:
        taken: dict[str, int] = {}
        found: list[Victim] = []
        for victim in _in_the_way(round_, column.pool, tenant, planned):
            other = victim.seat
            equal = round_.priority(other.job) == priority
            if equal and _exposed(round_, other) and _spares(round_, other, taken):
                found.append(victim)
        return Group(found, nodes)

    if not ledger.user_inside(tenant, seat.job.user, column.accelerator, column.accelerators_m):
        return Group((), nodes)
    return round_.remembered(("colleagues", column.pool, tenant, priority, planned), tenant, find)


def _spares(round_: Round, seat: Seat, taken: dict[str, int]) -> bool:
    """Whether the job's user keeps its share without it and what was taken from it before; then it counts as
    taken. All that is taken is of one pool."""
    job, placement = seat.job, seat.placement
    assert placement is not None
    amount_m = taken.get(job.user, 0) + placement.accelerators_m
    if not round_.ledger.user_above(job.tenant, job.user, placement.accelerator, amount_m):
        return False
    taken[job.user] = amount_m
    return True


def _borrowed(round_: Round, column: Candidate, tenant: str, right: Right, planned: bool) -> Group:
    """Jobs of another tenant on what it holds above its guarantee or its share, cheapest first."""
    ledger, nodes = round_.ledger, round_.cluster.pools[column.pool]
    fair = right is Right.ENTITLED

    def find() -> Group:
        found: list[Victim] = []
        if fair and not ledger.above_share(tenant, column.accelerator, 0):
            return Group(found, nodes)
        held = ledger.held(tenant, column.accelerator)
        spare = held if not fair else _most(lambda m: ledger.above_share(tenant, column.accelerator, m), held)
        open_ = _most(lambda m: not ledger.covered(tenant, column.accelerator, -m), held)
        taken = 0
        for victim in _above_first(round_, _in_the_way(round_, column.pool, tenant, planned)):
            if fair and not _exposed(round_, victim.seat):
                continue
            amount_m = victim.amount_m
            if taken + amount_m > spare:
                some = part(round_, victim.seat, partial(ge, spare - taken))
                if some is None:
                    continue
                amount_m = some.freed_m
                victim = Victim(victim.seat, victim.cost, nodes, some)
            if taken > open_:
                break
            found.append(victim)
            taken += amount_m
        return Group(found, nodes)

    return round_.remembered(("borrowed", column.pool, tenant, right, planned), tenant, find)


def _most(holds: Callable[[int], bool], most: int) -> int:
    """The largest amount, up to `most`, for which something holds that holds for all below it; -1: for none."""
    if holds(most):
        return most
    return bisect_left(range(most), True, key=lambda amount: not holds(amount)) - 1


def _in_the_way(round_: Round, pool: str, tenant: str, planned: bool) -> list[Victim]:
    """Who may be stopped on the strength of a right: first those that have not even started."""
    first = round_.planned(pool, tenant) if planned else []
    return first + round_.disturbable(pool, tenant)


def _above_first(round_: Round, victims: list[Victim]) -> list[Victim]:
    """First jobs whose users keep their share of the tenant's without them."""
    if not victims or not round_.ledger.shared(victims[0].seat.job.tenant):
        return victims
    taken: dict[str, int] = {}
    return sorted(victims, key=lambda victim: not _spares(round_, victim.seat, taken))


def _exposed(round_: Round, seat: Seat) -> bool:
    return seat.job.preemptions < round_.policy.max_preemptions


def by_value(round_: Round, seat: Seat, column: Candidate, worth: float) -> Group:
    """Victims inside the tenant, each costing its own regret and its lost work over the job's time."""
    nodes = round_.cluster.pools[column.pool]
    found: list[Victim] = []
    if seat.job.kind is JobKind.OPAQUE:
        return Group(found, nodes)
    hours = hours_left(seat, column)
    taken: dict[str, int] = {}
    for victim in round_.disturbable(column.pool, seat.job.tenant):
        other = victim.seat
        if (
            other is seat
            or other.column is None
            or round_.priority(other.job) != round_.priority(seat.job)
            or other.job.kind is not JobKind.TRAINING
            or not _exposed(round_, other)
        ):
            continue
        cost = regret(round_, other, other.column) + charge(round_, other, hours)
        if cost <= worth and (other.job.user == seat.job.user or _spares(round_, other, taken)):
            found.append(Victim(other, cost, nodes))
    return Group(found, nodes)


def charge(round_: Round, seat: Seat, hours: float) -> float:
    """The work lost by stopping a job, as value per hour over so many hours."""
    return round_.policy.move_gain_factor * seat.option.weight * round_.lost_s(seat) / 3600 / hours


def own_charge(round_: Round, seat: Seat, column: Candidate) -> float:
    """The same for a running job that would itself be moved to the column."""
    return charge(round_, seat, hours_left(seat, column))


def displace(
    round_: Round,
    seat: Seat,
    column: Candidate,
    eligible: Sequence[Group],
    most: float | None = None,
    by_right: bool = False,
) -> bool:
    """Stop the cheapest eligible jobs and put the job in their place; False (and no change) if it cannot be.

    Args:
        most: the victims may not cost more than this together.
        by_right: the victims cost work: the least of it is looked for, and elastic ones go on with what is not
            needed of their place.
    """
    if not eligible:
        return False
    nodes = round_.cluster.pools[column.pool]
    chosen = _cheapest(nodes, seat.job, column, eligible, by_right)
    if chosen is None or (most is not None and sum(v.cost for v in chosen) > most + EPS):
        return False
    undo = [(v.seat, v.seat.placement, v.seat.column, v.seat.started_at_s) for v in chosen]
    sizes = [smaller(v.seat) if by_right else [] for v in chosen]
    for victim in chosen:
        round_.clear(victim.seat)
        if victim.part is not None:
            round_.put(victim.seat, victim.part.column, victim.part.stays)
    found = round_.find(seat.job, column)
    if found is None:
        for other, placement, old, started in undo:
            round_.clear(other)
            if placement is not None:
                round_.restore(other, placement, old, started)
        return False
    round_.put(seat, column, *found)
    for (other, placement, *_), own in zip(undo, sizes, strict=True):
        if placement is not None and own:
            keep(round_, other, own, placement.nodes)
    return True


def _cheapest(
    nodes: PoolNodes, job: Job, column: Candidate, eligible: Sequence[Group], thorough: bool
) -> list[Victim] | None:
    """The cheapest victims; for a gang that must stay inside one domain: of the domain where that is least."""
    allowed, depth = nodes.selected(job), job.required_domain
    if depth is None or depth <= 0 or column.pods == 1:
        return choose(nodes, column, eligible, allowed, thorough)
    best: tuple[float, list[Victim]] | None = None
    for inside in nodes.inside(depth, allowed):
        chosen = choose(nodes, column, eligible, inside, thorough)
        if chosen is not None:
            cost = sum(victim.cost for victim in chosen)
            if best is None or cost < best[0]:
                best = cost, chosen
    return None if best is None else best[1]
