"""Scenarios of placement: elastic sizes, defragmentation by one move, and gangs over pools of one type."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.scheduling.replay import ROUND_S, Outcome, Situation
from benchmarks.scheduling.scenario_parts import (
    TWO,
    Scenario,
    Value,
    at_most,
    cluster,
    exactly,
    job,
    pods,
    wait_s,
)

from busbar.scheduler import Cell, Node, PerformanceTable, Pool, Rate, Resources, Snapshot, Tenant


def elastic() -> Iterator[Scenario]:
    promise = "elastic sizes"
    one = cluster({"H100": 1})
    full = job("elastic", 50, pods=2, most=8, on=("H100", [0] * 8))
    small = job("small", 4, at=600.0)
    pressed = Situation(one, (full, small), 1)

    def idle(outcome: Outcome) -> Value:
        return 8 - sum(0 if place is None else place.pods for place in outcome.placements.values())

    yield Scenario(
        "elastic 2..8 on all 8, then a 1-GPU job of its tenant: idle half an hour later",
        promise,
        "The elastic job gives back one accelerator, or four where it knows no size between 4 and 8: at most three are "
        "idle.",
        at_most(3), "idle GPUs",
        pressed, idle,
    )  # fmt: skip
    yield Scenario(
        "the same: it gives back exactly what is needed",
        promise, "Seven and one are eight.", exactly(7), "pods",
        pressed, pods("elastic"),
    )  # fmt: skip
    yield Scenario(
        "an elastic 2..8 job waits and 6 of 8 are free",
        promise, "It can use six.", exactly(6), "pods",
        Situation(one, (job("other", 50, gpus=2, on=("H100", [0])), job("elastic", 50, pods=2, most=8)), 1),
        pods("elastic"),
    )  # fmt: skip
    yield Scenario(
        "elastic 2..8 on 4, a 1-GPU job beside it, length known",
        promise, "Seven are there for it; it pays within minutes of its 50 hours.", exactly(7), "pods",
        Situation(
            one,
            (job("elastic", 50, pods=2, most=8, on=("H100", [0] * 4)), job("other", 50, on=("H100", [0]))),
            2,
        ),
        pods("elastic"),
    )  # fmt: skip
    for known in (False, True):
        yield Scenario(
            f"elastic 2..8 alone on 4 of 8, length {'known' if known else 'unknown'}",
            promise,
            "Nobody else wants the other four: it grows to all eight once it has run min_run_s.",
            exactly(8), "pods",
            Situation(
                one, (job("elastic", 50, pods=2, most=8, on=("H100", [0] * 4), since=-600.0),), 2, known
            ),
            pods("elastic"), neighbour=known,
        )  # fmt: skip


def defragmentation() -> Iterator[Scenario]:
    promise = "defragmentation by one move"
    spread = tuple(job(f"j{i}", 10, on=("H100", [i])) for i in range(8))
    why = (
        "56 of 64 GPUs are free and no node is. Moving one small job to another node costs it 30 s and starts the "
        "large one at the next plan."
    )
    for whose, known, neighbour in (("a", True, True), ("a", False, False), ("b", True, False)):
        tenant = "its tenant" if whose == "a" else "another tenant"
        yield Scenario(
            f"8 nodes with one 1-GPU job of {tenant} each, an 8-GPU job, lengths {'known' if known else 'unknown'}",
            promise, why, at_most(2 * ROUND_S), "s waited",
            Situation(
                cluster({"H100": 8}, *TWO), (*spread, job("large", 2, gpus=8, tenant=whose, at=60.0)), 4, known
            ),
            wait_s("large"), neighbour=neighbour,
        )  # fmt: skip
    yield Scenario(
        "two racks with one whole node free each, a gang of two nodes inside one rack",
        promise,
        "Moving the one-GPU job off the rack's other node to the other rack makes both nodes of that rack free.",
        at_most(2 * ROUND_S), "s waited",
        Situation(
            cluster({"H100": 4}, racks=2),
            (
                job("j0", 10, on=("H100", [0])),
                job("j2", 10, on=("H100", [2])),
                job("gang", 2, gpus=8, pods=2, domain=1, at=60.0),
            ),
            4,
        ),
        wait_s("gang"),
    )  # fmt: skip


def pools() -> Iterator[Scenario]:
    promise = "a gang over pools of one type"
    table = PerformanceTable((Cell("train", "H100", 1000, speed=1.0),), (Rate("H100"),))
    whole = Resources(8000, 64_000, 524_288)
    for names, neighbour in ((("old", "new"), False), (("old", "old"), True)):
        pools = tuple(Pool(name, "H100") for name in sorted(set(names)))
        nodes = tuple(Node(f"n{i}", name, whole) for i, name in enumerate(names))
        many = "two pools of one type with one node each" if not neighbour else "one pool with two nodes"
        yield Scenario(
            f"gang of two nodes, {many}",
            promise, "Both nodes are free and of the type it asks for.", at_most(0), "s waited",
            Situation(
                Snapshot(pools, nodes, (Tenant("a"),), (), table),
                (job("gang", 1, gpus=8, pods=2, accelerators=("H100",)),),
                0.5,
            ),
            wait_s("gang"), neighbour=neighbour,
        )  # fmt: skip
