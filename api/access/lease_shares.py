"""How a limit is shared among gateways. Pure.

What is free is given to who asks, up to what it wants. Where all together want more than there is, each may hold its
max-min fair share, first of what requests need and then of headroom. Who holds more is asked to give it back, and nobody
gets it before that has happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Holding:
    """One gateway's part of a limit, as the API counts it at this moment."""

    amount: int
    used: int
    needed: int
    wanted: int


@dataclass(frozen=True)
class Outcome:
    """What an asking gateway holds from now on, and who shall go down to what."""

    amount: int
    reach: int
    elsewhere: int
    target: int | None
    """To what it shall go down itself; None: it may keep what it holds."""
    targets: Mapping[str, int]
    """To what others shall go down."""


def fair_shares(capacity: int, wants: Mapping[str, int]) -> dict[str, int]:
    """Max-min fair whole parts of `capacity`: nobody gets more than it wants, nor less than another who gets more.
    What does not divide goes one each to the first by name."""
    shares = dict.fromkeys(wants, 0)
    open_, left = sorted(wants), max(0, capacity)
    while open_ and left > 0:
        each, rest = divmod(left, len(open_))
        full = [name for name in open_ if wants[name] <= each]
        if not full:
            for index, name in enumerate(open_):
                shares[name] = each + (1 if index < rest else 0)
            break
        for name in full:
            shares[name] = wants[name]
            left -= wants[name]
        open_ = [name for name in open_ if wants[name] > each]
    return shares


def decide(capacity: int, mine: Holding, name: str, others: Mapping[str, Holding]) -> Outcome:
    """The part of the gateway `name`, which holds `mine.amount` now; `capacity` is the limit less what is booked."""
    everybody = {**others, name: mine}
    ideal = fair_shares(
        capacity, {each: max(holding.needed, holding.used) for each, holding in everybody.items()}
    )
    rest = {each: max(0, holding.wanted - ideal[each]) for each, holding in everybody.items()}
    for each, more in fair_shares(capacity - sum(ideal.values()), rest).items():
        ideal[each] += more
    free = capacity - sum(holding.amount for holding in others.values()) - mine.amount
    amount = mine.amount + max(0, min(min(mine.wanted, ideal[name]) - mine.amount, free))
    targets: dict[str, int] = {}
    if amount < mine.wanted:
        targets = {other: ideal[other] for other, held in others.items() if held.amount > ideal[other]}
    return Outcome(
        amount=amount,
        reach=max(0, mine.amount + free),
        elsewhere=sum(max(0, held.amount - held.used) for held in others.values()),
        target=ideal[name] if mine.amount > ideal[name] else None,
        targets=targets,
    )
