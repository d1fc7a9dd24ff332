"""Forecasts are computed in a process of their own: seconds of pure computing that may not hold up a round,
the lease or a watch, and that must be stoppable.

    operator ── pickled Question on stdin ──► python -m busbar.operator.foretell ── one JSON line per job ──► operator

The child is the same program, runs at low priority, and ends by itself when its computing time is used up, or is
killed with what it had found so far. It reads no clock but its own computing time; the answer to a question that
is answered in full depends on the question alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import resource
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from busbar.operator.errors import ForetellFailed
from busbar.scheduler import Finished, History, Job, JobId, Outcome, Policy, Snapshot, TableView, what_if

NICE = 10


@dataclass(frozen=True)
class Question:
    """When would these jobs of the snapshot start?"""

    snapshot: Snapshot
    policy: Policy
    now: float
    jobs: tuple[JobId, ...]
    ended: tuple[Finished, ...]
    outcomes: tuple[tuple[str, Outcome], ...]
    computing_s: float
    """No further job is begun after so much computing, and one that takes as long again is given up."""


@dataclass(frozen=True)
class Answer:
    """Seconds from now. Without `start_s`: it would start now, or never as things are."""

    job: str
    start_s: tuple[float, float] | None = None
    """p50 and p90."""
    raw_s: tuple[float, float] | None = None
    """As simulated, before correction."""
    end_s: tuple[float, float] | None = None
    """Where the work left and the speed are known."""


def answers(question: Question) -> Iterator[Answer]:
    """One answer after the other, in the order of the question."""
    history = History(question.ended)
    for key, outcome in question.outcomes:
        history.promised(key, outcome)
    jobs = {job.id: job for job in question.snapshot.jobs}
    policy = question.policy
    for job_id in question.jobs:
        job = jobs.get(job_id)
        if job is None:
            continue
        # Always the same seed for a job: a forecast moves because the queue has moved, not by chance.
        seed = zlib.crc32(job_id.encode())
        found = what_if(question.snapshot, policy, job, question.now, history, seed)
        if found.p50_s is None or found.p90_s is None:
            yield Answer(job_id)
            continue
        left = left_s(question.snapshot, job)
        end = (found.p50_s + left[0], found.p90_s + left[1]) if left is not None else None
        yield Answer(job_id, (found.p50_s, found.p90_s), found.raw, end)


def left_s(snapshot: Snapshot, job: Job) -> tuple[float, float] | None:
    """How long it would run once started: at its fastest type's mean speed, and at the low end there.

    None where the work left is not known or no type's speed is. A job that gets a slower type takes longer.
    """
    if not job.remaining_work or not job.workload_class:
        return None
    table = TableView(snapshot.table)
    size_m = job.min_pods * job.per_pod.accelerators_m
    speeds = []
    for pool in snapshot.pools:
        if (job.accelerators and pool.accelerator not in job.accelerators) or (
            pool.tenants is not None and job.tenant not in pool.tenants
        ):
            continue
        for mode in job.modes:
            found = table.estimate(job.workload_class, pool.accelerator, mode, size_m, job.tenant)
            if found is not None and found.speed > 0 and found.low > 0:
                speeds.append((found.speed, found.low))
    if not speeds:
        return None
    speed, low = max(speeds)
    return job.remaining_work / speed, job.remaining_work / low


async def foretell(question: Question, limit_s: float) -> list[Answer]:
    """The answers that the child found within the time; those it did not get to are missing.

    Raises:
        ForetellFailed: the child ended with an error; what it said stands in our standard error.
    """
    sent = await asyncio.to_thread(pickle.dumps, question)
    found: list[Answer] = []
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "busbar.operator.foretell",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(ConnectionError):  # its end says why it does not listen
                    child.stdin.write(sent)
                    await child.stdin.drain()
                child.stdin.close()
                async for line in child.stdout:
                    found.append(_answer(line))
                # Negative: a signal, that of its own limit.
                if await child.wait() > 0:
                    raise ForetellFailed(f"the process of the forecasts ended with code {child.returncode}")
    finally:
        if child.returncode is None:
            # Not child.kill(): it would reap a child that has just ended, and lose its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        child.stdin.close()
        await child.wait()
    return found


def _answer(line: bytes) -> Answer:
    raw = json.loads(line)
    pairs = {name: tuple(raw[name]) if raw[name] else None for name in ("start_s", "raw_s", "end_s")}
    return Answer(raw["job"], **pairs)


def main() -> None:
    """The child."""
    os.nice(NICE)
    question: Question = pickle.load(sys.stdin.buffer)
    most = int(time.process_time() + 2 * question.computing_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    for answer in answers(question):
        print(json.dumps(asdict(answer)), flush=True)
        if time.process_time() > question.computing_s:
            break


if __name__ == "__main__":
    main()
