"""The cheapest replicas, over GPU types, that carry the load of every bucket.

A column is one way to run a replica: a pool (type), a shape, a mode or a power cap. `rates[b]` is what one replica
sustains of bucket b alone within the SLO (`step_model.max_rate`), so a request of bucket b takes 1 / rates[b] seconds
of a replica. With n_j replicas of column j and the share x_bj of bucket b that goes there:

    minimise   Σ_j cost_j·n_j  +  start cost of new replicas  +  keep cost of dropped ones
    such that  Σ_j x_bj = 1                            each bucket is carried
               Σ_b load_b / rates_j[b] · x_bj <= n_j   no replica is overloaded
               accelerators per pool <= stock, over all <= quota; watts per domain; cost per hour <= budget
               replicas >= the minimum, in all and per failure domain; failure domains that hold one >= the minimum
               for each failure domain, other shares with which the replicas outside of it carry the reserve

Only n is integer: a share is how the gateway splits a bucket, and needs no slices. This is the program of Mélange
(arXiv:2404.14527) with continuous shares and the rows it leaves out. Where the load exceeds what the rows allow, a
second program carries as much as possible and `Mix.carried` says how much. The reserve for the loss of a failure domain comes
after the load: where there is no room for both, the domain whose loss leaves least leaves as much as the load has room for.

A column may be another one of its pool under a power cap: less rate for fewer watts at the same cost. Such columns can help
only where watts bind, so the mix is first sought without them and without the rows of power, and taken if it keeps these.
Otherwise they take part, and afterwards each replica gets the highest cap that the watts allow at no cost.

The best single type and the caller's last mix are incumbents: a limit that strikes early never leaves less, and the
mix is never dearer than the best single type, in the same objective. Where a clock limits the answer, a first mix is made from the
relaxation and improved by exchanges (`mix_search.py`) under the same limit, before the search begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .. import highs
from ..errors import ServingModelError
from .columns import (
    TOLERANCE,
    Column,
    Effort,
    LimitKind,
    Limits,
    Mix,
    Row,
    Switching,
    allowed,
    domains_of,
    held_back_by,
    limit_rows,
    routing_shares,
    too_tight,
    without,
)
from .domain_loss import losses
from .mix_search import Cuts, Exchange, improved
from .spread import (
    Level,
    Shares,
    capacity,
    carried_at,
    check,
    prices_of,
    served_by,
    share_rows,
    spread,
    weights_of,
)

__all__ = [
    "Column",
    "Effort",
    "LimitKind",
    "Limits",
    "Mix",
    "Row",
    "Switching",
    "allowed",
    "best_single_type",
    "binding",
    "capacity",
    "carried_at",
    "cheapest",
    "domains_of",
    "held_back_by",
    "routing_shares",
    "spread",
]

CARRIED_MORE = 0.01
"""A limit binds if this much more of the load would be carried without it."""
_FIRST = 0.9
"""Part of the time until which a first mix may be improved before the search for the best one begins."""
_LEAST = 0.25
"""With less of it left, the search does not begin where there is a mix."""


@dataclass(frozen=True, slots=True)
class _Problem:
    columns: tuple[Column, ...]
    load: tuple[float, ...]
    limits: Limits
    switching: Switching
    least: Mapping[str, int]
    most: Mapping[str, int]

    @property
    def served(self) -> list[int]:
        """Buckets with load that some column can serve."""
        return served_by(self.columns, self.load)

    def upper(self, column: Column) -> int:
        """The most replicas of a column that can be of use."""
        work = sum(rate / column.rates[b] for b, rate in enumerate(self.load) if column.rates[b] > 0)
        domain, limits = column.failure_domain, self.limits
        floor = max(limits.min_replicas, limits.min_per_domain.get(domain, 0), min(limits.min_domains, 1))
        bound = max(math.ceil(work), floor, self.least.get(column.key, 0))
        stock = self.limits.stock.get(column.pool)
        if stock is not None:
            bound = min(bound, stock // column.accelerators)
        return max(min(bound, self.most.get(column.key, bound)), 0)

    def objective(self, replicas: Mapping[str, int]) -> float:
        return sum(self.cost(column, replicas.get(column.key, 0)) for column in self.columns)

    def cost(self, column: Column, count: int) -> float:
        """The part of the objective for the replicas of one column."""
        switching, now = self.switching, self.switching.now.get(column.key, 0)
        changed = switching.start_weight * max(count - now, 0) + switching.drop_weight * max(now - count, 0)
        return column.cost_per_h * (count + changed)


@dataclass(frozen=True, slots=True)
class _Budget:
    """Where all programs of one answer stop."""

    effort: Effort
    deadline: highs.Deadline

    @classmethod
    def of(cls, effort: Effort) -> _Budget:
        return cls(effort, highs.Deadline.after(effort.seconds))


def cheapest(
    columns: Sequence[Column],
    load: Sequence[float],
    limits: Limits | None = None,
    switching: Switching | None = None,
    effort: Effort | None = None,
    incumbent: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
    most: Mapping[str, int] | None = None,
) -> Mix:
    """The cheapest mix for `load` (requests per second by bucket).

    Args:
        incumbent: replicas of the last good mix, kept if a limit strikes before anything better is found.
        least, most: bounds on single columns, to add to what runs or to take from it.

    Raises:
        ServingModelError: bad numbers, or minimum replicas that the other limits forbid.
        SolverError: the solver is missing or failed.
    """
    problem = _Problem(
        tuple(columns), tuple(load), limits or Limits(), switching or Switching(), least or {}, most or {}
    )
    check(problem.columns, problem.load)
    budget, last = _Budget.of(effort or Effort()), dict(incumbent or {})
    if all(c.power_cap >= 1 for c in problem.columns):
        found = _found(problem, budget, last)
    else:
        found = _without_caps(problem, budget, last) or _found(problem, budget, last)
        found = None if found is None else _lifted(problem, budget, found)
    if found is None:
        why = "; ".join(too_tight(problem.columns, problem.limits)) or (
            "the minimum, in all and by failure domain, is not within stock, quota, power and budget together"
        )
        raise ServingModelError(
            f"no mix keeps the minimum of replicas: {why}. Lower the minimum or raise the limit"
        )
    return found


def _found(problem: _Problem, budget: _Budget, incumbent: dict[str, int]) -> Mix | None:
    """The cheapest that carries the load, else the one that carries most; None: the limits forbid the minimum replicas."""
    known = [single for single in [_best_single(problem), incumbent] if single]
    found = _solve(problem, budget, known)
    if found is None and problem.limits.domain_reserve > 0:
        found = _solve(problem, budget, [], all_reserved=False)
        problem = _without_reserve(problem)
        found = found or _solve(problem, budget, known)
    return found or _solve(problem, budget, [], all_carried=False)


def _without_reserve(problem: _Problem) -> _Problem:
    return replace(problem, limits=replace(problem.limits, domain_reserve=0.0))


def _without_caps(problem: _Problem, budget: _Budget, incumbent: dict[str, int]) -> Mix | None:
    """The mix where watts do not bind; None: they do, or there are capped replicas already."""
    capped = [c.key for c in problem.columns if c.power_cap < 1]
    there = (problem.least, problem.switching.now, incumbent)
    if any(of.get(key, 0) for key in capped for of in there):
        return None
    whole = tuple(c for c in problem.columns if c.power_cap >= 1)
    if not whole:
        return None
    free = replace(problem, columns=whole, limits=without(problem.limits, LimitKind.POWER))
    found = _found(free, budget, incumbent)
    if found is None or not allowed(problem.columns, found.replicas, problem.limits):
        return None
    return replace(found, replicas={**found.replicas, **dict.fromkeys(capped, 0)})


def _lifted(problem: _Problem, budget: _Budget, mix: Mix) -> Mix:
    """With each capped replica under the highest cap of its pool that the limits allow and that costs nothing."""
    replicas = dict(mix.replicas)
    for column in problem.columns:
        higher = [c for c in problem.columns if c.pool == column.pool and c.power_cap > column.power_cap]
        for other in sorted(higher, key=lambda c: -c.power_cap):
            while (step := _swapped(problem, replicas, column.key, other.key)) is not None:
                replicas = step
    if replicas == dict(mix.replicas):
        return mix
    fixed = replace(_without_reserve(problem), least=replicas, most=replicas)
    return _solve(fixed, budget, [], all_carried=mix.carried >= 1) or mix


def _swapped(problem: _Problem, replicas: dict[str, int], less: str, more: str) -> dict[str, int] | None:
    """One replica of another column in the place of one; None: the limits forbid it, or it costs something."""
    step = replicas | {less: replicas[less] - 1, more: replicas[more] + 1}
    if step[less] < problem.least.get(less, 0) or step[more] > problem.most.get(more, step[more]):
        return None
    cheap = problem.objective(step) <= problem.objective(replicas) + TOLERANCE
    return step if cheap and allowed(problem.columns, step, problem.limits) else None


def binding(
    columns: Sequence[Column], load: Sequence[float], limits: Limits, carried: float, effort: Effort
) -> LimitKind | None:
    """The kind of limit that keeps the mix from carrying more than the part `carried` of the load: the first without whose
    rows it would, or the first of them all where it takes several; None: it is the stock, or the number of replicas.

    Raises:
        ServingModelError: as `cheapest`.
    """
    kinds = [kind for kind in LimitKind if without(limits, kind) != limits]
    for kind in kinds:
        if cheapest(columns, load, without(limits, kind), effort=effort).carried > carried + CARRIED_MORE:
            return kind
    free = limits
    for kind in kinds:
        free = without(free, kind)
    if not kinds or cheapest(columns, load, free, effort=effort).carried <= carried + CARRIED_MORE:
        return None
    return kinds[0]


def best_single_type(
    columns: Sequence[Column], load: Sequence[float], limits: Limits | None = None
) -> dict[str, int] | None:
    """The cheapest single column that carries all of the load alone and within the limits; None if none does."""
    problem = _Problem(tuple(columns), tuple(load), limits or Limits(), Switching(), {}, {})
    check(problem.columns, problem.load)
    return _best_single(problem)


def _best_single(problem: _Problem) -> dict[str, int] | None:
    found: list[tuple[float, str, dict[str, int]]] = []
    for column in problem.columns:
        if any(column.rates[b] <= 0 for b in problem.served):
            continue
        work = sum(problem.load[b] / column.rates[b] for b in problem.served)
        count = max(
            math.ceil(work - TOLERANCE), problem.limits.min_replicas, problem.least.get(column.key, 0)
        )
        replicas = {c.key: problem.least.get(c.key, 0) for c in problem.columns} | {column.key: count}
        if allowed(problem.columns, replicas, problem.limits) and all(
            replicas[key] <= most for key, most in problem.most.items() if key in replicas
        ):
            found.append((problem.objective(replicas), column.key, replicas))
    return min(found)[2] if found else None


@dataclass(frozen=True, slots=True)
class _Carried:
    """A load, the columns that carry it, and their shares of it in the program."""

    columns: Sequence[Column]
    load: Sequence[float]
    shares: Shares

    def by(self, replicas: Mapping[str, int]) -> tuple[Mapping[str, float], ...] | None:
        """The shares with which these replicas carry all of it; None: they do not."""
        routed = spread(self.columns, self.load, replicas)
        missed = set(routed.impossible) & set(served_by(self.columns, self.load))
        return routed.weights if routed.carried >= 1 and not missed else None


_Changes = list[tuple[Column, int, int | None, int | None]]
"""(column, replicas now, variable of those started, variable of those dropped)."""


def _count_variables(program: highs.Program, problem: _Problem) -> tuple[dict[str, int], _Changes]:
    """The replicas of each column, and what changes cost."""
    counts: dict[str, int] = {}
    extra: _Changes = []
    for column in problem.columns:
        least, now = problem.least.get(column.key, 0), problem.switching.now.get(column.key, 0)
        upper = max(problem.upper(column), least)
        counts[column.key] = program.variable(column.cost_per_h, least, upper, integer=True)
        started = dropped = None
        if problem.switching.start_weight > 0:
            started = program.variable(column.cost_per_h * problem.switching.start_weight, 0.0, math.inf)
            program.row([(started, 1.0), (counts[column.key], -1.0)], low=-now)
        if problem.switching.drop_weight > 0:
            dropped = program.variable(column.cost_per_h * problem.switching.drop_weight, 0.0, math.inf)
            program.row([(dropped, 1.0), (counts[column.key], 1.0)], low=now)
        extra.append((column, now, started, dropped))
    return counts, extra


def _solve(
    problem: _Problem,
    budget: _Budget,
    known: Sequence[Mapping[str, int]],
    all_carried: bool = True,
    all_reserved: bool = True,
) -> Mix | None:
    """
    Args:
        known: mixes that carry all and may be incumbents.
        all_carried, all_reserved: whether the load, and the reserve for the loss of a domain, must be carried as a whole;
            else as much as possible, whatever that costs.
    """
    effort, deadline = budget.effort, budget.deadline
    program = highs.Program()
    counts, extra = _count_variables(program, problem)
    left_out = {} if all_carried else _left_out(program, problem)
    shares, terms = share_rows(program, problem.columns, problem.load, left_out)
    carry = {c.key: program.row([*terms[c.key], (counts[c.key], -1.0)], high=0.0) for c in problem.columns}
    for row, low, high in limit_rows(problem.columns, problem.limits):
        program.row([(counts[c.key], weight) for c, weight in row], low=low, high=high)
    held = _domain_rows(program, problem, counts)
    parts = [_Carried(problem.columns, problem.load, shares)]
    parts += _reserve_rows(program, problem, counts, soft=not all_reserved)
    whole = all_carried and all_reserved
    if whole and effort.seconds is not None:
        first = _first(problem, parts, program, counts, carry, deadline.at(_FIRST))
        if first is None:
            return None
        known = [*known, first]
    start = _start(problem, program, counts, extra, parts, known, held) if whole else None
    left_s, least_s = deadline.left_s, _LEAST * (effort.seconds or 0.0)
    if start is not None and left_s is not None and left_s <= least_s:
        return _read(problem, counts, shares, start, False)
    left_s = None if left_s is None else max(left_s, least_s)
    solution = highs.solve(program, left_s, effort.nodes, effort.gap, start=start)
    if solution is None and start is None:
        return None
    x = solution.x if solution is not None else start
    assert x is not None
    best = _read(problem, counts, shares, x, solution is not None and solution.optimal)
    if (
        start is not None
        and (kept := _read(problem, counts, shares, start, False)).objective < best.objective
    ):
        best = replace(kept, optimal=best.optimal)
    return best


def _domain_rows(
    program: highs.Program, problem: _Problem, counts: Mapping[str, int]
) -> list[tuple[str, int]]:
    """Domains and the variables that are 1 where they hold a replica. They are at most the replicas there, and these are
    whole numbers: the variables need not be."""
    if problem.limits.min_domains <= 0:
        return []
    held = []
    for domain in sorted(domains_of(problem.columns)):
        variable = program.variable(0.0, 0.0, 1.0)
        there = [(counts[c.key], -1.0) for c in problem.columns if c.failure_domain == domain]
        program.row([(variable, 1.0), *there], high=0.0)
        held.append((domain, variable))
    program.row([(variable, 1.0) for _, variable in held], low=float(problem.limits.min_domains))
    return held


def _reserve_rows(
    program: highs.Program, problem: _Problem, counts: Mapping[str, int], soft: bool
) -> list[_Carried]:
    """For each domain that may be lost, the shares of the others in what they must carry then.

    Args:
        soft: the domain whose loss leaves most uncarried leaves as little as possible.
    """
    found, left_out = [], _left_out(program, problem) if soft else {}
    for loss in losses(problem.columns, problem.load, problem.limits.domain_reserve):
        shares, terms = share_rows(program, loss.columns, loss.load, left_out)
        for column in loss.columns:
            program.row([*terms[column.key], (counts[column.key], -1.0)], high=0.0)
        found.append(_Carried(loss.columns, loss.load, shares))
    return found


def _first(
    problem: _Problem,
    parts: Sequence[_Carried],
    program: highs.Program,
    counts: Mapping[str, int],
    carry: Mapping[str, int],
    deadline: highs.Deadline,
) -> Mapping[str, int] | None:
    """A good mix before the search begins, for where the clock may end it early; None: none carries the load.

    Args:
        parts: the load, and what must be carried without each domain.
        counts, carry: by column, the variables of the replicas, and the rows that none of them is overloaded.
    """
    cuts = Cuts(
        {
            c.key: {b: problem.load[b] / c.rates[b] for b in problem.served if c.rates[b] > 0}
            for c in problem.columns
        }
    )
    rounded = _dived(program, counts, carry, cuts, deadline)
    if rounded is None:
        return None

    by_key = {c.key: c for c in problem.columns}
    level, *others = (Level(part.columns, part.load) for part in parts)

    def missing(replicas: Mapping[str, int]) -> Mapping[str, float] | None:
        level.fill(replicas)
        if level.fullest > 1:
            return level.prices
        for other in others:
            other.fill(replicas)
            if other.fullest > 1:
                return {}  # what a replica is worth for another load says nothing of this one
        return None

    def allows(replicas: Mapping[str, int]) -> bool:
        within = all(program.lower[v] <= replicas[k] <= program.upper[v] for k, v in counts.items())
        return within and allowed(problem.columns, replicas, problem.limits)

    def cost(key: str, count: int) -> float:
        return problem.cost(by_key[key], count)

    return improved(rounded, Exchange(cost, allows, missing, cuts), deadline)


def _dived(
    program: highs.Program,
    counts: Mapping[str, int],
    carry: Mapping[str, int],
    cuts: Cuts,
    deadline: highs.Deadline,
) -> dict[str, int] | None:
    """The relaxation, with one number of replicas after the other fixed, always the one that is nearest to an integer; those that
    are left when the time is up are rounded up. None: the load is not carried. What its prices tell is added to `cuts`."""
    relaxed = highs.Linear(program)
    solution, free = relaxed.solve(), dict(counts)
    if solution is None:
        return None
    while free and not deadline.is_past:
        cuts.add(prices_of(solution, carry))
        x = solution.x
        key = min(free, key=lambda k: (abs(x[free[k]] - round(x[free[k]])), k))
        variable = free.pop(key)
        value, low, high = x[variable], program.lower[variable], program.upper[variable]
        if abs(value - round(value)) <= TOLERANCE:
            relaxed.set_bounds(variable, round(value), round(value))
            continue
        found = None
        for fixed in dict.fromkeys((round(value), math.ceil(value))):
            if found is None and low <= fixed <= high:
                relaxed.set_bounds(variable, fixed, fixed)
                found = relaxed.solve()
        if found is None:
            break
        solution = found
    return {key: math.ceil(solution.x[variable] - TOLERANCE) for key, variable in counts.items()}


def _left_out(program: highs.Program, problem: _Problem) -> dict[int, int]:
    """For each bucket with load, the variable of the part that is not carried."""
    return {b: program.variable(_penalty(problem, b), 0.0, 1.0) for b in problem.served}


def _penalty(problem: _Problem, bucket: int) -> float:
    """Leaving a bucket out costs far more than carrying it on the dearest column that can."""
    costs = [
        c.cost_per_h * problem.load[bucket] / c.rates[bucket] for c in problem.columns if c.rates[bucket] > 0
    ]
    dearest = max((c.cost_per_h * (1 + problem.switching.start_weight) for c in problem.columns), default=1.0)
    return 10 * (max(costs) + dearest)


def _start(
    problem: _Problem,
    program: highs.Program,
    counts: Mapping[str, int],
    extra: _Changes,
    parts: Sequence[_Carried],
    known: Sequence[Mapping[str, int]],
    held: Sequence[tuple[str, int]],
) -> list[float] | None:
    """A full assignment of the cheapest known mix that carries the load and keeps the limits; None if none does."""
    for replicas in sorted(known, key=problem.objective):
        if any(
            not program.lower[v] <= replicas.get(key, 0) <= program.upper[v] for key, v in counts.items()
        ) or not allowed(problem.columns, replicas, problem.limits):
            continue
        weights = [part.by(replicas) for part in parts]
        if any(one is None for one in weights):
            continue
        x = [0.0] * len(program.cost)
        for key, variable in counts.items():
            x[variable] = float(replicas.get(key, 0))
        for part, routed in zip(parts, weights, strict=True):
            for bucket, key, variable in part.shares:
                x[variable] = routed[bucket].get(key, 0.0) if routed is not None else 0.0
        for column, now, started, dropped in extra:
            count = replicas.get(column.key, 0)
            if started is not None:
                x[started] = float(max(count - now, 0))
            if dropped is not None:
                x[dropped] = float(max(now - count, 0))
        with_replicas = domains_of(problem.columns, replicas)
        for domain, variable in held:
            x[variable] = float(domain in with_replicas)
        return x
    return None


def _read(
    problem: _Problem, counts: Mapping[str, int], shares: Shares, x: Sequence[float], optimal: bool
) -> Mix:
    replicas = {key: round(x[variable]) for key, variable in counts.items()}
    weights = weights_of(shares, x, len(problem.load))
    served = set(problem.served)
    impossible = tuple(b for b, rate in enumerate(problem.load) if rate > 0 and b not in served)
    cost = sum(c.cost_per_h * replicas[c.key] for c in problem.columns)
    return Mix(
        replicas,
        weights,
        cost,
        problem.objective(replicas),
        _carried(problem, shares, x),
        impossible,
        optimal=optimal,
    )


def _carried(problem: _Problem, shares: Shares, x: Sequence[float]) -> float:
    by_bucket = dict.fromkeys(problem.served, 0.0)
    for bucket, _, variable in shares:
        by_bucket[bucket] += x[variable]
    work = {b: problem.load[b] / max(c.rates[b] for c in problem.columns) for b in problem.served}
    total = sum(work.values())
    carried = sum(work[b] * min(1.0, by_bucket[b]) for b in problem.served)
    return 1.0 if total <= 0 or carried >= total * (1 - TOLERANCE) else carried / total
