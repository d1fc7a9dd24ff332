"""The objective makespan: on which type each job should spend its time, and who must run now, so that the last ends soon.

A linear program over the time x that each job spends on each of its candidates,

    minimise T    with   sum_c speed_jc x_jc   =  remaining work of job j          (dual v_j: what its work is worth)
                         sum_c x_jc           <=  T        for each job
                         sum_jc size_jc x_jc  <=  N_k T    for each type k         (dual p_k: what an accelerator is)

knows the longest job and the load of all of them; T bounds the end of the last job from below. A gang that needs more than
half of a type excludes others there, whatever the load:

         x_jk + sum_(gangs) x_ik     <=  T        for each job that has no room beside any of them, and for the gangs alone

An hour on a candidate is worth `v_j speed_jc`: what its accelerators cost where the program puts the job, and less
elsewhere. What the rows of single jobs add to T is decided by the longest jobs, the rest of T by the load.

The program is solved anew for each plan, with the work that is left. Of solutions that are equally good it takes one
in which jobs take little time. Jobs of unknown length, and those that fit nowhere, are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import highs
from ..model.snapshot import JobId

SOON = 3e-4
"""What it adds to T, per job, if a job runs for the whole of T: of what the load leaves open, each takes what is fast. Else a
job that is put on a slow type for no reason looks like one that must never wait."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one job needs: its work; type, accelerators and speed (work per second) of each candidate."""

    job: JobId
    work: float
    types: Sequence[str]
    sizes: Sequence[float]
    speeds: Sequence[float]
    present: int | None
    """The candidate that it runs on."""


@dataclass(frozen=True, slots=True)
class Part:
    """A job's part of the solution."""

    value: float
    """Of an hour at its best speed, if an accelerator-hour is worth 1 on average."""
    shares: tuple[float, ...]
    """The part of its time that it spends on each candidate."""
    time: float
    """Its time on these candidates over T: 1 = it must never wait."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The parts of all jobs, and what decides T."""

    parts: Mapping[JobId, Part]
    load: float
    """The part of T that the load decides: 0 = the longest jobs alone, 1 = the load alone."""
    ends_s: float = 0.0
    """T, in seconds."""


def solve(jobs: Iterable[Asked], capacity: Mapping[str, float]) -> Solution:
    """Solve the program.

    Args:
        capacity: accelerators of each type.

    Raises:
        SolverError: `highspy` is not installed, or it failed.
    """
    asked = [one for one in jobs if one.work > 0 and _could_run(one, capacity)]
    if not asked:
        return Solution({}, 0.0)
    unit_s = max(one.work / max(one.speeds) for one in asked)  # all times are parts of the longest job's
    program = highs.Program()
    most = program.variable(1.0, 0.0, 1e9)
    on_type: dict[str, list[tuple[int, float]]] = {kind: [] for kind in capacity}
    columns: list[list[int]] = []
    works: list[int] = []
    alone: list[int] = []
    for one in asked:
        own = []
        for kind, size in zip(one.types, one.sizes, strict=True):
            able = size <= capacity.get(kind, 0.0)
            own.append(program.variable(SOON / len(asked), 0.0, 1e9 if able else 0.0))
            if able:
                on_type[kind].append((own[-1], size))
        done = [(x, speed * unit_s / one.work) for x, speed in zip(own, one.speeds, strict=True)]
        works.append(program.row(done, low=1.0))
        alone.append(program.row([*((x, 1.0) for x in own), (most, -1.0)], high=0.0))
        columns.append(own)
    for kind in on_type:
        _one_at_a_time(program, asked, columns, kind, capacity[kind], most)
        program.row([*on_type[kind], (most, -capacity[kind])], high=0.0)
    found = highs.solve(program)
    if found is None or found.x[most] <= 0:
        return Solution({}, 0.0)
    scale = sum(capacity.values()) * unit_s
    parts = {
        one.job: _part(
            [max(0.0, found.x[x]) / found.x[most] for x in own],
            max(0.0, found.duals[row]) * max(one.speeds) * scale / one.work,
            one,
        )
        for one, own, row in zip(asked, columns, works, strict=True)
    }
    load = 1.0 - sum(abs(found.duals[row]) for row in alone)
    return Solution(parts, min(1.0, max(0.0, load)), found.x[most] * unit_s)


def _could_run(one: Asked, capacity: Mapping[str, float]) -> bool:
    rows = zip(one.types, one.sizes, one.speeds, strict=True)
    return any(speed > 0 and size <= capacity.get(kind, 0.0) for kind, size, speed in rows)


def _one_at_a_time(
    program: highs.Program,
    jobs: Sequence[Asked],
    columns: Sequence[Sequence[int]],
    kind: str,
    capacity: float,
    most: int,
) -> None:
    """Of jobs that need more than half of a type one runs at a time, and beside it none that needs more than it leaves."""
    own = [
        (x, size)
        for one, row in zip(jobs, columns, strict=True)
        for x, size, where in zip(row, one.sizes, one.types, strict=True)
        if where == kind and size <= capacity
    ]
    large = [(x, size) for x, size in own if 2 * size > capacity]
    if not large:
        return
    together = program.variable(0.0, 0.0, 1e9)
    program.row([*((x, 1.0) for x, _ in large), (together, -1.0)], high=0.0)
    program.row([(together, 1.0), (most, -1.0)], high=0.0)
    least = min(size for _, size in large)
    for x, size in own:
        if 2 * size <= capacity < size + least:
            program.row([(x, 1.0), (together, 1.0), (most, -1.0)], high=0.0)


def _part(times: list[float], value: float, one: Asked) -> Part:
    spent = sum(times)
    shares = [own / spent if spent > 0 else 0.0 for own in times]
    if one.present is not None:  # of candidates that are equally fast, a running job stays on its own
        same = one.speeds[one.present]
        shares[one.present] = max(
            share for share, speed in zip(shares, one.speeds, strict=True) if speed == same
        )
    return Part(value, tuple(shares), min(1.0, spent))
