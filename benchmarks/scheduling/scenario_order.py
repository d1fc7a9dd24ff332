"""Scenarios of the order of waiting jobs: bounded waiting, rights that collect nodes, ageing, priorities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.scheduling.replay import ROUND_S, Situation
from benchmarks.scheduling.scenario_parts import (
    MIXED_H,
    PROMPT_S,
    TWO,
    H,
    Scenario,
    at_most,
    cluster,
    exactly,
    job,
    stream,
    wait_h,
    wait_s,
)

from busbar.scheduler import JobId, JobKind, Policy, Quota, Tenant


def bounded_waiting() -> Iterator[Scenario]:
    promise = "bounded waiting"
    whole = job("gang", 1, gpus=8, pods=8, at=2 * H)
    why = (
        "The stream's jobs last one hour. If nothing is started on collected nodes from when the gang is first in "
        "line, all nodes are free after one hour; three more are granted for becoming first."
    )
    yield Scenario(
        "64-GPU gang on 64 GPUs beside a stream of its own tenant",
        promise, why, at_most(4), "h waited",
        Situation(cluster({"H100": 8}), (*stream(0.95, 64, 14), whole), 14), wait_h("gang"),
    )  # fmt: skip
    yield Scenario(
        "the same, lengths unknown",
        promise, why, at_most(4), "h waited",
        Situation(cluster({"H100": 8}), (*stream(0.95, 64, 14), whole), 14, lengths_known=False),
        wait_h("gang"),
    )  # fmt: skip
    other = replace(whole, job=replace(whole.job, tenant="b", namespace="ns-b"))
    yield Scenario(
        "64-GPU gang on 64 GPUs beside a stream of another tenant of equal weight",
        promise,
        "It is above its tenant's half, so it takes nothing by right; but its tenant has used nothing, so it is first "
        "in line at once and the room is free when the stream's jobs that run have ended, one hour later; three more "
        "are granted.",
        at_most(4), "h waited",
        Situation(cluster({"H100": 8}, *TWO), (*stream(0.95, 64, 14), other), 14), wait_h("gang"),
    )  # fmt: skip
    streams = tuple(
        replace(
            a,
            job=replace(
                a.job, id=JobId(of + a.job.name), name=of + a.job.name, tenant=of, namespace="ns-" + of
            ),
        )
        for of in "ab"
        for a in stream(0.6, 32, 8, gpus=1)
    )
    inside = job("gang", 1, gpus=8, pods=2, at=2 * H)
    yield Scenario(
        "16-GPU gang of 32 beside endless jobs of one accelerator, of its own tenant and of another",
        promise,
        "Its tenant's half could hold it, and both tenants fill theirs with small jobs. It is passed for twice its "
        "hour, then the jobs that run end within an hour; half an hour is granted.",
        at_most(3.5), "h waited",
        Situation(cluster({"H100": 4}, *TWO), (*streams, inside), 8), wait_h("gang"),
    )  # fmt: skip
    two = job("gang", 1, gpus=8, pods=2, at=2 * H)
    yield Scenario(
        "gang of two nodes of four beside a stream of its own tenant",
        promise, why, at_most(4), "h waited",
        Situation(cluster({"H100": 4}), (*stream(0.95, 32, 14), two), 14), wait_h("gang"),
    )  # fmt: skip
    yield Scenario(
        "gang of two nodes of four beside half the stream",
        promise,
        "A load of 0.5 packed on full nodes leaves two nodes free, so it starts when it comes.",
        at_most(ROUND_S), "s waited",
        Situation(cluster({"H100": 4}), (*stream(0.5, 32, 6), two), 6), wait_s("gang"), neighbour=True,
    )  # fmt: skip
    yield Scenario(
        "gang of two nodes of four beside a stream that stops",
        promise,
        "The last job of the stream comes at 4 h and ends at 5 h; the gang came at 2 h.",
        at_most(3), "h waited",
        Situation(cluster({"H100": 4}), (*stream(0.95, 32, 4), two), 8), wait_h("gang"), neighbour=True,
    )  # fmt: skip


def rights() -> Iterator[Scenario]:
    promise = "a right collects its room"
    why = (
        "Every job of the stream may be stopped for it after min_run_s (5 min). With nothing new started on nodes that "
        "are being collected, the last victim has run that long 5 min after the gang came; two rounds for the plans."
    )
    short = stream(0.95, 32, 4, gpus=1, lengths_h=MIXED_H)
    for name, nodes, many, beside in (
        ("64-GPU gang on 64 GPUs", 8, 8, stream(0.95, 64, 4)),
        ("gang of two nodes of two", 2, 2, stream(0.95, 16, 4, gpus=1)),
        ("gang of two nodes of four", 4, 2, short),
        ("one node of four", 4, 1, short),
    ):
        yield Scenario(
            f"{name}, priority 500, beside a stream of 100 of its tenant",
            promise, why, at_most(PROMPT_S), "s waited",
            Situation(
                cluster({"H100": nodes}),
                (*beside, job("gang", 1, gpus=8, pods=many, at=1.5 * H, priority=500)),
                4,
            ),
            wait_s("gang"),
        )  # fmt: skip
    calm = stream(0.95, 32, 4)
    yield Scenario(
        "gang of two nodes of four, priority 500, beside a stream of 100 that starts a job every eight minutes",
        promise,
        "Between two starts there is a time when all that runs has run min_run_s.",
        at_most(PROMPT_S), "s waited",
        Situation(
            cluster({"H100": 4}), (*calm, job("gang", 1, gpus=8, pods=2, at=1.5 * H, priority=500)), 4
        ),
        wait_s("gang"), neighbour=True,
    )  # fmt: skip
    heavy = (Tenant("a"), Tenant("b", weight=3.0))
    gang = job("gang", 1, gpus=8, pods=3, at=1.5 * H, tenant="b")
    yield Scenario(
        "tenant of weight 3, entitled to 24 of 32, gang of 24, beside the other tenant's stream",
        promise, why, at_most(PROMPT_S), "s waited",
        Situation(cluster({"H100": 4}, *heavy), (*short, gang), 4), wait_s("gang"),
    )  # fmt: skip
    owner = (Tenant("a"), Tenant("b", quotas=(Quota("H100", 24_000),)))
    deadline_s = Policy().guarantee_reclaim_s
    yield Scenario(
        "guarantee of 24 of 32, gang of 24, beside the other tenant's stream",
        promise,
        "At half its reclaim deadline a guarantee may also stop what has just started: half the deadline and two "
        "rounds (README, guarantees in time).",
        at_most(deadline_s / 2 + 2 * ROUND_S), "s waited",
        Situation(cluster({"H100": 4}, *owner), (*short, gang), 4),
        wait_s("gang"), neighbour=True,
    )  # fmt: skip


def ageing() -> Iterator[Scenario]:
    promise = "ageing"
    fresh = tuple(job(f"f{i}", 1) for i in range(8))
    why = (
        "Both fill the free node for an hour. The large job has waited four times its own duration, so it is its "
        "turn; the small ones take the node one hour later."
    )
    for waited_h, neighbour in ((4, False), (200, True)):
        yield Scenario(
            f"one free node: an 8-GPU job that has waited {waited_h} h, or eight fresh 1-GPU jobs",
            promise, why, at_most(0), "s waited",
            Situation(
                cluster({"H100": 1}),
                (*fresh, job("large", 1, gpus=8, at=-waited_h * H)),
                4,
            ),
            wait_s("large"), neighbour=neighbour,
        )  # fmt: skip
    yield Scenario(
        "an 8-GPU job on a node whose 1-GPU jobs are always replaced by fresh ones",
        promise,
        "Load 1.2 of 1-GPU jobs of one hour. After four hours it is the large job's turn, and one more hour later all "
        "that runs has ended.",
        at_most(5), "h waited",
        Situation(cluster({"H100": 1}), (*stream(1.2, 8, 12, gpus=1), job("large", 1, gpus=8, at=H)), 12),
        wait_h("large"),
    )  # fmt: skip
    yield Scenario(
        "of two equal jobs the older one first",
        promise, "One place, equal values: the order of arrival.", at_most(0), "s waited",
        Situation(
            cluster({"H100": 1}, size=1), (job("new", 1, at=-60), job("old", 1, at=-600)), 1.5
        ),
        wait_s("old"), neighbour=True,
    )  # fmt: skip


def priorities() -> Iterator[Scenario]:
    promise = "priorities are respected"
    one = cluster({"H100": 1})
    kept = job("kept", 1, gpus=4, on=("H100", [0]), since=-600.0, preemptible=False)
    high = job("high", 2, gpus=8, priority=500, at=60.0)
    for preemptible in (False, True):
        low = job("low", 10, gpus=4, at=120.0, preemptible=preemptible)
        yield Scenario(
            "four GPUs are free for an hour more, a job of priority 500 needs eight, one of 100 needs four for ten hours "
            + ("and can be stopped" if preemptible else "and cannot be stopped"),
            promise,
            "The last of the others ends after one hour; if the lower one is not started, or is stopped again, the "
            "higher one starts then.",
            at_most(H + 2 * ROUND_S), "s waited",
            Situation(one, (kept, high, low), 12), wait_s("high"), neighbour=preemptible,
        )  # fmt: skip
    place = cluster({"H100": 1}, size=1)
    for event in (True, False):
        end_h = 0.205 if event else 0.2  # between two full plans, or at one
        when = "between two full plans" if event else "at a full plan"
        yield Scenario(
            f"one place, free {when}: a job of priority 500 that is not worth its price, serving replicas of 100",
            promise,
            "All are of one tenant and each is entitled: the higher priority goes first, whatever it is worth.",
            at_most(end_h * H + 1), "s waited",
            Situation(
                place,
                (
                    job("before", end_h, priority=900, on=("H100", [0]), preemptible=False),
                    job("high", 50, priority=500, at=-60),
                    *(job(f"replica{i}", 50, kind=JobKind.SERVING, at=-60) for i in range(2)),
                ),
                1,
            ),
            wait_s("high"), neighbour=not event,
        )  # fmt: skip
    yield Scenario(
        "a lower priority does not stop a higher one",
        promise, "The node is held by priority 500, the job of 100 waits until it ends.", exactly(8), "pods",
        Situation(
            one, (*(job(f"h{i}", 9, on=("H100", [0]), priority=500) for i in range(8)), job("low", 0.2, gpus=8)), 2
        ),
        lambda o: sum(o.pods(f"h{i}") for i in range(8)), neighbour=True,
    )  # fmt: skip
