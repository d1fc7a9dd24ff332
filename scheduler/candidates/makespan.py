"""The objective makespan: on which type each job should spend its time, and who must run now, so that the last ends soon.

A linear program over the time x that each job spends on each of its candidates,

    minimise T    with   sum_c speed_jc x_jc   =  remaining work of job j          (dual v_j: what its work is worth)
                         sum_c x_jc           <=  T        for each job
                         sum_jc size_jc x_jc  <=  N_k T    for each type k         (dual p_k: what an accelerator is)

knows the longest job and the load of all of them; T bounds the end of the last job from below. An hour on a candidate is
worth `v_j speed_jc`: what its accelerators cost where the program puts the job, and less elsewhere. `sum_k N_k p_k` is
the part of T that the load decides, the rest is decided by the longest jobs.

The program is solved anew for each plan, with the work that is left. Of solutions that are equally good it takes one
that leaves running jobs where they are. Jobs of unknown length are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import highs
from ..model.snapshot import JobId

STAYS = 1e-5
"""What it adds to T, per job, if a running job spends the whole of T on other candidates than its present one."""


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
    """Its time at its best speed over T: 1 = it must never wait."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The parts of all jobs, and what decides T."""

    parts: Mapping[JobId, Part]
    load: float
    """The part of T that the load decides: 0 = the longest jobs alone, 1 = the load alone."""


def solve(jobs: Iterable[Asked], capacity: Mapping[str, float]) -> Solution:
    """Solve the program.

    Args:
        capacity: accelerators of each type.

    Raises:
        SolverError: `highspy` is not installed, or it failed.
    """
    asked = [one for one in jobs if one.work > 0 and max(one.speeds, default=0.0) > 0]
    if not asked:
        return Solution({}, 0.0)
    unit_s = max(one.work / max(one.speeds) for one in asked)  # all times are parts of the longest job's
    program = highs.Program()
    most = program.variable(1.0, 0.0, 1e9)
    on_type: dict[str, list[tuple[int, float]]] = {kind: [] for kind in capacity}
    columns: list[list[int]] = []
    works: list[int] = []
    for one in asked:
        own = []
        for c, (kind, size) in enumerate(zip(one.types, one.sizes, strict=True)):
            leaves = one.present is not None and c != one.present
            own.append(
                program.variable(STAYS / len(asked) if leaves else 0.0, 0.0, 1e9 if kind in on_type else 0.0)
            )
            if kind in on_type:
                on_type[kind].append((own[-1], size))
        done = [(x, speed * unit_s / one.work) for x, speed in zip(own, one.speeds, strict=True)]
        works.append(program.row(done, low=1.0))
        program.row([*((x, 1.0) for x in own), (most, -1.0)], high=0.0)
        columns.append(own)
    rows = {kind: program.row([*terms, (most, -capacity[kind])], high=0.0) for kind, terms in on_type.items()}
    found = highs.solve(program)
    if found is None or found.x[most] <= 0:
        return Solution({}, 0.0)
    scale = sum(capacity.values()) * unit_s
    parts = {
        one.job: _part(
            [max(0.0, found.x[x]) for x in own],
            one.work / (max(one.speeds) * unit_s * found.x[most]),
            max(0.0, found.duals[row]) * max(one.speeds) * scale / one.work,
        )
        for one, own, row in zip(asked, columns, works, strict=True)
    }
    return Solution(
        parts, min(1.0, sum(capacity[kind] * abs(found.duals[row]) for kind, row in rows.items()))
    )


def _part(times: list[float], time: float, value: float) -> Part:
    spent = sum(times)
    return Part(value, tuple(own / spent if spent > 0 else 0.0 for own in times), time)
