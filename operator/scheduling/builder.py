"""Keeps the scheduler's Snapshot in step with the objects, so that a round costs what has changed.

    object changed ──► put ──► stale: its claims, its facts for the table, its node
                                   └── snapshot: what is stale is made again ──► the same objects as before, but for these

A job of the snapshot is a TrainingJob, one replica of a ModelService, or one opted-in pod of another controller.
What such a job uses is counted once, through its ``run``. A pod of ours whose owner is gone is a job too, of
the tenant of its namespace, until it is deleted (pods/orphans.py). The requests of every other pod that is bound
to a node are subtracted from that node's capacity.

Each kind translates itself: training/claim.py, serving/claims.py, pods/foreign_pods.py, pods/orphans.py,
pools/capacities.py and scheduling/power_domains.py. This module only composes their results.

Of tenants whose budget is spent there is only what runs and what must. What is not preemptible (such TrainingJobs,
replicas of services, pods of other controllers) is there as far as the guarantees of other tenants allow it
(accounting/non_preemptible.py).

What time alone changes is made again by a full snapshot only: the past use of tenants, and what the table learns from
reports. Between two full ones a class or a size that is new gets its cells at once, and those of other classes stay.

Units are the scheduler's (``busbar.scheduler.model.snapshot``): thousandths of an accelerator, millicores, MiB.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import datetime
from typing import Any

from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool, PerformanceProfile, Tenant, TrainingJob
from busbar.operator.accounting import budgets
from busbar.operator.accounting.allocations import PoolRemarks
from busbar.operator.accounting.non_preemptible import NonPreemptible, guarantees
from busbar.operator.accounting.usage import HALF_LIFE_S, scheduler_tenant
from busbar.operator.pods import foreign_pods, orphans
from busbar.operator.pods.claims import Claim
from busbar.operator.pods.silent_nodes import all_silent, with_silence
from busbar.operator.pools.capacities import Capacities, Use
from busbar.operator.pools.nodes import scheduler_pool
from busbar.operator.profiles.table import Asked, JobFacts, facts_of, table_of, with_classes
from busbar.operator.queue.controller import Item
from busbar.operator.scheduling.orders import NOTHING, Ordered, with_orders
from busbar.operator.scheduling.power_domains import PowerDomains, holds_boards, is_closed
from busbar.operator.serving import claims as serving
from busbar.operator.training import claim as training
from busbar.operator.watch.caches import tenant_of_namespace
from busbar.operator.watch.projections import Pod
from busbar.scheduler import Job, JobId, Node, PerformanceTable, Pool, PowerDomain, Reservation, Snapshot
from busbar.scheduler import Tenant as STenant

JOB, SERVICE, POD, NODE = "TrainingJob", "ModelService", "Pod", "Node"
POOL, TENANT, PROFILE = "AcceleratorPool", "Tenant", "PerformanceProfile"
DOMAIN = "PowerDomain"
KINDS = frozenset({JOB, SERVICE, POD, NODE, POOL, TENANT, PROFILE, DOMAIN})
"""A snapshot depends on these, and on no others."""
FEW = 256
"""As many jobs that differ are put in order one by one; more are sorted."""


class SnapshotBuilder:
    """See the module's head. Used by one thread at a time."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._objects: dict[str, dict[Key, Any]] = {kind: {} for kind in KINDS}
        self._owners: dict[str, Item] = {}
        """Jobs and services by uid."""
        self._owned: dict[str, dict[Key, Pod]] = {}
        """Pods by the uid of their owner."""
        self._pod_keys: dict[str, Key] = {}
        self._serving: dict[Key, set[Key]] = {}
        """By job: the services that serve its output."""
        self._places = Capacities()
        self._feeds = PowerDomains()
        self._feeds_changed = True
        self._telling: frozenset[str] = frozenset()
        """Nodes of which it is known which pods hold which board."""
        self._silent: frozenset[str] = frozenset()
        """Nodes that do not answer: other replicas start beside those that are there."""
        self._silence_changed = False
        self._orders: Mapping[Item, Ordered] = NOTHING
        """By object, what is ordered and not settled."""
        self._tenant_of: dict[str, str] = {}
        self._held: dict[str, budgets.Hold] = {}
        """Tenants whose budget is spent, and what that does to their work."""
        self._claims: dict[Item, tuple[Claim, ...]] = {}
        self._jobs: dict[JobId, Job] = {}
        self._order: list[JobId] = []
        self._in_order: list[Job] = []
        """The jobs, in the order of their names."""
        self._reserved: dict[JobId, Reservation] = {}
        self._due: set[JobId] = set()
        """Jobs with a deadline."""
        self._lasting = NonPreemptible()
        self._lasting_waits: dict[Item, tuple[Claim, ...]] = {}
        """Claims of objects of which something waits that is not preemptible, as the objects ask."""
        self._held_back: dict[Item, str] = {}
        """Those of them that may not begin, and why."""
        self._counted: set[str] = set()
        """Uids of pods whose use is counted by a job."""
        self._stale: set[Item] = set()
        self._timed: list[tuple[float, Item]] = []
        """A heap: from when on an object's claims may differ by themselves."""
        self._facts: dict[Key, JobFacts] = {}
        self._stale_facts: set[Key] = set()
        self._asked: Counter[Asked] = Counter()
        self._changed: set[str] = set()
        """Kinds of which an object changed, of those that are few."""
        self._unlearned = True
        """Whether the table rests on something that has changed and that may not wait for the next full snapshot."""
        self._new_classes: set[str] = set()
        """Classes of which the table lacks cells."""
        self._table = PerformanceTable()
        self._pools: tuple[Pool, ...] = ()
        self._tenants: dict[Key, tuple[Tenant, STenant]] = {}
        self._made = Snapshot()

    # -- what happens --------------------------------------------------------------------------------------------

    def put(self, kind: str, key: Key, obj: Any) -> None:
        """An object as it is now; None: it is gone. Kinds that no snapshot depends on are ignored."""
        if kind not in KINDS:
            return
        objects = self._objects[kind]
        old = objects.get(key)
        if obj is None:
            objects.pop(key, None)
        else:
            objects[key] = obj
        if kind == POD:
            self._pod_changed(key, old, obj)
        elif kind == NODE:
            for node in (old, obj):
                self._stale.update(Item(POD, pod.key) for pod in self._places.pods_at(node))
            self._places.set_node(key.name, obj)
            self._feeds_changed = True
            if any(node is None or node.silent_since is not None for node in (old, obj)):
                self._silence_changed = True
        elif kind in (JOB, SERVICE):
            self._owner_changed(kind, key, old, obj)
        elif kind == DOMAIN:
            self._feeds_changed = self._feeds_changed or _feed(old) != _feed(obj)
        else:
            self._feeds_changed = self._feeds_changed or kind == POOL
            if kind == POOL and _terms(kind, old) != _terms(
                kind, obj
            ):  # it decides in which pools a model fits
                self._stale.update(Item(SERVICE, name) for names in self._serving.values() for name in names)
            self._changed.add(kind)
            self._unlearned = self._unlearned or _terms(kind, old) != _terms(kind, obj)

    def tell_boards(self, nodes: frozenset[str]) -> None:
        """Of these nodes it is known now which pods hold which board."""
        self._feeds_changed = self._feeds_changed or nodes != self._telling
        self._telling = nodes

    def follow_orders(self, orders: Mapping[Item, Ordered]) -> None:
        """These are in flight, and no others: they count as carried out."""
        items = orders.keys() | self._orders.keys()
        self._stale.update(item for item in items if orders.get(item) is not self._orders.get(item))
        self._orders = orders

    def _owner_changed(self, kind: str, key: Key, old: Any, new: Any) -> None:
        item = Item(kind, key)
        self._stale.add(item)
        before, after = (obj.metadata.uid if obj is not None else "" for obj in (old, new))
        if before != after:
            if self._owners.get(before) == item:
                del self._owners[before]
            if after:
                self._owners[after] = item
            for uid in (before, after):
                self._stale.update(Item(POD, pod) for pod in self._owned.get(uid, ()))
        if kind == JOB:
            self._stale_facts.add(key)
            self._stale.update(Item(SERVICE, service) for service in self._serving.get(key, ()))
            return
        for service, there in ((old, False), (new, True)):
            if service is not None and service.spec.model.training_job:
                services = self._serving.setdefault(
                    Key(key.namespace, service.spec.model.training_job), set()
                )
                services.add(key) if there else services.discard(key)

    def _pod_changed(self, key: Key, old: Pod | None, new: Pod | None) -> None:
        self._stale.add(Item(POD, key))
        for pod in (old, new):
            if pod is not None and pod.owner_uid in self._owners:
                self._stale.add(self._owners[pod.owner_uid])
        if old is not None:
            if new is None or (new.uid, new.place) != (old.uid, old.place):
                self._places.remove(old)
            if new is None or new.uid != old.uid:
                self._pod_keys.pop(old.uid, None)
            owned = self._owned.get(old.owner_uid)
            if owned is not None and (new is None or new.owner_uid != old.owner_uid):
                owned.pop(key, None)
                if not owned:
                    del self._owned[old.owner_uid]
        if new is not None:
            self._pod_keys[new.uid] = key
            if new.owner_uid:
                self._owned.setdefault(new.owner_uid, {})[key] = new

    # -- what is asked -------------------------------------------------------------------------------------------

    def snapshot(self, now: datetime, *, full: bool = True) -> Snapshot:
        """The snapshot at ``now``. Between full ones, what nothing but time has changed stays as it was."""
        self._follow_pools_and_tenants(now)
        self._follow_silence()
        moment = now.timestamp()
        while self._timed and self._timed[0][0] <= moment:
            self._stale.add(heapq.heappop(self._timed)[1])
        self._follow_facts()
        self._follow_claims(now, full=full)
        if full or self._unlearned:
            self._table = self._learned()
        elif self._new_classes:
            self._table = with_classes(self._table, self._learned(), self._new_classes)
        self._unlearned, self._new_classes = False, set()
        tenants = self._tenants_at(now, full=full)
        domains, nodes = self._hung_on_feeds()
        self._changed.clear()
        self._made = Snapshot(
            pools=self._pools,
            nodes=nodes,
            tenants=tenants,
            jobs=tuple(self._in_order),
            reservations=self._reservations(),
            table=self._table,
            domains=domains,
        )
        return self._made

    def target(self, job: JobId) -> tuple[Item, str, int] | None:
        """The object that a job of the snapshot stands for, its resourceVersion, and the replica's index."""
        uid, _, index = job.partition("/")
        item = self._owners.get(uid)
        if item is not None:
            return item, self._version_of(item) or "", int(index or 0)
        key = self._pod_keys.get(uid)
        pod: Pod | None = self._objects[POD].get(key) if key is not None else None
        return (Item(POD, pod.key), "", 0) if pod is not None and pod.queued else None

    def job(self, job: JobId) -> Job | None:
        """A job of the last snapshot."""
        return self._jobs.get(job)

    def held_back(self) -> Mapping[Item, str]:
        """Objects of which something waits that is in no plan, because it is not preemptible and others are guaranteed
        what it would take; and why. As of the last snapshot."""
        return dict(self._held_back)

    def waits(self, item: Item) -> bool:
        """Whether the object, or a replica of it, waited in the last snapshot."""
        return any(claim.job.run is None for claim in self._claims.get(item, ()))

    def waiting(self) -> Iterable[Item]:
        """All objects that did."""
        return (item for item in self._claims if self.waits(item))

    def reserved(self) -> Iterable[JobId]:
        """The waiting jobs whose statuses name a place that is collected for them."""
        return self._reserved

    def with_deadline(self) -> Iterable[JobId]:
        """The jobs that should have ended by some time, waiting or not."""
        return self._due

    def tenant_of(self, namespace: str) -> str:
        """The tenant of a namespace; empty if it has none."""
        return self._tenant_of.get(namespace, "")

    def remarks(self) -> PoolRemarks:
        """What concerns pools besides the jobs, as of the last snapshot."""
        return self._places.remarks()

    def table_with(self, drafts: Iterable[TrainingJob]) -> PerformanceTable:
        """The table as if these jobs were there too."""
        more = [facts_of(draft, self.tenant_of(draft.metadata.namespace or "")) for draft in drafts]
        return self._learned(more)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _follow_pools_and_tenants(self, now: datetime) -> None:
        if POOL in self._changed:
            pools: list[AcceleratorPool] = [self._objects[POOL][key] for key in sorted(self._objects[POOL])]
            made = tuple(scheduler_pool(pool) for pool in pools)
            if any(
                _selects(a) != _selects(b) for a, b in zip(pools, self._places.pools, strict=False)
            ) or len(pools) != len(self._places.pools):
                self._stale.update(Item(POD, key) for key in self._objects[POD])
                self._places.set_pools(pools)
            self._pools = self._pools if made == self._pools else made
        if TENANT in self._changed:
            owners = tenant_of_namespace(self._objects[TENANT].values())
            if owners != self._tenant_of:
                moved = {name for name, _ in owners.items() ^ self._tenant_of.items()}
                self._tenant_of = owners
                for kind in (JOB, SERVICE, POD):
                    self._stale.update(
                        Item(kind, key) for key in self._objects[kind] if key.namespace in moved
                    )
                self._stale_facts.update(key for key in self._objects[JOB] if key.namespace in moved)
        holds = {key.name: budgets.hold(one, now) for key, one in self._objects[TENANT].items()}
        held = {name: hold for name, hold in holds.items() if hold.why}
        if held != self._held:
            turned = {name for name, _ in held.items() ^ self._held.items()}
            self._held = held
            for kind in (JOB, SERVICE, POD):
                keys = self._objects[kind]
                self._stale.update(Item(kind, key) for key in keys if self.tenant_of(key.namespace) in turned)

    def _follow_silence(self) -> None:
        """Services with replicas on nodes that have ceased to answer, or do so again, may want others."""
        if not self._silence_changed:
            return
        self._silence_changed = False
        silent = all_silent(self._objects[NODE].values())
        turned, self._silent = silent ^ self._silent, silent
        for pod in self._objects[POD].values() if turned else ():
            owner = self._owners.get(pod.owner_uid)
            if pod.place in turned and owner is not None and owner.kind == SERVICE:
                self._stale.add(owner)

    def _hung_on_feeds(self) -> tuple[tuple[PowerDomain, ...], tuple[Node, ...]]:
        domains = tuple(self._objects[DOMAIN].values())
        seen = {key.name: node for key, node in self._objects[NODE].items()} if domains else {}
        changed, self._feeds_changed = self._feeds_changed, False
        places = self._places
        return self._feeds.follow(domains, seen, places.nodes(), places.pools, self._telling, changed=changed)

    def _follow_claims(self, now: datetime, *, full: bool) -> None:
        """Makes the claims of stale objects again, and then says of each pod concerned who accounts for it."""
        pods = {item.key for item in self._stale if item.kind == POD}
        claims = {item: tuple(self._ordered_claims_of(item, now)) for item in self._stale}
        if full:  # guarantees, or what there is, may be others now
            claims = {**self._lasting_waits, **claims}
        self._stale.clear()
        self._bound(claims)
        changes = [(self._claims.get(item, ()), new) for item, new in claims.items()]
        changes = [(old, new) for old, new in changes if old or new]
        for item, new in claims.items():
            if new:
                self._claims[item] = new
            else:
                self._claims.pop(item, None)
        held, holds = (
            {uid for each in changes for claim in each[side] for uid in claim.pods} for side in (0, 1)
        )
        self._counted -= held - holds
        self._counted |= holds
        pods.update(self._pod_keys[uid] for uid in held ^ holds if uid in self._pod_keys)
        were: dict[JobId, Job] = {}
        for claim in (claim for old, _ in changes for claim in old):
            were[claim.job.id] = self._jobs.pop(claim.job.id, claim.job)
            self._reserved.pop(claim.job.id, None)
            self._due.discard(claim.job.id)
        there: set[JobId] = set()
        for claim in (claim for _, new in changes for claim in new):
            was, there_now = were.get(claim.job.id), claim.job
            self._jobs[there_now.id] = was if was is not None and was == there_now else there_now
            there.add(there_now.id)
            if claim.reservation is not None:
                self._reserved[there_now.id] = claim.reservation
            if there_now.deadline_s is not None:
                self._due.add(there_now.id)
        self._reorder(there, were.keys())
        for key in pods:
            self._place(key)

    def _bound(self, claims: dict[Item, tuple[Claim, ...]]) -> None:
        """Takes out of new claims what is not preemptible and would keep others from their guarantees. What sleeps gives
        its place to anybody, and keeps nobody from anything."""
        waits: list[tuple[float, JobId, Item, Claim]] = []
        for item in claims:
            self._held_back.pop(item, None)
            self._lasting_waits.pop(item, None)
            for claim in self._claims.get(item, ()):
                self._lasting.forget(claim.job.id)
        for item, new in claims.items():
            for claim in new:
                if claim.job.preemptible or claim.job.yields:
                    continue
                if claim.job.run is not None:
                    self._lasting.hold(claim.job)
                else:
                    waits.append((claim.job.submitted_at_s, claim.job.id, item, claim))
                    self._lasting_waits[item] = new
        guaranteed = {key.name: guarantees(tenant) for key, tenant in self._objects[TENANT].items()}
        if not waits or not any(guaranteed.values()):
            return
        self._lasting.set_limits(self._pools, self._places.nodes(), guaranteed)
        bounded: dict[JobId, Job | None] = {}
        for _, name, item, claim in sorted(waits, key=lambda each: each[:2]):
            bounded[name] = offered = self._lasting.offer(claim.job)
            if offered is None:
                self._held_back.setdefault(item, self._lasting.lacking(claim.job))
        for item in {item for *_, item, _ in waits}:
            offers = ((claim, bounded.get(claim.job.id, claim.job)) for claim in claims[item])
            claims[item] = tuple(replace(claim, job=job) for claim, job in offers if job is not None)

    def _ordered_claims_of(self, item: Item, now: datetime) -> Iterable[Claim]:
        claims, orders = self._claims_of(item, now), self._orders.get(item)
        return claims if orders is None else with_orders(claims, orders, self._version_of(item))

    def _version_of(self, item: Item) -> str | None:
        """An object's resourceVersion; empty where its projection has none, None where it is gone."""
        obj = self._objects[item.kind].get(item.key)
        if obj is None or item.kind == POD:
            return None if obj is None else ""
        return obj.metadata.resource_version or ""

    def _claims_of(self, item: Item, now: datetime) -> Iterable[Claim]:
        obj = self._objects[item.kind].get(item.key)
        if obj is None:
            return ()
        tenant = self.tenant_of(item.key.namespace)
        budget = self._held.get(tenant, budgets.FREE)
        if item.kind == POD:
            return self._single(obj, tenant, now)
        owned = tuple(self._owned.get(obj.metadata.uid, {}).values())
        if item.kind == SERVICE:
            name = obj.spec.model.training_job
            served = self._objects[JOB].get(Key(item.key.namespace, name)) if name else None
            jobs, pools = (served,) if served is not None else (), self._objects[POOL].values()
            return serving.claims(obj, with_silence(owned, self._silent), jobs, tenant, now, budget, pools)
        if (until := training.until(obj, now)) is not None:
            heapq.heappush(self._timed, (until, item))
        facts = self._facts.get(item.key)
        load = facts.load if facts is not None and facts.spec is obj.spec else None
        return training.claims(obj, owned, tenant, now, budget, self._objects[NODE], load)

    def _single(self, pod: Pod, tenant: str, now: datetime) -> Iterable[Claim]:
        """A pod that is a job by itself: opted in, or without its owner."""
        if foreign_pods.is_claim(pod) and not pod.ended:
            found = foreign_pods.claim(pod, tenant, self._places, now)
        elif pod.owner_uid not in self._owners:
            found = orphans.claim(pod, tenant, self._places, now)
        else:
            return ()
        held = found is not None and found.job.run is None and tenant in self._held
        return (found,) if found is not None and not held else ()

    def _place(self, key: Key) -> None:
        """Says whose use of its node a pod is."""
        pod: Pod | None = self._objects[POD].get(key)
        if pod is None:
            return
        if pod.uid in self._counted:
            use = Use.JOB
        else:
            nobodys = foreign_pods.is_unaccounted(pod, self._owners, self._tenant_of)
            use = Use.NOBODY if nobodys else Use.OTHER
        self._places.put(pod, use)

    def _reorder(self, there: set[JobId], were: AbstractSet[JobId]) -> None:
        """Keeps the jobs in the order of their names, after some were made again."""
        if len(there | were) > FEW:
            self._order = sorted(self._jobs)
            self._in_order = [self._jobs[name] for name in self._order]
            return
        for name in were - there:
            index = bisect_left(self._order, name)
            del self._order[index], self._in_order[index]
        for name in there:
            index = bisect_left(self._order, name)
            if name in were:
                self._in_order[index] = self._jobs[name]
            else:
                self._order.insert(index, name)
                self._in_order.insert(index, self._jobs[name])

    def _follow_facts(self) -> None:
        for key in self._stale_facts:
            job: TrainingJob | None = self._objects[JOB].get(key)
            old = self._facts.get(key, JobFacts())
            new = facts_of(job, self.tenant_of(key.namespace), old) if job is not None else JobFacts()
            if job is not None:
                self._facts[key] = new
            else:
                self._facts.pop(key, None)
            if old.asked == new.asked:
                continue
            if new.asked is not None:
                if not self._asked[new.asked]:
                    self._new_classes.add(new.asked.workload_class)
                self._asked[new.asked] += 1
            if old.asked is not None:
                self._asked[old.asked] -= 1
                if not self._asked[old.asked]:
                    del self._asked[old.asked]
        self._stale_facts.clear()

    def _learned(self, more: Iterable[JobFacts] = ()) -> PerformanceTable:
        profiles: Mapping[Key, PerformanceProfile] = self._objects[PROFILE]
        facts = [JobFacts(asked) for asked in self._asked]
        facts += [JobFacts(None, each.report) for each in self._facts.values() if each.report is not None]
        pools, tenants = self._objects[POOL].values(), self._objects[TENANT].values()
        made = table_of([*facts, *more], pools, profiles.values(), tenants)
        return self._table if made == self._table else made

    def _tenants_at(self, now: datetime, *, full: bool) -> tuple[STenant, ...]:
        """Their use is counted up to a full snapshot's moment; between these, a tenant that did not change stays as it was."""
        if not full and TENANT not in self._changed:
            return self._made.tenants
        made: dict[Key, tuple[Tenant, STenant]] = {}
        for key in sorted(self._objects[TENANT]):
            tenant, was = self._objects[TENANT][key], self._tenants.get(key)
            if was is None or full or was[0] is not tenant:
                was = tenant, scheduler_tenant(tenant, now, self._half_life_s)
            made[key] = was
        self._tenants = made
        return tuple(tenant for _, tenant in made.values())

    def _reservations(self) -> tuple[Reservation, ...]:
        """The places that statuses say are collected, in order of precedence: earlier ones first, then priorities.

        The scheduler drops those that do not fit any more (a pool is gone, the job has another size).
        """
        found = [(self._jobs[name], reservation) for name, reservation in self._reserved.items()]
        found.sort(
            key=lambda each: (min(each[1].since_s), -each[0].priority, each[0].submitted_at_s, each[0].id)
        )
        return tuple(reservation for _, reservation in found)


def _terms(kind: str, obj: Any) -> object:
    """What the table depends on at once; a tenant's status is not among it."""
    if obj is None or kind == PROFILE:
        return obj
    return obj.metadata.uid, obj.metadata.generation


def _feed(domain: Any) -> object:
    return None if domain is None else (domain.spec, is_closed(domain), holds_boards(domain))


def _selects(pool: AcceleratorPool) -> object:
    """What a node's or a pod's translation depends on."""
    return pool.metadata.name, pool.metadata.uid, pool.metadata.labels, pool.spec
