"""The mixed-integer step after the prices: exchanges of many jobs at once that no single exchange finds.

It runs only where the certified gap is above 1 % and there are at most 20,000 variables, and only if the policy
asks for it. The program leaves alone whatever the other steps decided about rights: it chooses again among the
columns of jobs that may be moved, that were placed in this round or that wait, but a user's jobs of one
priority never take more of a type, together, than they have in the plan and than is free of it.

    maximise    value of the columns chosen  -  what moving costs
    each job    one column at most
    each type   by user and priority: what they have in the plan, and a part of what is free
    quota       by user and priority: what they have in the plan, and a part of what the ledger leaves; that part
                only if nobody waits for it who comes first in the tenant, by priority or by the users' shares
    churn       as many running jobs disturbed as the round may still disturb

The program counts accelerators, not nodes. So its answer is tried out on the nodes, large gangs first; a job that
finds no room stays or goes back where it was; and all of it is undone unless it is then still better than the
plan by `LEAST_GAIN`. Whatever happens, the round is as valid as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from . import solver
from .books import Seat
from .columns import Candidate
from .displace import own_charge
from .ledger import limit
from .moves import pays
from .round import Round
from .types import Placement, Quota

LEAST_GAP = 0.01
"""A plan that is certified to be so near the optimum is left as it is."""
LEAST_GAIN = 0.01
"""The part by which the value must rise: less is not worth disturbing anybody for."""
MOST_VARIABLES = 20_000

_Group = tuple[str, str, int, str]
"""Tenant, user, priority, accelerator."""


@dataclass
class _Choice:
    """A job that may be given another column, and its variables."""

    seat: Seat
    now: Candidate | None
    charge: float
    """What leaving the present column costs, as value per hour."""
    columns: list[tuple[int, Candidate]] = field(default_factory=list)
    """(variable, column)."""


def worth_trying(value: float, bound: float) -> bool:
    """Whether the certified gap is large enough."""
    return bound > 0 and 1 - value / bound > LEAST_GAP


def optimise(round_: Round) -> float:
    """Improve the round by the solver; returns the value gained per hour, 0.0 if nothing was changed.

    Raises:
        SolverError: the solver is not installed, or it failed. The round is as it was.
    """
    choices = _choices(round_)
    if sum(len(choice.seat.option.columns) for choice in choices) > MOST_VARIABLES or not choices:
        return 0.0
    program = _program(round_, choices)
    policy = round_.policy
    start = _as_planned(program, choices)
    found = solver.solve(program, policy.solver_seconds, policy.solver_nodes, LEAST_GAIN / 2, start=start)
    if found is None:
        return 0.0
    wanted = [(choice, _chosen(choice, found.x)) for choice in choices]
    return _try(round_, [(choice, column) for choice, column in wanted if column is not choice.now])


def _choices(round_: Round) -> list[_Choice]:
    found: list[_Choice] = []
    for job in sorted(round_.seats):
        seat = round_.seats[job]
        if seat.placement is None:
            if job in round_.books.waiting and seat.option.columns and not round_.stopped_lately(seat.job):
                found.append(_Choice(seat, None, 0.0))
        elif seat.column is None or seat.waits_for_release:
            continue
        elif seat.job.run is None:
            found.append(_Choice(seat, seat.column, 0.0))
        elif round_.movable(seat) and seat.started_at_s < round_.now:
            charge = own_charge(round_, seat, seat.column)
            found.append(_Choice(seat, seat.column, charge))
    return found


def _program(round_: Round, choices: list[_Choice]) -> solver.Program:
    program = solver.Program()
    rows: dict[_Group, list[tuple[int, float]]] = {}
    has: dict[_Group, float] = {}
    stays: list[tuple[int, float]] = []
    for choice in choices:
        seat = choice.seat
        group = (seat.job.tenant, seat.job.user, round_.priority(seat.job))
        for column in seat.option.columns:
            kept = column is choice.now
            if not kept and not _allowed(round_, choice, column):
                continue
            worth = column.value + (choice.charge if kept else 0.0)
            variable = program.variable(-worth, 0.0, 1.0, integer=True)
            choice.columns.append((variable, column))
            size = column.accelerators_m / 1000
            rows.setdefault((*group, column.accelerator), []).append((variable, size))
            if kept:
                has[(*group, column.accelerator)] = has.get((*group, column.accelerator), 0.0) + size
                if seat.job.run is not None:
                    stays.append((variable, 1.0))
        if choice.columns:
            program.row([(variable, 1.0) for variable, _ in choice.columns], high=1.0)
    shares: dict[str, list[tuple[int, float]]] = {}
    for key, terms in sorted(rows.items()):
        share = program.variable(0.0, 0.0, math.inf)
        shares.setdefault(key[3], []).append((share, 1.0))
        program.row([*terms, (share, -1.0)], high=has.get(key, 0.0))
    for kind, terms in sorted(shares.items()):
        program.row(terms, high=_free(round_, kind))
    _quotas(round_, program, choices, rows, has)
    if stays:
        program.row(stays, low=len(stays) - max(0, round_.budget_left))
    return program


def _allowed(round_: Round, choice: _Choice, column: Candidate) -> bool:
    """Whether quota and, for a running job, the rule for moves (moves.py) allow another column. A slower one is
    the other half of an exchange: its charge is counted, and who gains makes up for it."""
    seat, now = choice.seat, choice.now
    if round_.ledger.refusal(seat.job.tenant, column.accelerator, 0):
        return False
    if now is None or seat.job.run is None or column.speed <= now.speed:
        return True
    return pays(round_, seat, now, column)


def _free(round_: Round, kind: str) -> float:
    pools = [pool for pool in round_.cluster.pools.values() if pool.pool.accelerator == kind]
    return sum(pool.free_m() for pool in pools) / 1000


def _quotas(
    round_: Round,
    program: solver.Program,
    choices: list[_Choice],
    rows: dict[_Group, list[tuple[int, float]]],
    has: dict[_Group, float],
) -> None:
    """No tenant's jobs that may be changed take more than its limits leave them, and nobody takes what others of
    the tenant have of a limit: a job that only a limit holds back stops nobody, so it could not take it back."""
    ledger = round_.ledger
    for name, tenant in sorted(ledger.tenants.items()):
        for quota in tenant.quotas:
            most = limit(quota)
            own = {key: terms for key, terms in rows.items() if _counts(quota, key) and key[0] == name}
            if not own or math.isinf(most):
                continue
            unit = {key: ledger.units_of(key[3], 1000) if quota.accelerator == "*" else 1.0 for key in own}
            spare = max(0.0, (most - ledger.counted_m(name, quota.accelerator)) / 1000)
            first = _first_turns(round_, choices, name, quota)
            shares: list[tuple[int, float]] = []
            for user, priority in sorted({key[1:3] for key in own}):
                mine = sorted(key for key in own if key[1:3] == (user, priority))
                terms = [(variable, unit[key] * size) for key in mine for variable, size in own[key]]
                if (user, priority) in first:
                    share = program.variable(0.0, 0.0, math.inf)
                    shares.append((share, 1.0))
                    terms.append((share, -1.0))
                program.row(terms, high=sum(unit[key] * has.get(key, 0.0) for key in mine))
            if shares:
                program.row(shares, high=spare)


def _counts(quota: Quota, key: _Group) -> bool:
    return quota.accelerator in ("*", key[3])


def _first_turns(round_: Round, choices: list[_Choice], tenant: str, quota: Quota) -> set[tuple[str, int]]:
    """Users and priorities of the tenant that come no later than everybody who waits under this limit."""
    turns: dict[tuple[str, int], tuple[int, bool]] = {}
    first: tuple[int, bool] | None = None
    for choice in choices:
        seat = choice.seat
        if seat.job.tenant != tenant or not any(
            quota.accelerator in ("*", column.accelerator) for _, column in choice.columns
        ):
            continue
        priority = round_.priority(seat.job)
        outside = round_.ledger.user_turn(tenant, seat.job.user, seat.option.row.sizes)[0]
        turn = (-priority, outside and round_.ledger.shared(tenant))
        key = (seat.job.user, priority)
        turns[key] = min(turn, turns.get(key, turn))
        if choice.now is None:
            first = turn if first is None else min(turn, first)
    return {key for key, turn in turns.items() if first is None or turn <= first}


def _as_planned(program: solver.Program, choices: list[_Choice]) -> list[float]:
    """The plan as a solution of the program: everybody keeps the column it has."""
    x = [0.0] * len(program.cost)
    for choice in choices:
        for variable, column in choice.columns:
            x[variable] = 1.0 if column is choice.now else 0.0
    return x


def _chosen(choice: _Choice, x: list[float]) -> Candidate | None:
    return next((column for variable, column in choice.columns if x[variable] > 0.5), None)


def _try(round_: Round, changes: list[tuple[_Choice, Candidate | None]]) -> float:
    """Carry the changes out on the nodes; undo them all if they do not pay."""
    before: list[tuple[Seat, Placement | None, Candidate | None, float]] = []
    calm = min(0, round_.budget_left)
    for choice, _ in changes:
        seat = choice.seat
        before.append((seat, seat.placement, seat.column, seat.started_at_s))
        round_.clear(seat)
    order = sorted(changes, key=lambda item: _size(item[1]), reverse=True)
    homeless: list[_Choice] = []
    for choice, column in order:
        if column is not None and not _place(round_, choice.seat, column):
            homeless.append(choice)
    old = {
        choice.seat.job.id: placement for (choice, _), (_, placement, *_) in zip(changes, before, strict=True)
    }
    for choice in homeless:
        _home(round_, choice, old[choice.seat.job.id])
    gain = sum(_gain(choice, old[choice.seat.job.id]) for choice, _ in changes)
    value = round_.books.value() - gain
    if gain > LEAST_GAIN * value and round_.budget_left >= calm:
        return gain
    for seat, *_ in before:
        round_.clear(seat)
    for seat, placement, column, started in before:
        if placement is not None:
            round_.restore(seat, placement, column, started)
    return 0.0


def _size(column: Candidate | None) -> tuple[int, int]:
    return (0, 0) if column is None else (column.pods, column.accelerators_m)


def _place(round_: Round, seat: Seat, column: Candidate) -> bool:
    if round_.ledger.refusal(seat.job.tenant, column.accelerator, column.accelerators_m):
        return False
    found = round_.find(seat.job, column)
    if found is None or found[1]:
        return False
    round_.put(seat, column, found[0])
    return True


def _home(round_: Round, choice: _Choice, old: Placement | None) -> None:
    """Back to the old place, if it is still free, or to any node of the same kind."""
    if old is None or choice.now is None:
        return
    if choice.seat.job.run is not None and round_.fits(old):
        started = choice.seat.job.run.started_at_s
        round_.restore(choice.seat, old, choice.now, started)
    else:
        _place(round_, choice.seat, choice.now)


def _gain(choice: _Choice, old: Placement | None) -> float:
    """Value per hour won by one job, less what its move costs."""
    seat = choice.seat
    now = 0.0 if seat.column is None else seat.column.value
    was = 0.0 if choice.now is None else choice.now.value
    return now - was - (choice.charge if seat.placement != old else 0.0)
