"""Small clusters whose entitlements were worked out by hand: twenty of tenants, twelve with their users.

A case is: capacity in units per type; tenants as (name, organisation, weight, guarantee, limit, demand), the
demand a list of (types, units); and what each is entitled to. Its name gives the reason. In a case with users a
tenant's demand is that of its users, and "tenant/user" has the user's weight and demand.
"""

from __future__ import annotations

import math
from typing import Any

from busbar.scheduler.fairness.fair_share import Claim, Demand, entitlements, user_shares

INF = math.inf
Tenants = list[tuple[str, str, float, float, float, list[tuple[str, float]]]]


def t(
    name: str, wants: list[tuple[str, float]], w: float = 1, g: float = 0, limit: float = INF, org: str = ""
) -> tuple[str, str, float, float, float, list[tuple[str, float]]]:
    return (name, org, w, g, limit, wants)


A, B, AB = "A", "B", "AB"
CASES: list[tuple[str, dict[str, float], Tenants, dict[str, float]]] = [
    ("equal weights share equally", {A: 10}, [t("x", [(A, 99)]), t("y", [(A, 99)])], {"x": 5, "y": 5}),
    ("weights 3:1", {A: 12}, [t("x", [(A, 99)], 3), t("y", [(A, 99)])], {"x": 9, "y": 3}),
    ("who wants less leaves the rest", {A: 12}, [t("x", [(A, 2)]), t("y", [(A, 99)])], {"x": 2, "y": 10}),
    (
        "what one leaves is shared again",
        {A: 12},
        [t("x", [(A, 2)]), t("y", [(A, 99)]), t("z", [(A, 99)])],
        {"x": 2, "y": 5, "z": 5},
    ),
    ("no demand, no entitlement", {A: 8}, [t("x", []), t("y", [(A, 99)])], {"x": 0, "y": 8}),
    (
        "a guarantee above the share holds",
        {A: 10},
        [t("x", [(A, 99)], g=8), t("y", [(A, 99)])],
        {"x": 8, "y": 2},
    ),
    ("an unused guarantee is lent", {A: 10}, [t("x", [(A, 3)], g=8), t("y", [(A, 99)])], {"x": 3, "y": 7}),
    (
        "a guarantee below the share adds nothing",
        {A: 10},
        [t("x", [(A, 99)], g=2), t("y", [(A, 99)])],
        {"x": 5, "y": 5},
    ),
    (
        "a ceiling gives the rest away",
        {A: 12},
        [t("x", [(A, 99)], limit=3), t("y", [(A, 99)])],
        {"x": 3, "y": 9},
    ),
    (
        "a ceiling below the guarantee wins",
        {A: 12},
        [t("x", [(A, 99)], g=6, limit=4), t("y", [(A, 99)])],
        {"x": 4, "y": 8},
    ),
    (
        "who can go elsewhere does",
        {A: 10, B: 10},
        [t("x", [(AB, 99)]), t("y", [(A, 99)])],
        {"x": 10, "y": 10},
    ),
    ("elsewhere is too small", {A: 12, B: 4}, [t("x", [(AB, 99)]), t("y", [(A, 99)])], {"x": 8, "y": 8}),
    ("elsewhere is larger", {A: 6, B: 10}, [t("x", [(AB, 99)]), t("y", [(A, 99)])], {"x": 10, "y": 6}),
    (
        "two bound to different types",
        {A: 4, B: 9},
        [t("x", [(A, 99)]), t("y", [(B, 99)]), t("z", [(AB, 99)])],
        {"x": 4, "y": 4.5, "z": 4.5},
    ),
    (
        "organisations first",
        {A: 12},
        [t("x", [(A, 99)], org="o"), t("y", [(A, 99)], org="o"), t("z", [(A, 99)], 2)],
        {"x": 3, "y": 3, "z": 6},
    ),
    (
        "what a member leaves stays in its organisation",
        {A: 12},
        [t("x", [(A, 1)], org="o"), t("y", [(A, 99)], org="o"), t("z", [(A, 99)], 2)],
        {"x": 1, "y": 5, "z": 6},
    ),
    (
        "an organisation that wants little leaves to others",
        {A: 12},
        [t("x", [(A, 1)], org="o"), t("y", [(A, 2)], org="o"), t("z", [(A, 99)])],
        {"x": 1, "y": 2, "z": 9},
    ),
    (
        "demands in two types add",
        {A: 4, B: 6},
        [t("x", [(A, 4), (B, 2)]), t("y", [(B, 99)])],
        {"x": 5, "y": 5},
    ),
    ("enough for all", {A: 20}, [t("x", [(A, 4)]), t("y", [(A, 6)])], {"x": 4, "y": 6}),
    (
        "guarantees first, then weights",
        {A: 20},
        [t("x", [(A, 99)], 1, 8), t("y", [(A, 99)], 2), t("z", [(A, 99)], 1)],
        {"x": 8, "y": 8, "z": 4},
    ),
]


