"""The cheapest replicas, over GPU types, that carry the load of every bucket.

A column is one way to run a replica: a pool (type), a shape, a mode or a power cap. `rates[b]` is what one replica
sustains of bucket b alone within the SLO (`step_model.max_rate`), so a request of bucket b takes 1 / rates[b] seconds
of a replica. With n_j replicas of column j and the share x_bj of bucket b that goes there:

    minimise   Σ_j cost_j·n_j  +  start cost of new replicas  +  keep cost of dropped ones
    such that  Σ_j x_bj = 1                            each bucket is carried
               Σ_b load_b / rates_j[b] · x_bj <= n_j   no replica is overloaded
               accelerators per pool <= stock, over all <= quota; watts per domain; cost per hour <= budget
               replicas >= the minimum, in all and per failure domain; failure domains that hold one >= the minimum

Only n is integer: a share is how the gateway splits a bucket, and needs no slices. This is the program of Mélange
(arXiv:2404.14527) with continuous shares and the rows it leaves out. Where the load exceeds what the rows allow, a
second program carries as much as possible and `Mix.carried` says how much.

A column may be another one of its pool under a power cap: less rate for fewer watts at the same cost. Such columns can help
only where watts bind, so the mix is first sought without them and without the rows of power, and taken if it keeps these.
Otherwise they take part, and afterwards each replica gets the highest cap that the watts allow at no cost.

The best single type and the caller's last mix are incumbents: a limit that strikes early never leaves less, and the
mix is never dearer than the best single type, in the same objective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

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
    without,
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
    "carried_at",
    "cheapest",
    "domains_of",
    "held_back_by",
    "routing_shares",
    "spread",
]

CARRIED_MORE = 0.01
"""A limit binds if this much more of the load would be carried without it."""
_LOCAL_TESTS = 60
"""Linear programs (3 ms each for a hundred buckets by six types) that improve a first mix."""


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
        return [
            b for b, rate in enumerate(self.load) if rate > 0 and any(c.rates[b] > 0 for c in self.columns)
        ]

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
        total = 0.0
        for column in self.columns:
            count, now = replicas.get(column.key, 0), self.switching.now.get(column.key, 0)
            total += column.cost_per_h * count
            total += column.cost_per_h * self.switching.start_weight * max(count - now, 0)
            total += column.cost_per_h * self.switching.drop_weight * max(now - count, 0)
        return total


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
    _check(problem)
    effort, last = effort or Effort(), dict(incumbent or {})
    if all(c.power_cap >= 1 for c in problem.columns):
        found = _found(problem, effort, last)
    else:
        found = _without_caps(problem, effort, last) or _found(problem, effort, last)
        found = None if found is None else _lifted(problem, effort, found)
    if found is None:
        raise ServingModelError(
            "no mix keeps the minimum replicas, in all and by failure domain, within stock, quota, power and budget;"
            " lower the minimum or raise the limit"
        )
    return found


def _found(problem: _Problem, effort: Effort, incumbent: dict[str, int]) -> Mix | None:
    """The cheapest that carries the load, else the one that carries most; None: the limits forbid the minimum replicas."""
    known = [single for single in [_best_single(problem), incumbent] if single]
    return _solve(problem, effort, known) or _solve(problem, effort, [], all_carried=False)


def _without_caps(problem: _Problem, effort: Effort, incumbent: dict[str, int]) -> Mix | None:
    """The mix where watts do not bind; None: they do, or there are capped replicas already."""
    capped = [c.key for c in problem.columns if c.power_cap < 1]
    there = (problem.least, problem.switching.now, incumbent)
    if any(of.get(key, 0) for key in capped for of in there):
        return None
    whole = tuple(c for c in problem.columns if c.power_cap >= 1)
    if not whole:
        return None
    free = replace(problem, columns=whole, limits=without(problem.limits, LimitKind.POWER))
    found = _found(free, effort, incumbent)
    if found is None or not allowed(problem.columns, found.replicas, problem.limits):
        return None
    return replace(found, replicas={**found.replicas, **dict.fromkeys(capped, 0)})


def _lifted(problem: _Problem, effort: Effort, mix: Mix) -> Mix:
    """With each capped replica under the highest cap of its pool that the limits allow and that costs nothing."""
    replicas = dict(mix.replicas)
    for column in problem.columns:
        higher = [c for c in problem.columns if c.pool == column.pool and c.power_cap > column.power_cap]
        for other in sorted(higher, key=lambda c: -c.power_cap):
            while (step := _swapped(problem, replicas, column.key, other.key)) is not None:
                replicas = step
    if replicas == dict(mix.replicas):
        return mix
    fixed = replace(problem, least=replicas, most=replicas)
    return _solve(fixed, effort, [], all_carried=mix.carried >= 1) or mix


def _swapped(problem: _Problem, replicas: dict[str, int], less: str, more: str) -> dict[str, int] | None:
    """One replica of another column in the place of one; None: the limits forbid it, or it costs something."""
    step = replicas | {less: replicas[less] - 1, more: replicas[more] + 1}
    if step[less] < problem.least.get(less, 0) or step[more] > problem.most.get(more, step[more]):
        return None
    cheap = problem.objective(step) <= problem.objective(replicas) + TOLERANCE
    return step if cheap and allowed(problem.columns, step, problem.limits) else None


def spread(columns: Sequence[Column], load: Sequence[float], replicas: Mapping[str, int]) -> Mix:
    """Routing weights over the replicas that there are: what keeps the fullest column least full.

    `carried` is 1 if no column is overloaded, else the part that each takes without overload."""
    problem = _Problem(tuple(columns), tuple(load), Limits(), Switching(), {}, {})
    _check(problem)
    live = [c for c in columns if replicas.get(c.key, 0) > 0]
    program = highs.Program()
    fullest = program.variable(1.0, 0.0, math.inf)
    shares, terms = _share_rows(program, problem, [0.0] * len(load), live)
    for column in live:
        program.row([*terms[column.key], (fullest, -float(replicas[column.key]))], high=0.0)
    solution = highs.solve(program, gap=TOLERANCE)
    level = solution.x[fullest] if solution is not None else 0.0
    cost = sum(c.cost_per_h * replicas.get(c.key, 0) for c in columns)
    weights = _weights(shares, solution.x if solution is not None else [], len(load))
    nowhere = tuple(b for b, rate in enumerate(load) if rate > 0 and not any(c.rates[b] > 0 for c in live))
    carried = min(1.0, 1 / level) if level > 0 else 1.0
    return Mix(dict(replicas), weights, cost, cost, carried, nowhere, fullest=level)


def capacity(columns: Sequence[Column], shares: Sequence[float], replicas: Mapping[str, int]) -> float:
    """Requests per second, `shares` of them in each bucket, that these replicas carry within the SLO."""
    return carried_at(spread(columns, shares, replicas), shares)


def carried_at(level: Mix, shares: Sequence[float]) -> float:
    """The same from what `spread` said for these shares."""
    return sum(shares) / level.fullest if level.fullest > 0 else 0.0


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
    _check(problem)
    return _best_single(problem)


def _check(problem: _Problem) -> None:
    if not problem.columns:
        raise ServingModelError("there is no pool to choose from")
    keys = [c.key for c in problem.columns]
    if len(set(keys)) != len(keys):
        raise ServingModelError(f"a column is named twice: {', '.join(sorted(keys))}")
    for column in problem.columns:
        if len(column.rates) != len(problem.load):
            raise ServingModelError(
                f"{column.key} has rates for {len(column.rates)} buckets, the load has {len(problem.load)}"
            )
    if any(not math.isfinite(rate) or rate < 0 for rate in problem.load):
        raise ServingModelError("the load of a bucket is negative or not a number")


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


_Shares = list[tuple[int, str, int]]
"""(bucket, column, variable)."""


def _share_rows(
    program: highs.Program, problem: _Problem, unserved_cost: Sequence[float], live: Sequence[Column]
) -> tuple[_Shares, dict[str, list[tuple[int, float]]]]:
    """Variables of the shares, the row that carries each bucket, and the work terms by column."""
    shares: _Shares = []
    terms: dict[str, list[tuple[int, float]]] = {c.key: [] for c in live}
    for bucket in problem.served:
        row: list[tuple[int, float]] = []
        for column in live:
            if column.rates[bucket] > 0:
                variable = program.variable(0.0, 0.0, 1.0)
                shares.append((bucket, column.key, variable))
                row.append((variable, 1.0))
                terms[column.key].append((variable, problem.load[bucket] / column.rates[bucket]))
        if unserved_cost[bucket] > 0:
            row.append((program.variable(unserved_cost[bucket], 0.0, 1.0), 1.0))
        if row:
            program.row(row, low=1.0, high=1.0)
    return shares, terms


def _solve(
    problem: _Problem, effort: Effort, known: Sequence[Mapping[str, int]], all_carried: bool = True
) -> Mix | None:
    program = highs.Program()
    counts: dict[str, int] = {}
    extra: list[tuple[Column, int, int | None, int | None]] = []
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
    penalty = [0.0 if all_carried else _penalty(problem, b) for b in range(len(problem.load))]
    shares, terms = _share_rows(program, problem, penalty, problem.columns)
    for column in problem.columns:
        program.row([*terms[column.key], (counts[column.key], -1.0)], high=0.0)
    for row, low, high in limit_rows(problem.columns, problem.limits):
        program.row([(counts[c.key], weight) for c, weight in row], low=low, high=high)
    held = _domain_rows(program, problem, counts)
    if all_carried and effort.seconds is not None:
        known = [*known, *_dived(problem, program, counts)]
    start = _start(problem, program, counts, extra, shares, known, held) if all_carried else None
    solution = highs.solve(program, effort.seconds, effort.nodes, effort.gap, start=start)
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


def _dived(problem: _Problem, program: highs.Program, counts: Mapping[str, int]) -> list[Mapping[str, int]]:
    """A good mix before the search begins, for where the clock may end it early: the relaxation, with one number of
    replicas after the other fixed, always the one that is nearest to an integer."""
    lower, upper = list(program.lower), list(program.upper)
    relaxed = replace(program, integer=[False] * len(program.integer), lower=lower, upper=upper)
    solution = highs.solve(relaxed)
    free = dict(counts)
    while solution is not None and free:
        x = solution.x
        key = min(free, key=lambda k: (abs(x[free[k]] - round(x[free[k]])), k))
        variable = free.pop(key)
        value, bounds = x[variable], (lower[variable], upper[variable])
        if abs(value - round(value)) <= TOLERANCE:
            lower[variable] = upper[variable] = float(round(value))
            continue
        solution = None
        for fixed in (round(value), math.ceil(value)):
            if solution is None and bounds[0] <= fixed <= bounds[1]:
                lower[variable] = upper[variable] = float(fixed)
                solution = highs.solve(relaxed)
    if solution is None:
        return []
    return [_improved(problem, program, counts, {k: round(solution.x[v]) for k, v in counts.items()})]


def _improved(
    problem: _Problem, program: highs.Program, counts: Mapping[str, int], replicas: dict[str, int]
) -> dict[str, int]:
    """One replica less, or one of another column in its place, as long as that is cheaper and carries the load;
    small savings first, which are the likelier ones. Then the same with two for one and one for two."""
    keys, tests = sorted(counts), 0
    failed: set[tuple[int, ...]] = set()
    one, two = _exchanges(keys)
    for exchanges in (one, one + two):
        while tests < _LOCAL_TESTS:
            now = problem.objective(replicas)
            cheaper: list[tuple[float, dict[str, int]]] = []
            for exchange in exchanges:
                step = {key: count + exchange[key] for key, count in replicas.items()}
                within = all(program.lower[v] <= step[k] <= program.upper[v] for k, v in counts.items())
                saved = now - problem.objective(step) if within else 0.0
                if saved > TOLERANCE and tuple(step[k] for k in keys) not in failed:
                    cheaper.append((saved, step))
            if not cheaper:
                break
            step = min(cheaper, key=lambda item: (item[0], tuple(item[1][k] for k in keys)))[1]
            tests += 1
            if _carries(problem, step):
                replicas = step
            else:
                failed.add(tuple(step[k] for k in keys))
    return replicas


def _exchanges(keys: Sequence[str]) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Changes of the numbers by column: one less with at most one more, and two against one."""

    def change(less: Sequence[str], more: Sequence[str]) -> Counter[str]:
        made = Counter(more)
        made.subtract(less)
        return made

    one = [change([drop], more) for drop in keys for more in ([], *([key] for key in keys if key != drop))]
    pairs = list(combinations_with_replacement(keys, 2))
    two = [
        change(less, more)
        for pair in pairs
        for key in keys
        if key not in pair
        for less, more in ((pair, (key,)), ((key,), pair))
    ]
    return one, two


