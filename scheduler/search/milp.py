"""The mixed-integer step: changes of many jobs at once that no single swap finds.

It runs after the other steps, only if the certified gap is above 1 %, there are at most 20,000 variables, and
the policy allows it. It leaves alone what the other steps decided by right: it chooses again among the
candidates of jobs that may be moved, that this round placed, or that wait, but a user's jobs of one priority
never take more of a type, together, than they have in the plan and than is free of it.

    maximise    value of the candidates chosen  -  cost of the moves
    each job    at most one candidate
    each type   by user and priority: what they have in the plan, and a part of what is free
    each domain what power domains carry (watt_rows.py)
    quota       by user and priority: what they have in the plan, and a part of what the limits leave; that part
                only if nobody who comes first in the tenant, by priority or users' shares, waits for it
    churn       at most as many running jobs disrupted as the round may still disrupt

The program counts accelerators, not nodes. So its answer is tried on the nodes, large gangs first; a job that
finds no room stays or goes back where it was. All of it is undone unless the result is better than the plan
by `Policy.solver_gain`. The round is valid in every case. Without this step jobs take 0 to 5 % longer on Gavel's traces and
8 to 25 % longer where they are elastic (`benchmarks/scheduling/ablate.py`; so are the numbers in other steps' modules).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .. import highs
from ..candidates.candidate import Candidate
from ..fairness.quota import limit
from ..model.plans import Policy
from ..model.snapshot import Placement, Quota
from .claim import own_charge
from .migration import pays
from .round import Round
from .state import Assignment
from .watt_rows import watt_rows

MOST_VARIABLES = 20_000

_Group = tuple[str, str, int, str]
"""Tenant, user, priority, accelerator."""


@dataclass
class _Choice:
    """A job that may be given another candidate, and its variables."""

    assignment: Assignment
    now: Candidate | None
    charge: float
    """Cost of leaving the present candidate, as value per hour."""
    candidates: list[tuple[int, Candidate]] = field(default_factory=list)
    """(variable, candidate)."""


def worth_trying(value: float, bound: float, policy: Policy) -> bool:
    """Whether the certified gap is large enough."""
    return bound > 0 and 1 - value / bound > policy.solver_gain


def optimise(round_: Round) -> float:
    """Improve the round by the solver; returns the value gained per hour, 0.0 if nothing changed.

    Raises:
        SolverError: the solver is not installed, or it failed. The round is as it was.
    """
    choices = _choices(round_)
    if sum(len(choice.assignment.option.candidates) for choice in choices) > MOST_VARIABLES or not choices:
        return 0.0
    program = _program(round_, choices)
    policy = round_.policy
    start = _as_planned(program, choices)
    found = highs.solve(
        program, policy.solver_seconds, policy.solver_nodes, policy.solver_gain / 2, start=start
    )
    if found is None:
        return 0.0
    wanted = [(choice, _chosen(choice, found.x)) for choice in choices]
    return _try(round_, [(choice, candidate) for choice, candidate in wanted if candidate is not choice.now])


def _choices(round_: Round) -> list[_Choice]:
    found: list[_Choice] = []
    for job in sorted(round_.assignments):
        assignment = round_.assignments[job]
        if assignment.placement is None:
            if (
                job in round_.state.waiting
                and not assignment.job.yields
                and assignment.option.candidates
                and not round_.recently_stopped(assignment.job)
            ):
                found.append(_Choice(assignment, None, 0.0))
        elif assignment.candidate is None or assignment.waits_for_release or job in round_.claimed:
            continue  # what others were stopped for keeps its place
        elif assignment.job.run is None:
            found.append(_Choice(assignment, assignment.candidate, 0.0))
        elif round_.movable(assignment) and assignment.started_at_s < round_.now:
            charge = own_charge(round_, assignment, assignment.candidate)
            found.append(_Choice(assignment, assignment.candidate, charge))
    return found


def _program(round_: Round, choices: list[_Choice]) -> highs.Program:
    program = highs.Program()
    rows: dict[_Group, list[tuple[int, float]]] = {}
    has: dict[_Group, float] = {}
    stays: list[tuple[int, float]] = []
    watts = watt_rows(round_, (one for choice in choices for one in choice.assignment.option.candidates))
    for choice in choices:
        assignment = choice.assignment
        group = (assignment.job.tenant, assignment.job.user, round_.priority(assignment.job))
        for candidate in _candidates(choice):
            kept = candidate is choice.now
            if not kept and not _allowed(round_, choice, candidate):
                continue
            worth = candidate.value + (choice.charge if kept else 0.0)
            variable = program.variable(-worth, 0.0, 1.0, integer=True)
            choice.candidates.append((variable, candidate))
            size = candidate.accelerators_m / 1000
            rows.setdefault((*group, candidate.accelerator), []).append((variable, size))
            if watts is not None and not kept:
                watts.goes(variable, candidate)
            if kept:
                if watts is not None and assignment.placement is not None:
                    watts.stays(variable, assignment.placement)
                has[(*group, candidate.accelerator)] = has.get((*group, candidate.accelerator), 0.0) + size
                if assignment.job.run is not None:
                    stays.append((variable, 1.0))
        if choice.candidates:
            kept = assignment.job.run is not None and round_.was_patient(assignment)
            program.row(
                [(variable, 1.0) for variable, _ in choice.candidates],
                low=1.0 if kept else -math.inf,
                high=1.0,
            )
    shares: dict[str, list[tuple[int, float]]] = {}
    for key, terms in sorted(rows.items()):
        share = program.variable(0.0, 0.0, math.inf)
        shares.setdefault(key[3], []).append((share, 1.0))
        program.row([*terms, (share, -1.0)], high=has.get(key, 0.0))
    for kind, terms in sorted(shares.items()):
        program.row(terms, high=_free(round_, kind))
    _quotas(round_, program, choices, rows, has)
    if watts is not None:
        watts.add(program)
    if stays:
        program.row(stays, low=len(stays) - max(0, round_.disruption_budget_left))
    return program


def _candidates(choice: _Choice) -> tuple[Candidate, ...]:
    """The job's candidates and, where it is of another size, that. No job is moved to run under a power cap."""
    now, starts = choice.now, choice.assignment.job.run is None
    found = tuple(
        one for one in choice.assignment.option.candidates if starts or one.power_cap == 1 or one is now
    )
    return found if now is None or any(candidate is now for candidate in found) else (*found, now)