Users = dict[str, tuple[float, list[tuple[str, float]]]]
MUCH = [(A, 99.0)]
USER_CASES: list[tuple[str, dict[str, float], Tenants, Users, dict[str, float]]] = [
    (
        "users of one tenant share equally",
        {A: 10},
        [t("x", [])],
        {"x/p": (1, MUCH), "x/q": (1, MUCH)},
        {"x": 10, "x/p": 5, "x/q": 5},
    ),
    (
        "who asks for two hundred leaves a colleague its one",
        {A: 10},
        [t("x", [])],
        {"x/p": (1, [(A, 200)]), "x/q": (1, [(A, 1)])},
        {"x": 10, "x/p": 9, "x/q": 1},
    ),
    (
        "users with weights 3:1",
        {A: 12},
        [t("x", [])],
        {"x/p": (3, MUCH), "x/q": (1, MUCH)},
        {"x": 12, "x/p": 9, "x/q": 3},
    ),
    (
        "users share their tenant's part",
        {A: 12},
        [t("x", []), t("y", [])],
        {"x/p": (1, MUCH), "x/q": (1, MUCH), "y/r": (1, MUCH)},
        {"x": 6, "y": 6, "x/p": 3, "x/q": 3, "y/r": 6},
    ),
    (
        "more or heavier users give a tenant nothing",
        {A: 12},
        [t("x", []), t("y", [])],
        {"x/p": (4, MUCH), "x/q": (1, MUCH), "x/r": (1, MUCH), "y/s": (1, MUCH)},
        {"x": 6, "y": 6, "x/p": 4, "x/q": 1, "x/r": 1, "y/s": 6},
    ),
    (
        "what a user leaves stays in its tenant",
        {A: 12},
        [t("x", []), t("y", [])],
        {"x/p": (1, [(A, 1)]), "x/q": (1, MUCH), "y/r": (1, MUCH)},
        {"x": 6, "y": 6, "x/p": 1, "x/q": 5, "y/r": 6},
    ),
    (
        "a tenant's ceiling is its users' together",
        {A: 12},
        [t("x", [], limit=4), t("y", [])],
        {"x/p": (1, MUCH), "x/q": (1, MUCH), "y/r": (1, MUCH)},
        {"x": 4, "y": 8, "x/p": 2, "x/q": 2, "y/r": 8},
    ),
    (
        "so is its guarantee",
        {A: 10},
        [t("x", [], g=8), t("y", [])],
        {"x/p": (1, MUCH), "x/q": (1, [(A, 3)]), "y/r": (1, MUCH)},
        {"x": 8, "y": 2, "x/p": 5, "x/q": 3, "y/r": 2},
    ),
    (
        "a user that can go elsewhere does",
        {A: 4, B: 8},
        [t("x", [])],
        {"x/p": (1, MUCH), "x/q": (1, [(AB, 99)])},
        {"x": 12, "x/p": 4, "x/q": 8},
    ),
    (
        "users bound to different types",
        {A: 2, B: 10},
        [t("x", [])],
        {"x/p": (1, MUCH), "x/q": (1, [(B, 99)]), "x/r": (1, [(AB, 99)])},
        {"x": 12, "x/p": 2, "x/q": 5, "x/r": 5},
    ),
    (
        "no user has what another tenant is entitled to",
        {A: 6, B: 6},
        [t("x", []), t("y", [])],
        {"x/p": (1, MUCH), "x/q": (1, [(AB, 99)]), "y/r": (1, MUCH)},
        {"x": 6, "y": 6, "x/p": 0, "x/q": 6, "y/r": 6},
    ),
    (
        "organisation, tenant, user",
        {A: 12},
        [t("x", [], org="o"), t("y", [], org="o"), t("z", [], 2)],
        {"x/p": (1, MUCH), "x/q": (1, MUCH), "y/r": (1, MUCH), "z/s": (1, MUCH)},
        {"x": 3, "y": 3, "z": 6, "x/p": 1.5, "x/q": 1.5, "y/r": 3, "z/s": 6},
    ),
]


def rows() -> list[dict[str, Any]]:
    """The found and the expected entitlements."""
    tenants = [_row(name, capacity, claims, {}, expected) for name, capacity, claims, expected in CASES]
    return tenants + [_row(*case) for case in USER_CASES]


def _row(
    name: str, capacity: dict[str, float], tenants: Tenants, users: Users, expected: dict[str, float]
) -> dict[str, Any]:
    own: dict[str, dict[str, tuple[float, Demand]]] = {tenant: {} for tenant, *_ in tenants}
    for key, (weight, wants) in users.items():
        tenant, _, user = key.partition("/")
        own[tenant][user] = weight, _demand(wants)
    claims = [
        Claim(
            who,
            org,
            w,
            g,
            limit,
            _demand(wants) + tuple(row for _, rows in own[who].values() for row in rows),
        )
        for who, org, w, g, limit, wants in tenants
    ]
    found = entitlements(claims, capacity)
    inside = {who: user_shares(claims, found, who, own[who], capacity) for who in own if own[who]}
    found |= {f"{who}/{user}": units for who, shares in inside.items() for user, units in shares.items()}
    exact = found.keys() == expected.keys() and all(
        abs(found[who] - amount) < 1e-6 for who, amount in expected.items()
    )
    return {"case": name, "expected": expected, "found": found, "met": exact}


def _demand(wants: list[tuple[str, float]]) -> Demand:
    return tuple((frozenset(kinds), amount) for kinds, amount in wants)
