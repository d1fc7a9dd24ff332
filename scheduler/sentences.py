"""A waiting record as one sentence: amounts for everybody, other tenants' names for admins only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .plans import WaitCode, WaitingRecord

_Unit = Callable[[int], str]


def sentence(record: WaitingRecord, admin: bool = False, names: Mapping[str, str] | None = None) -> str:
    """The record as one sentence.

    Args:
        admin: whether the viewer may know other tenants' names; others read "another tenant".
        names: display names of accelerators, by key.
    """
    what = (names or {}).get(record.resource, record.resource)
    unit = _units(record.resource)
    need, free = unit(record.requested), unit(record.free)
    limit = "" if record.limit is None else unit(record.limit)
    held = unit(record.allocated)
    texts = {
        WaitCode.NO_ACCELERATOR: f"No pool offers the accelerator it asks for ({what}).",
        WaitCode.NO_POOL: f"No pool with {what} is open to this tenant.",
        WaitCode.DOES_NOT_FIT: "It fits no accelerator here in any engine mode it allows.",
        WaitCode.NODE_TOO_SMALL: f"Needs {need} {what}, and the largest there is has {limit}.",
        WaitCode.UNKNOWN_TENANT: "Its namespace belongs to no tenant.",
        WaitCode.CEILING: f"Needs {need} {what}; the tenant holds {held} and its ceiling is {limit}.",
        WaitCode.BORROW_LIMIT: f"Needs {need} {what}; the tenant holds {held} and may borrow up to {limit}.",
        WaitCode.CAPACITY: f"Needs {need} {what}, {free} of {limit} are free",
        WaitCode.FRAGMENTED: f"Needs {need} {what}; {free} are free, but not together on the nodes it needs",
        WaitCode.FAIR_SHARE: (
            f"Needs {need} {what}, {free} of {limit} are free; the tenant holds {held} of a fair share of "
            f"{unit(record.entitled)}"
        ),
        WaitCode.PRIORITY: (
            f"Needs {need} {what}, {free} of {limit} are free; jobs of higher priority of this tenant go first"
        ),
        WaitCode.PREEMPTING: f"Its place on {need} {what} is being cleared.",
        WaitCode.RELEASING: "It is being stopped and saves its state.",
    }
    text = texts[record.code]
    if text.endswith("."):
        return text + _advice(record)
    return text + _holders(record, admin, unit) + "." + _advice(record)


def _holders(record: WaitingRecord, admin: bool, unit: _Unit) -> str:
    if not record.holders:
        return ""
    parts = []
    for holder in record.holders[:2]:
        own = holder.tenant == record.tenant
        who = "this tenant" if own else holder.tenant if admin else "another tenant"
        share = "'s guaranteed share" if holder.guaranteed and not own else ""
        parts.append(f"{who}{share} holds {unit(holder.amount_m)}")
    return "; " + ", ".join(parts)


def _advice(record: WaitingRecord) -> str:
    words = {
        "pods": "with {needed} pods",
        "accelerator": "on {needed}",
        "quota": "with a quota of {needed}",
        "priority": "with priority {needed}",
        "mode": "in mode {needed}",
    }
    starts = [words[c.kind].format(needed=c.needed) for c in record.changes if c.kind in words]
    return f" It would start now {' or '.join(starts)}." if starts else ""


def _units(resource: str) -> _Unit:
    if resource in ("memory", "host-memory", "ephemeral-storage"):
        return lambda amount: f"{amount} MiB of"
    return amount_text


def amount_text(amount_m: int) -> str:
    """Thousandths of an accelerator as people write them."""
    return f"{amount_m / 1000:.3f}".rstrip("0").rstrip(".")