def _allowed(round_: Round, choice: _Choice, candidate: Candidate) -> bool:
    """Whether quota and, for a running job, the rule for moves (migration.py) allow another candidate. A
    slower one is allowed: it is the other half of a swap, its cost is counted, and the job that gains makes
    up for it."""
    assignment, now = choice.assignment, choice.now
    if round_.holdings.refusal(assignment.job.tenant, candidate.accelerator, 0):
        return False
    if now is None or assignment.job.run is None or candidate.speed <= now.speed:
        return True
    return pays(round_, assignment, now, candidate)


def _free(round_: Round, kind: str) -> float:
    pools = [pool for pool in round_.cluster.pools.values() if pool.pool.accelerator == kind]
    return sum(pool.free_m() for pool in pools) / 1000


def _quotas(
    round_: Round,
    program: highs.Program,
    choices: list[_Choice],
    rows: dict[_Group, list[tuple[int, float]]],
    has: dict[_Group, float],
) -> None:
    """No tenant's jobs take more than its limits leave them, and none takes what the tenant's other jobs have
    of a limit: a job that only a limit holds back preempts nobody, so it could not take it back."""
    holdings = round_.holdings
    for name, tenant in sorted(holdings.tenants.items()):
        for quota in tenant.quotas:
            most = limit(quota)
            own = {key: terms for key, terms in rows.items() if _counts(quota, key) and key[0] == name}
            if not own or math.isinf(most):
                continue
            unit = {key: holdings.units_of(key[3], 1000) if quota.accelerator == "*" else 1.0 for key in own}
            spare = max(0.0, (most - holdings.counted_m(name, quota.accelerator)) / 1000)
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
    """Users and priorities of the tenant that come no later than every job that waits under this limit."""
    turns: dict[tuple[str, int], tuple[int, bool]] = {}
    first: tuple[int, bool] | None = None
    for choice in choices:
        assignment = choice.assignment
        if assignment.job.tenant != tenant or not any(
            quota.accelerator in ("*", candidate.accelerator) for _, candidate in choice.candidates
        ):
            continue
        priority = round_.priority(assignment.job)
        outside = round_.holdings.user_order(tenant, assignment.job.user, assignment.option.shared.sizes)[0]
        turn = (-priority, outside and round_.holdings.has_several_users(tenant))
        key = (assignment.job.user, priority)
        turns[key] = min(turn, turns.get(key, turn))
        if choice.now is None:
            first = turn if first is None else min(turn, first)
    return {key for key, turn in turns.items() if first is None or turn <= first}


def _as_planned(program: highs.Program, choices: list[_Choice]) -> list[float]:
    """The plan as a solution of the program: every job keeps its candidate."""
    x = [0.0] * len(program.cost)
    for choice in choices:
        for variable, candidate in choice.candidates:
            x[variable] = 1.0 if candidate is choice.now else 0.0
    return x


def _chosen(choice: _Choice, x: list[float]) -> Candidate | None:
    return next((candidate for variable, candidate in choice.candidates if x[variable] > 0.5), None)


def _try(round_: Round, changes: list[tuple[_Choice, Candidate | None]]) -> float:
    """Apply the changes to the nodes; undo them all if they do not pay."""
    with round_.trial() as trial:
        old = {choice.assignment.job.id: choice.assignment.placement for choice, _ in changes}
        for choice, _ in changes:
            round_.clear(choice.assignment)
        order = sorted(changes, key=lambda item: _size(item[1]), reverse=True)
        displaced = [
            choice
            for choice, candidate in order
            if candidate is not None and not round_.put_now(choice.assignment, candidate)
        ]
        for choice in displaced:
            _put_back(round_, choice, old[choice.assignment.job.id])
        gain = sum(_gain(choice, old[choice.assignment.job.id]) for choice, _ in changes)
        value = round_.state.value() - gain
        return (
            gain if gain > round_.policy.solver_gain * value and trial.within_budget and trial.keep() else 0.0
        )


def _size(candidate: Candidate | None) -> tuple[int, int]:
    return (0, 0) if candidate is None else (candidate.pods, candidate.accelerators_m)


def _put_back(round_: Round, choice: _Choice, old: Placement | None) -> None:
    """Back to the old place, if it is still free, or to any node of the same pool."""
    if old is None or choice.now is None:
        return
    if choice.assignment.job.run is not None and round_.fits(old, choice.assignment.job.id):
        started = choice.assignment.job.run.started_at_s
        round_.restore(choice.assignment, old, choice.now, started)
    else:
        round_.put_now(choice.assignment, choice.now)


def _gain(choice: _Choice, old: Placement | None) -> float:
    """Value per hour gained by one job, less the cost of its move."""
    assignment = choice.assignment
    now = 0.0 if assignment.candidate is None else assignment.candidate.value
    was = 0.0 if choice.now is None else choice.now.value
    return now - was - (choice.charge if assignment.placement != old else 0.0)
