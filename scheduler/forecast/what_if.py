"""What if I submitted this job now? A start now, or quantiles of when it would start.

The job is put into a copy of the snapshot and planned. If it waits, futures are simulated: how much longer
running and waiting jobs take, and what will be submitted meanwhile, is drawn from history (history.py), and a
light model of the planner (queue_model.py) says when the job starts in each. Earlier forecasts whose outcome
is known correct the result (calibrate.py). Remaining work is not read, and the same seed gives the same
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..model.alike import Together
from ..model.plans import Action, Policy, WaitingRecord
from ..model.snapshot import Job, Snapshot
from ..planner import plan
from .calibrate import corrected
from .history import Finished, History
from .queue import LONGEST_S, Queue

FUTURES = 25
"""Simulated futures: few, as past outcomes correct the quantiles."""
HORIZON_S = LONGEST_S
"""A later start counts as this: futures look as far ahead as the history looks back."""
BEYOND, DAY_S = 2.0, 86400.0
"""Nor does a future go on for longer than this many times the longest wait seen (or a day): a large gang may
find no room for weeks there, because the simulated load is an average; real load has lulls."""
SEEN = 10
"""Past forecasts needed for the limit above."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a job would start."""

    starts_now: bool
    action: Action | None = None
    """The start, if it starts now: where, in which mode, and why."""
    record: WaitingRecord | None = None
    """Why it waits, if it waits."""
    p50_s: float | None = None
    """Seconds until it starts, median; None: it starts now, or nothing that runs decides when it does
    (`WaitingRecord.foreseeable`)."""
    p90_s: float | None = None
    futures: int = 0
    raw: tuple[float, float] | None = None
    """The simulated p50 and p90 before correction, for the `Outcome` that the caller keeps (with p50_s and
    p90_s as `promised`)."""


def what_if(
    snapshot: Snapshot,
    policy: Policy,
    job: Job,
    now: float,
    history: Sequence[Finished] | History = (),
    seed: int = 0,
    futures: int = FUTURES,
) -> Forecast:
    """Plan with the job added (or replaced, if its id is known), without changing anything."""
    others = tuple(other for other in snapshot.jobs if other.id != job.id)
    with_job = replace(snapshot, jobs=(*others, job))
    # No clock: the mixed-integer step stops by nodes, so that a seed gives the same answer.
    result, _ = plan(with_job, replace(policy, solver_seconds=None), now)
    action = next((a for a in result.actions if a.job == job.id and a.to is not None), None)
    record = result.record(job.id)
    if action is not None:
        return Forecast(True, action, record)
    if record is None or not record.foreseeable:
        return Forecast(False, None, record)
    past = History.of(history)
    # What sleeps gives way to whoever waits, now and later.
    staying = tuple(other for other in with_job.jobs if not (other.yields and other.run is not None))
    queue = Queue(Together.of(replace(with_job, jobs=staying)).snapshot, policy, now, past)
    horizon_s = _horizon_s(past, now)
    waits = queue.simulate(job.id, futures, seed, horizon_s)
    raw = float(np.quantile(waits, 0.5)), float(np.quantile(waits, 0.9))
    size_m = job.min_pods * job.per_pod.accelerators_m
    p50_s, p90_s = corrected(raw, job.tenant, size_m, past, now)
    return Forecast(False, None, record, min(p50_s, horizon_s), min(p90_s, horizon_s), futures, raw)


def _horizon_s(history: History, now: float) -> float:
    """How far futures go: a job that still waits has waited at least until now."""
    seen = [
        now - o.made_at_s if o.waited_s is None else o.waited_s
        for o in history.outcomes.values()
        if o.made_at_s < now
    ]
    return min(HORIZON_S, max(DAY_S, BEYOND * max(seen))) if len(seen) >= SEEN else HORIZON_S
