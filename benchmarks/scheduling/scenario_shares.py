"""Scenarios of shares: work between running tenants and users, swaps, rotation in time, and makespan."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.scheduling.replay import Outcome, Situation
from benchmarks.scheduling.scenario_parts import (
    TWO,
    H,
    Scenario,
    Value,
    at_least,
    at_most,
    cluster,
    exactly,
    job,
    moves,
    on,
)

from busbar.scheduler import Objective, Policy

RATIO_10 = {"train": {"A100": 10.0, "L4": 1.0}}


def shares_of_two_types() -> Iterator[Scenario]:
    promise = "shares in work between running tenants"
    types = cluster({"A100": 1, "L4": 1}, *TWO, speeds=RATIO_10)
    first = tuple(job(f"a{i}", 100, on=("A100", [0])) for i in range(8))
    why = (
        "The cluster does 8 x 10 + 8 x 1 = 88; half is 44, which four A100 and four L4 each give. 95 % of it."
    )
    second = tuple(job(f"b{i}", 100, tenant="b", on=("L4", [0])) for i in range(8))
    yield Scenario(
        "two tenants, speeds 10:1, one runs on all A100 and the other on all L4",
        promise, why, at_least(0.95 * 44), "work/s in hour 6",
        Situation(types, (*first, *second), 6), lambda o: o.work("b", 5, 6),
    )  # fmt: skip
    more = tuple(job(f"{tenant}{i}", 100, tenant=tenant, at=0.0) for tenant in "ab" for i in range(8, 16))
    yield Scenario(
        "the same with eight more jobs of each tenant waiting",
        promise, why, at_least(0.95 * 44), "work/s in hour 6",
        Situation(types, (*first, *second, *more), 6), lambda o: o.work("b", 5, 6),
    )  # fmt: skip


def shares_of_one_type() -> Iterator[Scenario]:
    promise = "shares in work between running tenants"
    yield Scenario(
        "two tenants, one type, one came first and holds all of it",
        promise, "Half of eight accelerators is four. 95 % of it.", at_least(0.95 * 4), "work/s in hour 2",
        Situation(
            cluster({"H100": 1}, *TWO),
            (
                *(job(f"a{i}", 100, on=("H100", [0])) for i in range(8)),
                *(job(f"b{i}", 100, tenant="b") for i in range(8)),
            ),
            2,
        ),
        lambda o: o.work("b", 1, 2), neighbour=True,
    )  # fmt: skip
    yield Scenario(
        "two users of one tenant, one came first and holds all of it",
        promise, "Half of eight accelerators is four. 95 % of it.", at_least(0.95 * 4), "work/s in hour 2",
        Situation(
            cluster({"H100": 1}),
            (
                *(job(f"p{i}", 100, user="p", on=("H100", [0])) for i in range(8)),
                *(job(f"q{i}", 100, user="q") for i in range(8)),
            ),
            2,
        ),
        lambda o: float(sum(o.pods(f"q{i}") for i in range(8))), neighbour=True,
    )  # fmt: skip


def swaps() -> Iterator[Scenario]:
    for rival, pays in ((1.0, True), (9.5, False)):
        speeds = {"j1": {"A": 10.0, "B": 9.0}, "j2": {"A": 10.0, "B": rival}, "train": {"A": 1.0, "B": 1.0}}
        for tenants, whose in (("ab", "two tenants"), ("aa", "one tenant")):
            yield Scenario(
                f"{whose}, one job each: j1 10/9, j2 10/{rival:g}, j2 on the slow type",
                "a swap that pays" if pays else "no swap that does not pay",
                "Swapped, j1 loses a tenth and j2 becomes ten times as fast: 19 instead of 11 work/s."
                if pays
                else "Swapped, j1 would lose a tenth and j2 gain a twentieth: both stay.",
                exactly("A" if pays else "B"), "type of j2",
                Situation(
                    cluster({"A": 1, "B": 1}, *TWO, size=1, speeds=speeds),
                    (
                        job("j1", 50, workload="j1", tenant=tenants[0], on=("A", [0])),
                        job("j2", 50, workload="j2", tenant=tenants[1], on=("B", [0])),
                    ),
                    2,
                ),
                on("j2"), neighbour=not pays or tenants == "aa",
            )  # fmt: skip


def rotation() -> Iterator[Scenario]:
    yield Scenario(
        "two tenants, each with one gang that fills everything",
        "rotation in time",
        "Each holds everything half of the time; one tenth of that is granted for restarts and the first turn.",
        at_least(0.9 * 8**0.9 / 2), "work/s in hours 1-9",
        Situation(
            cluster({"H100": 1}, *TWO),
            (job("g1", 100, gpus=8, on=("H100", [0])), job("g2", 100, gpus=8, tenant="b")),
            9,
        ),
        lambda o: o.work("b", 1, 9),
    )  # fmt: skip
    gangs = tuple(job(f"g{i}", 1, gpus=8, pods=2, at=60.0 + i) for i in range(6))
    small = tuple(job(f"s{i:03d}", 0.1, gpus=4, tenant="b") for i in range(400))
    for known in (True, False):
        yield Scenario(
            "a tenant's gangs of an hour fill everything, one after the other, beside another's jobs of six minutes"
            + ("" if known else ", lengths unknown"),
            "rotation in time",
            "Each has everything half of the time, as after each gang the other tenant has its hour; one tenth of that is "
            "granted for collecting the nodes. The lesser of the two, as a part of its half.",
            at_least(0.9), "of its half in hours 1-9",
            Situation(cluster({"H100": 2}, *TWO), (*gangs, *small), 9, lengths_known=known),
            lambda o: min(o.work("a", 1, 9) / 16**0.9, o.work("b", 1, 9) / (4 * 4**0.9)) * 2,
        )  # fmt: skip


def makespan() -> Iterator[Scenario]:
    promise = "makespan"
    policy = Policy(objective=Objective.MAKESPAN)
    speeds = {"slow": {"A": 10.0, "B": 1.0}, "both": {"A": 10.0, "B": 5.0}, "train": {"A": 1.0, "B": 1.0}}
    types = cluster({"A": 1, "B": 1}, size=1, speeds=speeds)
    listed = tuple(job(f"{name}{i}", 1, workload=name) for name in ("slow", "both") for i in range(10))

    def last_h(outcome: Outcome) -> Value:
        return (
            max(outcome.end_s.values(), default=0.0) / H
            if not outcome.placements
            else outcome.situation.hours
        )

    why = (
        "All that is slow on B goes to A (10 h); of the others x run on B: 10 + (10 - x) = 2 x, so both end at 13.33 h. "
        "2 % for restarts."
    )
    watched = Situation(types, listed, 24, policy=policy)
    yield Scenario(
        "10 jobs 10/1 and 10 jobs 10/5 on one A and one B: end of the last",
        promise, why, at_most(1.02 * 40 / 3), "h",
        watched, last_h,
    )  # fmt: skip
    yield Scenario(
        "the same: moves",
        promise, "One job changes its type to even out the ends; at most one move per job is granted.",
        at_most(20), "moves",
        watched, moves,
    )  # fmt: skip
    yield Scenario(
        "20 equal jobs of one hour on two equal accelerators",
        promise, "Ten after each other on each: 10 h. 2 % for restarts.", at_most(10.2), "h",
        Situation(
            cluster({"H100": 1}, size=2), tuple(job(f"j{i}", 1) for i in range(20)), 12, policy=policy
        ),
        last_h,
    )  # fmt: skip
    yield Scenario(
        "one job of three hours and three of one hour on two equal accelerators",
        promise, "The long one alone, the others after each other beside it: 3 h. 2 % for restarts.", at_most(3.06), "h",
        Situation(
            cluster({"H100": 1}, size=2),
            (*(job(f"j{i}", 1) for i in range(3)), job("long", 3)),
            12,
            policy=policy,
        ),
        last_h, neighbour=True,
    )  # fmt: skip
