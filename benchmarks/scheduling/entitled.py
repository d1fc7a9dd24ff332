"""Twenty small clusters whose entitlements were worked out by hand.

A case is: capacity in units per type; tenants as (name, organisation, weight, guarantee, limit, demand), the
demand a list of (types, units); and what each is entitled to. The comment says why.
"""

from __future__ import annotations

import math
from typing import Any

from busbar.scheduler.entitlement import Claim, entitlements

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


def rows() -> list[dict[str, Any]]:
    out = []
    for name, capacity, tenants, expected in CASES:
        claims = [
            Claim(who, org, w, g, limit, tuple((frozenset(kinds), amount) for kinds, amount in wants))
            for who, org, w, g, limit, wants in tenants
        ]
        found = entitlements(claims, capacity)
        exact = all(abs(found[who] - amount) < 1e-6 for who, amount in expected.items())
        out.append({"case": name, "expected": expected, "found": found, "met": exact})
    return out
