"""Pools that differ only in their names and nodes are one pool to the planner, so that a gang may use nodes of several.

`Together.of` makes the snapshot to plan with: the first pool by name stands for all that are alike. A job that names
some of them keeps to these. Where no node says where it stands, its own pool is its domain: a gang stays in one pool
if one holds it. `Together.parted` gives the plan its pools back: a placement is in the pool of its first node, and
its other nodes may be of pools that are alike. Without pools that are alike nothing is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .events import Event
from .plans import Action, Plan, WaitingRecord
from .snapshot import Job, JobId, Node, Placement, Pool, Reservation, Snapshot

LABEL = "pool"
"""Node label by which a job that names some of several pools that are alike is kept to them."""


@dataclass(frozen=True, slots=True)
class Together:
    """A snapshot in which pools that are alike are one, and the names of before."""

    snapshot: Snapshot
    _name: Mapping[str, str]
    """The pool that stands for a pool."""
    _pool_of: Mapping[str, str]
    """The pool of each node."""
    _before: Mapping[JobId, Placement]
    """Where jobs run, as the snapshot said."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Together:
        """Bring the pools of a snapshot together."""
        name = standing_for(snapshot.pools)
        if all(own == other for own, other in name.items()):
            return cls(snapshot, {}, {}, {})
        chosen = {job.pools for job in snapshot.jobs if len(job.pools) > 0}
        labels = {pools: _label(pools, name) for pools in chosen}
        grouped = {own for own in name if sum(other == name[own] for other in name.values()) > 1}
        flat = not any(any(node.topology) for node in snapshot.nodes if node.pool in grouped)
        by_domain = flat and not any(job.required_domain for job in snapshot.jobs)

        def node(one: Node) -> Node:
            if one.pool not in grouped:
                return one
            own = tuple(label for pools, label in sorted(labels.items()) if label and one.pool in pools)
            domain = (one.pool,) if by_domain else one.topology
            return replace(one, pool=name[one.pool], labels=one.labels + own, topology=domain)

        def job(one: Job) -> Job:
            run = one.run
            if run is not None and name.get(run.placement.pool, run.placement.pool) != run.placement.pool:
                run = replace(run, placement=replace(run.placement, pool=name[run.placement.pool]))
            if run is one.run and not one.pools:
                return one
            label = labels.get(one.pools)
            selector = one.node_selector if label is None else (*one.node_selector, label)
            pools = tuple(dict.fromkeys(name.get(pool, pool) for pool in one.pools))
            return replace(one, run=run, pools=pools, node_selector=selector)

        found = replace(
            snapshot,
            pools=tuple(pool for pool in snapshot.pools if name[pool.name] == pool.name),
            nodes=tuple(map(node, snapshot.nodes)),
            jobs=tuple(map(job, snapshot.jobs)),
            reservations=tuple(_reserved(one, name) for one in snapshot.reservations),
        )
        runs = {one.id: one.run.placement for one in snapshot.jobs if one.run is not None}
        return cls(found, name, {one.name: one.pool for one in snapshot.nodes}, runs)

    def event(self, event: Event) -> Event:
        """An event with the names of this snapshot."""
        if not self._name:
            return event
        named = tuple(replace(one, pool=self._name.get(one.pool, one.pool)) for one in event.happened)
        return replace(event, happened=named)

    def joined(self, plan: Plan) -> Plan:
        """An earlier plan with the names of this snapshot: its reservations, and where jobs go that others have to leave;
        of its other actions only the jobs are read."""
        if not self._name:
            return plan
        return replace(
            plan,
            actions=tuple(_delayed(one, self._name) for one in plan.actions),
            reservations=tuple(_reserved(one, self._name) for one in plan.reservations),
        )

    def parted(self, plan: Plan) -> Plan:
        """The plan with the names of before."""
        if not self._name:
            return plan
        waiting = plan.waiting
        if any(record.reservation is not None for record in waiting):
            waiting = tuple(map(self._record, waiting))
        return replace(
            plan,
            actions=tuple(map(self._action, plan.actions)),
            waiting=waiting,
            reservations=tuple(
                replace(one, placement=self._placed(one.placement)) for one in plan.reservations
            ),
        )

    def _action(self, action: Action) -> Action:
        to = None if action.to is None else self._placed(action.to)
        assumed = None if action.assumed is None else self._before.get(action.job, action.assumed)
        return replace(action, to=to, assumed=assumed)

    def _record(self, record: WaitingRecord) -> WaitingRecord:
        kept = record.reservation
        if kept is None:
            return record
        return replace(record, reservation=replace(kept, placement=self._placed(kept.placement)))

    def _placed(self, placement: Placement) -> Placement:
        return replace(placement, pool=self._pool_of.get(placement.nodes[0], placement.pool))


def standing_for(pools: Iterable[Pool]) -> dict[str, str]:
    """By pool: the first pool by name that is like it, often itself."""
    alike: dict[Pool, list[str]] = defaultdict(list)
    for pool in pools:
        alike[replace(pool, name="")].append(pool.name)
    return {name: min(names) for names in alike.values() for name in names}


def _label(pools: tuple[str, ...], name: Mapping[str, str]) -> tuple[str, str] | None:
    """The label of nodes in these pools; None: they are all of those that are alike."""
    stand = {name.get(pool, pool) for pool in pools}
    if all(own in pools for own, other in name.items() if other in stand):
        return None
    return LABEL, " or ".join(sorted(pools))


def _reserved(one: Reservation, name: Mapping[str, str]) -> Reservation:
    return replace(one, placement=_renamed(one.placement, name))


def _delayed(one: Action, name: Mapping[str, str]) -> Action:
    return replace(one, to=_renamed(one.to, name)) if one.to is not None and one.after else one


def _renamed(place: Placement, name: Mapping[str, str]) -> Placement:
    return replace(place, pool=name.get(place.pool, place.pool))
