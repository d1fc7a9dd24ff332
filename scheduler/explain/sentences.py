"""A waiting record as one sentence: amounts for everybody, other tenants' names for admins only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..model.plans import Extent, WaitCode, WaitingRecord

_Unit = Callable[[int], str]
MEMORIES = frozenset({"memory", "ephemeral-storage", "device-memory"})
"""Resources that records count in MiB."""
_ANY = "*"
_WORDS = {
    "memory": "of memory",
    "ephemeral-storage": "of local disk",
    "cpu": "CPUs",
    _ANY: "accelerators of any type, in exchange-rate units",
}


def sentence(record: WaitingRecord, admin: bool = False, names: Mapping[str, str] | None = None) -> str:
    """The record as one sentence.

    Args:
        admin: whether the viewer may know other tenants' names; others read "another tenant".
        names: display names of accelerators, by key.
    """
    what = _WORDS.get(record.resource) or _or(record.resource, names or {})
    unit = _units(record.resource)
    need, free = unit(record.requested), unit(record.free)
    limit = "" if record.limit is None else unit(record.limit)
    held = unit(record.allocated)
    above = ", so it never starts unless this is raised" if record.above_limit else ""
    texts = {
        WaitCode.NO_ACCELERATOR: (
            "There is no pool that it may use."
            if record.resource == _ANY
            else f"No pool offers the accelerator it asks for ({what})."
        ),
        WaitCode.NO_POOL: (
            "No pool is open to this tenant."
            if record.resource == _ANY
            else f"No pool with {what} is open to this tenant."
        ),
        WaitCode.DOES_NOT_FIT: _memory(record),
        WaitCode.DEVICES_UNUSED: (
            f"Its pods ask for {need} accelerators each, of which its engine would use {limit}: set shape.acceleratorsPerPod to "
            f"{limit}, and ask for as many pods as it needs; or, of a training job, set engine.parallelism.processesPerPod to {need}."
        ),
        WaitCode.NODE_TOO_SMALL: _too_small(record, need, what, limit),
        WaitCode.NODES_CLOSED: (
            f"Needs {need} {what}, and the open nodes that it may use have {limit}: {_closed(record)}."
        ),
        WaitCode.UNKNOWN_TENANT: "Its namespace belongs to no tenant.",
        WaitCode.CEILING: f"Needs {need} {what}; the tenant holds {held} and its ceiling is {limit}{above}.",
        WaitCode.BORROW_LIMIT: f"Needs {need} {what}; the tenant holds {held} and may hold up to {limit}{above}.",
        WaitCode.CAPACITY: f"Needs {need} {what}, {free} of {limit} are free",
        WaitCode.FRAGMENTED: f"Needs {need} {what}; {free} are free, but not together on the nodes it needs",
        WaitCode.POWER: (
            f"Needs {need}{_limited(record)} on the power domain {record.domain}, and {free} of the {limit} that it has for jobs are "
            f"free{above}."
        ),
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
    if not text.endswith("."):
        text += _holders(record, admin, unit) + "."
    return text + _reserved(record) + _advice(record)


def _or(accelerators: str, names: Mapping[str, str]) -> str:
    """The types of a job, which are joined by commas."""
    return " or ".join(names.get(each, each) for each in accelerators.split(","))


def _limited(record: WaitingRecord) -> str:
    return f", with its boards limited to {record.power_cap:.0%}," if record.power_cap < 1 else ""


def _reserved(record: WaitingRecord) -> str:
    """When and where the job will start, if a place is being collected for it."""
    reservation = record.reservation
    if reservation is None:
        return ""
    when = time.strftime("%d %b %H:%M", time.gmtime(reservation.start_s))
    nodes = f"{reservation.collected} of {reservation.nodes} nodes collected"
    return f" It is next: starts by {when} UTC on {reservation.placement.pool}, {nodes}."


def _too_small(record: WaitingRecord, need: str, what: str, limit: str) -> str:
    if record.extent is Extent.NODE:
        who = f"In mode {record.mode} a pod" if record.mode else "A pod"
        return f"{who} needs {need} {what}, and the largest node has {limit}."
    if record.extent is Extent.DOMAIN:
        return f"Needs {need} {what} inside one topology domain, and the largest has {limit}."
    if record.extent is Extent.POOL:
        return f"Needs {need} {what} in one pool, and the largest has {limit}."
    return f"Needs {need} {what}, and the nodes that it may use have {limit}."


def _memory(record: WaitingRecord) -> str:
    fits = "" if not record.fits_m else f" It fits with {_accelerators(record.fits_m // 1000)} per pod."
    if record.limit is None:
        return "It fits no accelerator here in any engine mode it allows." + fits
    return (
        f"Needs {record.requested:,} MiB per accelerator in its smallest mode ({record.mode}), and the largest "
        f"accelerator here has {record.limit:,} MiB." + fits
    )


def _accelerators(count: int) -> str:
    return f"{count} accelerator{'' if count == 1 else 's'}"


def _closed(record: WaitingRecord) -> str:
    parts = [
        f"{closed.nodes} node{'' if closed.nodes == 1 else 's'} that could hold its pods "
        f"{'is' if closed.nodes == 1 else 'are'} {closed.why}"
        for closed in record.closed
    ]
    return ", ".join(parts)


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
        "pods": "with {needed} pod{s}",
        "accelerators": "with {needed} accelerators per pod",
        "accelerator": "on {needed}",
        "quota": "with a quota of {needed}",
        "priority": "with priority {needed}",
        "mode": "in mode {needed}",
        "cpu": "with {needed} CPUs per pod",
        "memory": "with {needed} of memory per pod",
        "watts": "with {needed} more there",
        "domain": "on the power domain {needed} without its node selector",
    }
    starts = [
        words[c.kind].format(
            needed=_AMOUNTS[c.kind](int(c.needed)) if c.kind in _AMOUNTS else c.needed,
            s="" if c.needed == "1" else "s",
        )
        for c in record.changes
    ]
    return f" It would start now {' or '.join(starts)}." if starts else ""


def _units(resource: str) -> _Unit:
    if resource == "watts":
        return watts_text
    return mib_text if resource in MEMORIES else amount_text


def mib_text(amount_mib: int) -> str:
    """MiB with its unit."""
    return f"{amount_mib:,} MiB"


def watts_text(watts: int) -> str:
    """Watts with their unit."""
    return f"{watts:,} W"


def amount_text(amount_m: int) -> str:
    """Thousandths of an accelerator as a decimal number."""
    return f"{amount_m / 1000:.3f}".rstrip("0").rstrip(".")


_AMOUNTS: dict[str, _Unit] = {"watts": watts_text, "memory": mib_text, "cpu": amount_text}
"""Of changes whose numbers have a unit, by kind."""
