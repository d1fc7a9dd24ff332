"""The process that computes forecasts: they take seconds of CPU time, must not delay a round, the lease or a
watch, and must be stoppable.

    operator ── pickled Question on stdin ──► python -m busbar.operator.forecasts.worker ── one JSON line per job ──► operator

The child is the same program, runs at low priority, and ends when its computing time is used up, or is killed; the
answers it has printed by then are kept. It reads no clock but its own CPU time, so the answer to a question that
is answered in full depends only on the question.
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

from busbar.operator.errors import ForecastFailed
from busbar.scheduler import Finished, History, Job, JobId, Outcome, Policy, Snapshot, TableView, what_if

NICE = 10


@dataclass(frozen=True)
class Question:
    """Asks when these jobs of the snapshot would start."""

    snapshot: Snapshot
    policy: Policy
    now: float
    jobs: tuple[JobId, ...]
    ended: tuple[Finished, ...]
    outcomes: tuple[tuple[str, Outcome], ...]
    computing_s: float
    """CPU time after which no further job is begun; a job that is begun before may use as much again."""


@dataclass(frozen=True)
class Answer:
    """Seconds from now. Without `start_s`: the job would start now, or never as things are."""

    job: str
    start_s: tuple[float, float] | None = None
    """p50 and p90."""
    raw_s: tuple[float, float] | None = None
    """As simulated, before correction."""
    end_s: tuple[float, float] | None = None
    """Only where the work left and the speed are known."""


def answers(question: Question) -> Iterator[Answer]:
    """Yields the answers, in the order of the question."""
    history = History(question.ended)
    for key, outcome in question.outcomes:
        history.promised(key, outcome)
    jobs = {job.id: job for job in question.snapshot.jobs}
    policy = question.policy
    for job_id in question.jobs:
        job = jobs.get(job_id)
        if job is None:
            continue
        # The same seed for a job each time: its forecast changes only because the queue has changed.
        seed = zlib.crc32(job_id.encode())
        found = what_if(question.snapshot, policy, job, question.now, history, seed)
        if found.p50_s is None or found.p90_s is None:
            yield Answer(job_id)
            continue
        left = left_s(question.snapshot, job)
        end = (found.p50_s + left[0], found.p90_s + left[1]) if left is not None else None
        yield Answer(job_id, (found.p50_s, found.p90_s), found.raw, end)


def left_s(snapshot: Snapshot, job: Job) -> tuple[float, float] | None:
    """How many seconds the job would run once started: at the mean speed of its fastest type, and at the low end there.

    None where the work left or every type's speed is unknown. On a slower type the job takes longer.
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
            found = table.estimate(job.workload_class, pool.key, mode, size_m, job.tenant)
            if found is not None and found.speed > 0 and found.low > 0:
                speeds.append((found.speed, found.low))
    if not speeds:
        return None
    speed, low = max(speeds)
    return job.remaining_work / speed, job.remaining_work / low


async def compute(question: Question, limit_s: float) -> list[Answer]:
    """The answers that the child found within the limit; jobs that it did not reach are missing.

    Raises:
        ForecastFailed: the child ended with an error; its message is in this process's standard error.
    """
    sent = await asyncio.to_thread(pickle.dumps, question)
    found: list[Answer] = []
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "busbar.operator.forecasts.worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(ConnectionError):  # its exit code will say why it does not read
                    child.stdin.write(sent)
                    await child.stdin.drain()
                child.stdin.close()
                async for line in child.stdout:
                    found.append(read_answer(line))
                # Negative: ended by a signal, that of its CPU limit.
                if await child.wait() > 0:
                    raise ForecastFailed(f"the process of the forecasts ended with code {child.returncode}")
    finally:
        if child.returncode is None:
            # Not child.kill(): that would reap a child that has just ended, and lose its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        child.stdin.close()
        await child.wait()
    return found


def read_answer(line: bytes) -> Answer:
    """An answer from its JSON line."""
    raw = json.loads(line)
    pairs = {name: tuple(raw[name]) if raw[name] else None for name in ("start_s", "raw_s", "end_s")}
    return Answer(raw["job"], **pairs)


def main() -> None:
    """The entry point of the child process."""
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
