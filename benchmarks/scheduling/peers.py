"""Peers re-implemented from their papers, as fraction policies for `busbar.scheduler.simulate.rounds`.

| policy                   | source                         | checked against a published number |
|--------------------------|--------------------------------|------------------------------------|
| max_min (aware, agnostic)| Gavel, OSDI'20, 4.1            | T1 mean JCT 4.06 h and 5.55 h      |
| finish_time (aware)      | Gavel, OSDI'20, 4.2; Themis    | T1 mean JCT 4.17 h                 |
"""

from __future__ import annotations

from busbar.scheduler.highs import Program, solve
from busbar.scheduler.simulate.rounds import Active, FractionPolicy, Fractions
from busbar.scheduler.simulate.trace import TraceCluster


def max_min(aware: bool, interior: bool = True) -> FractionPolicy:
    """Maximise the least normalised throughput: max z, sf thr(m, X) / (w thr(m, X_prop)) >= z."""

    def policy(active: list[Active], cluster: TraceCluster, now: float) -> Fractions:
        capacity = cluster.capacity()
        program, columns = _fractions(active, capacity)
        least = program.variable(cost=-1.0, upper=1e6)
        for entry in active:
            speeds = _speeds(entry, capacity, aware)
            fair = sum(speeds[kind] * capacity[kind] for kind in speeds) / sum(capacity.values())
            size = entry.job.accelerators
            terms = [(columns[entry.job.id][kind], size * speeds[kind] / fair) for kind in speeds]
            program.row([*terms, (least, -1.0)], low=0.0)
        return _solved(program, columns, interior)

    return policy


def finish_time(interior: bool = True) -> FractionPolicy:
    """Minimise the worst ratio of finish time shared to finish time alone, by bisection on the ratio."""
    isolated: dict[str, tuple[float, float]] = {}

    def policy(active: list[Active], cluster: TraceCluster, now: float) -> Fractions:
        capacity = cluster.capacity()
        targets = []
        for entry in active:
            speeds = _speeds(entry, capacity, True)
            alone = _isolated(entry, capacity, len(active), speeds)
            spent, left_before = isolated.get(entry.job.id, (0.0, entry.job.work))
            spent += (left_before - entry.left) / alone
            isolated[entry.job.id] = (spent, entry.left)
            targets.append((entry, speeds, now - entry.job.arrival_s, spent + entry.left / alone))
        low, high, best = 0.0, 1.0, None
        while (best := _within(active, capacity, targets, high, interior)) is None:
            low, high = high, high * 2
        while high - low > 0.005 * high:
            middle = (low + high) / 2
            found = _within(active, capacity, targets, middle, interior)
            if found is None:
                low = middle
            else:
                high, best = middle, found
        return best

    return policy


def _within(
    active: list[Active],
    capacity: dict[str, int],
    targets: list[tuple[Active, dict[str, float], float, float]],
    ratio: float,
    interior: bool,
) -> Fractions | None:
    program, columns = _fractions(active, capacity)
    for entry, speeds, age, alone in targets:
        time = ratio * alone - age
        if time <= 0:
            return None
        terms = [(columns[entry.job.id][kind], speed) for kind, speed in speeds.items()]
        program.row(terms, low=entry.left / time)
    try:
        return _solved(program, columns, interior)
    except ValueError:
        return None


def _isolated(entry: Active, capacity: dict[str, int], count: int, speeds: dict[str, float]) -> float:
    shares = {kind: capacity[kind] / (count * entry.job.accelerators) for kind in capacity}
    scale = 1 / max(1.0, sum(shares.values()))
    return sum(shares[kind] * scale * speed for kind, speed in speeds.items())


def _speeds(entry: Active, capacity: dict[str, int], aware: bool) -> dict[str, float]:
    known = {kind: entry.job.speeds.get(kind, 0.0) for kind in capacity}
    return {kind: (speed if aware else 1.0) for kind, speed in known.items() if speed > 0 or not aware}


def _fractions(active: list[Active], capacity: dict[str, int]) -> tuple[Program, dict[str, dict[str, int]]]:
    """The rows every fraction policy has: at most all of a job's time, at most all of a type's."""
    program = Program()
    columns = {entry.job.id: {kind: program.variable() for kind in capacity} for entry in active}
    for entry in active:
        program.row([(column, 1.0) for column in columns[entry.job.id].values()], high=1.0)
    for kind, count in capacity.items():
        terms = [(columns[entry.job.id][kind], entry.job.accelerators) for entry in active]
        program.row(terms, high=float(count))
    return program, columns


def _solved(program: Program, columns: dict[str, dict[str, int]], interior: bool) -> Fractions:
    solution = solve(program, interior=interior)
    if solution is None:
        raise ValueError("no allocation meets these demands")
    return {
        key: {kind: min(1.0, max(0.0, solution.x[column])) for kind, column in row.items()}
        for key, row in columns.items()
    }