def _carries(problem: _Problem, replicas: Mapping[str, int]) -> bool:
    """Whether these replicas carry the load within the limits."""
    if not allowed(problem.columns, replicas, problem.limits):
        return False
    routed = spread(problem.columns, problem.load, replicas)
    return routed.carried >= 1 and not set(routed.impossible) & set(problem.served)


def _penalty(problem: _Problem, bucket: int) -> float:
    """Leaving a bucket out costs far more than carrying it on the dearest column that can."""
    costs = [
        c.cost_per_h * problem.load[bucket] / c.rates[bucket] for c in problem.columns if c.rates[bucket] > 0
    ]
    dearest = max((c.cost_per_h * (1 + problem.switching.start_weight) for c in problem.columns), default=1.0)
    return 10 * (max(costs, default=0.0) + dearest) if bucket in problem.served else 0.0


def _start(
    problem: _Problem,
    program: highs.Program,
    counts: Mapping[str, int],
    extra: Sequence[tuple[Column, int, int | None, int | None]],
    shares: _Shares,
    known: Sequence[Mapping[str, int]],
    held: Sequence[tuple[str, int]],
) -> list[float] | None:
    """A full assignment of the cheapest known mix that carries the load and keeps the limits; None if none does."""
    for replicas in sorted(known, key=problem.objective):
        if any(
            not program.lower[v] <= replicas.get(key, 0) <= program.upper[v] for key, v in counts.items()
        ) or not allowed(problem.columns, replicas, problem.limits):
            continue
        routed = spread(problem.columns, problem.load, replicas)
        if routed.carried < 1 or set(routed.impossible) & set(problem.served):
            continue
        x = [0.0] * len(program.cost)
        for key, variable in counts.items():
            x[variable] = float(replicas.get(key, 0))
        for bucket, key, variable in shares:
            x[variable] = routed.weights[bucket].get(key, 0.0)
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
    problem: _Problem, counts: Mapping[str, int], shares: _Shares, x: Sequence[float], optimal: bool
) -> Mix:
    replicas = {key: round(x[variable]) for key, variable in counts.items()}
    weights = _weights(shares, x, len(problem.load))
    impossible = tuple(b for b, rate in enumerate(problem.load) if rate > 0 and b not in set(problem.served))
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


def _carried(problem: _Problem, shares: _Shares, x: Sequence[float]) -> float:
    by_bucket = dict.fromkeys(problem.served, 0.0)
    for bucket, _, variable in shares:
        by_bucket[bucket] += x[variable]
    work = {b: problem.load[b] / max(c.rates[b] for c in problem.columns) for b in problem.served}
    total = sum(work.values())
    carried = sum(work[b] * min(1.0, by_bucket[b]) for b in problem.served)
    return 1.0 if total <= 0 or carried >= total * (1 - TOLERANCE) else carried / total


def _weights(shares: _Shares, x: Sequence[float], buckets: int) -> tuple[Mapping[str, float], ...]:
    weights: list[dict[str, float]] = [{} for _ in range(buckets)]
    for bucket, key, variable in shares:
        if x and x[variable] > TOLERANCE:
            weights[bucket][key] = x[variable]
    totals = [sum(row.values()) for row in weights]
    return tuple(
        {key: share / total for key, share in row.items()} if total > 0 else {}
        for row, total in zip(weights, totals, strict=True)
    )
