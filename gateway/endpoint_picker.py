"""The endpoint picker: it assigns a replica to each request, and queues the request while there is none.

A request gets a `Lease` on a replica that is ready, not draining, not under suspicion, and can run it soon
(`replica_load`); of several, one in the pool whose turn it is (`pool_shares`), and there the one whose first token is
predicted to come soonest (`picking`, and `roles` where replicas have roles). Otherwise it waits, in
the order that is fair in tokens between tenants, then a tenant's users, then a user's keys (`fairqueue`), and first come
first served within a key; a bounded number per service and per user, and for a bounded time. A change of routes, a
returned lease or the end of a suspicion serves the queue.

A replica that just failed is under suspicion for a moment (doubling with each failure in a row), so that
the retry goes elsewhere and a dead replica costs little until the operator takes it out of the routes.

What waits and runs here is also the demand that the operator reads, so a request that waits for a service with zero
replicas makes the operator start one.

Batch work waits in a queue of its own, which is served while nothing waits in the other. It makes the operator start
a first replica, and keeps one, but no second.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from busbar.gateway.errors import TooManyRequests, Unavailable
from busbar.gateway.fairqueue import FairQueue, Owner, cost_of
from busbar.gateway.load_counts import LoadCounts, Progress
from busbar.gateway.picking import ANY, Ask, Candidate, Choice, choose
from busbar.gateway.pool_shares import pick
from busbar.gateway.replica_load import ReplicaLoad, Work, is_last_place
from busbar.gateway.roles import destinations, for_prompts, hands_over
from busbar.gateway.routes import RouteTable
from busbar.kube.contracts.demand import ReplicaContact, ServiceDemand, TenantDemand
from busbar.kube.contracts.routes import Endpoint, ServiceRoute
from busbar.kube.contracts.workload import ReplicaRole
from busbar.scheduler.autoscale.shares import Turns

USUAL_OUTPUT = 256.0
"""Tokens of an answer, until a service has given some."""
MOST_DOUBLINGS = 60
"""Of the pause of a replica that fails again and again, which has a bound anyway."""
LAST_RANK = 1_000_000
"""Of batch work, at a model server that orders by rank."""
LATEST = 0.05
"""Of the last answer in the mean."""
USUAL_STALL_S = 0.05
"""Until a service has handed streams over."""
Coming = Mapping[str, Sequence[Work]]
"""By address: requests elsewhere whose streams will be handed over to it."""


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of the queue; see Settings for their meaning."""

    hold_timeout_s: float
    hold_limit: int
    hold_limit_per_user: int
    replica_in_flight: int
    suspect_s: float
    suspect_max_s: float


@dataclass(frozen=True, eq=False)
class Lease:
    """A slot on a replica, which must be returned."""

    service: ServiceRoute
    endpoint: Endpoint
    work: Work
    rank: int | None = None
    """Of the owner, where the model server orders by it: 0 is who was served least."""


@dataclass(eq=False)
class _Waiter:
    owner: Owner
    ask: Ask
    place: asyncio.Future[Lease]
    prefer: str


@dataclass
class _Service:
    service: ServiceRoute
    queue: FairQueue[_Waiter] = field(default_factory=FairQueue)
    batch: FairQueue[_Waiter] = field(default_factory=FairQueue)
    """Batch work."""
    replicas: dict[str, ReplicaLoad] = field(default_factory=dict)
    arrivals: int = 0
    last_request_at: float | None = None
    recheck: asyncio.TimerHandle | None = None
    load: LoadCounts = field(default_factory=LoadCounts)
    output_tokens: float = USUAL_OUTPUT
    """Of an answer, on average."""
    turns: Turns = field(default_factory=Turns)
    stall_s: float = USUAL_STALL_S
    """For which a stream stands still when it goes on at another replica, on average."""

    def coming(self) -> Coming:
        """Of services whose streams go from replica to replica."""
        found: dict[str, list[Work]] = {}
        if hands_over(self.service.endpoints):
            for work in (work for load in self.replicas.values() for work in load.works if work.to):
                found.setdefault(work.to[0], []).append(work)
        return found


Told = Callable[[Sequence[Endpoint]], list[ReplicaContact]]
"""What was had from each of some replicas."""


def _demand(state: _Service, now: float, contacts: Told) -> ServiceDemand:
    overdue, oldest = state.load.waits(state.service.slo, now)
    works = [work for load in state.replicas.values() for work in load.works]
    running = sum(not work.ask.batch for work in works)
    cold = len(state.batch) > 0 and not any(endpoint.ready for endpoint in state.service.endpoints)
    return ServiceDemand(
        namespace=state.service.namespace,
        name=state.service.name,
        waiting=len(state.queue) or int(cold),
        in_flight=running or int(bool(works)),
        arrivals=state.arrivals,
        last_request_age_seconds=(
            None if state.last_request_at is None else round(now - state.last_request_at, 3)
        ),
        overdue=overdue,
        oldest_wait_seconds=oldest,
        windows=state.load.windows(now),
        totals=state.load.totals,
        tenants=_tenants(state),
        replicas=contacts(state.service.endpoints),
    )


def _tenants(state: _Service) -> list[TenantDemand]:
    """What each tenant of a shared service has here."""
    if not state.service.access:
        return []
    running = Counter(work.tenant for load in state.replicas.values() for work in load.works)
    names = {state.service.tenant, *(entry.tenant for entry in state.service.access)}
    return [
        TenantDemand(tenant=name, waiting=state.queue.waiting((name,)), in_flight=running[name])
        for name in sorted(names)
    ]


class EndpointPicker:
    """All services' queues and replicas. Lives on one event loop."""

    def __init__(
        self,
        limits: QueueLimits,
        clock: Callable[[], float],
        rng: random.Random | None = None,
        choice: Choice = choose,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._rng = rng or random.Random()
        self._choice = choice
        self._services: dict[str, _Service] = {}
        self._closed = False

    def update(self, table: RouteTable) -> None:
        """Take over new routes and wake who can now be served."""
        for key, service in table.services.items():
            state = self._services.get(key)
            if state is None:
                self._services[key] = _Service(service)
                continue
            state.service = service
            self._forget_replicas(state)
            if service.suspended:
                self._refuse(state, f"The model {service.model_id!r} is suspended.")
            self._serve(state)
        for key in [key for key in self._services if key not in table.services]:
            state = self._services[key]
            self._refuse(state, f"The model {state.service.model_id!r} was removed.")
            if not any(replica.in_flight for replica in state.replicas.values()):
                if state.recheck:
                    state.recheck.cancel()
                del self._services[key]
            else:
                state.service = state.service.model_copy(update={"endpoints": [], "suspended": True})

    def close(self) -> None:
        """Refuse all waiting requests, now and later."""
        self._closed = True
        for state in self._services.values():
            self._refuse(state, "The gateway is restarting. Try again.", retry_after_s=1)

    @contextmanager
    def visit(
        self, service: ServiceRoute, progress: Progress | None = None, *, batch: bool = False
    ) -> Iterator[None]:
        """Note that a request for the service arrived, for the operator's view of demand: of batch work only that the
        service is used."""
        state = self._services.setdefault(service.key, _Service(service))
        if batch:
            state.last_request_at = self._clock()
            yield
            state.last_request_at = self._clock()
            return
        progress = progress or Progress(stream=False)
        state.arrivals += 1
        state.last_request_at = self._clock()
        state.load.arrived(progress, state.last_request_at)
        try:
            yield
        finally:
            state.last_request_at = self._clock()
            state.load.left(progress)

    def ended(
        self, service: ServiceRoute, progress: Progress, code: int, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Note what the client of a request saw, which a `visit` has announced, by the service's target of now."""
        state = self._services.get(service.key)
        if state is not None:
            if output_tokens:
                state.output_tokens += LATEST * (output_tokens - state.output_tokens)
            state.load.ended(progress, state.service.slo, code, (prompt_tokens, output_tokens), self._clock())

    async def enter(
        self,
        service: ServiceRoute,
        owner: Owner,
        deadline: float,
        *,
        ask: Ask = ANY,
        again: bool = False,
        prefer: str = "",
    ) -> Lease:
        """Wait for a replica until `deadline` (of the endpoint picker's clock); the caller must `leave` with the lease.

        `owner` is (tenant, user, key), between which the queue is fair; `ask` is what the request may need at most.
        `again` is for a request whose replica failed: it goes to the head of the queue, and the bounds on
        the queue do not apply to it. `prefer` is the address of the replica that has the stream's keys and values: it is
        taken while it is open. Raises Unavailable or TooManyRequests.
        """
        state = self._services.get(service.key)
        if state is None or state.service.suspended:
            raise Unavailable(
                f"The model {service.model_id!r} is suspended or was removed.", retry_after_s=30
            )
        if self._closed:
            raise Unavailable("The gateway is restarting. Try again.", retry_after_s=1)
        if not again and not ask.batch:
            self._check_bounds(state, owner)
        queue = state.batch if ask.batch else state.queue
        expected = replace(ask, output_tokens=min(ask.output_tokens, round(state.output_tokens)))
        waiter = _Waiter(owner, expected, asyncio.get_running_loop().create_future(), prefer)
        if again:
            queue.push_front(owner, waiter)
        else:
            queue.push(owner, waiter, *_charge(state.service, owner, expected))
        self._serve(state)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                return await asyncio.shield(waiter.place)
        except TimeoutError as error:
            if waiter.place.done():  # served at the same time as the timeout
                return waiter.place.result()
            raise Unavailable(
                f"No replica of {service.model_id!r} became ready within {self._limits.hold_timeout_s:.0f} s.",
                retry_after_s=10,
            ) from error
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self.leave(waiter.place.result(), worked=False)
                if not again:  # the caller, who settles what was served, does not hear of this lease
                    self.settle(service, owner, expected, (0, 0, 0))
            raise
        finally:
            queue.remove(owner, waiter)
            if not waiter.place.done():
                waiter.place.cancel()

    def leave(
        self, lease: Lease, *, suspect: bool = False, suspect_s: float | None = None, worked: bool = True
    ) -> None:
        """Give a lease back.

        Args:
            suspect: the replica failed.
            suspect_s: the time for which it asked for no requests.
            worked: it answered, which ends a suspicion. Neither this nor `suspect`: nothing is known, as when
                the client left first.
        """
        state = self._services.get(lease.service.key)
        if state is None:
            return
        replica = state.replicas.setdefault(lease.endpoint.url, ReplicaLoad())
        replica.works.discard(lease.work)
        if suspect:
            doubled = 2.0 ** min(replica.failures, MOST_DOUBLINGS)
            pause = min(self._limits.suspect_s * doubled, self._limits.suspect_max_s)
            if suspect_s is not None:
                pause = min(max(suspect_s, self._limits.suspect_s), self._limits.suspect_max_s)
            replica.fail(self._clock() + pause)
        elif worked:
            replica.failures = 0
            replica.suspect_until = 0.0
        self._serve(state)

    def moved(self, service: ServiceRoute, stall_s: float) -> None:
        """Note for how long a stream stood still that went on where its keys and values were."""
        state = self._services.get(service.key)
        if state is not None:
            state.stall_s += LATEST * (stall_s - state.stall_s)

    def settle(self, service: ServiceRoute, owner: Owner, charged: Ask, tokens: tuple[int, int, int]) -> None:
        """A request has ended with (prompt, of them cached, output) tokens: its owner is charged these in place of the
        estimate, which its first lease has (`Work.ask`)."""
        state = self._services.get(service.key)
        if state is not None:
            estimate, weight = _charge(state.service, owner, charged)
            queue = state.batch if charged.batch else state.queue
            queue.settle(owner, cost_of(*tokens) - estimate, weight)

    def demand(self, contacts: Told = lambda endpoints: []) -> list[ServiceDemand]:
        """The demand that the operator reads: waiting, running and arrived requests, and what was had from replicas."""
        now = self._clock()
        return [_demand(state, now, contacts) for state in self._services.values()]

    def _check_bounds(self, state: _Service, owner: Owner) -> None:
        name = state.service.model_id
        if len(state.queue) >= self._limits.hold_limit:
            raise Unavailable(
                f"{len(state.queue)} requests are waiting for {name!r} already. Try again later.",
                retry_after_s=10,
            )
        if state.queue.waiting(owner[:2]) >= self._limits.hold_limit_per_user:
            raise TooManyRequests(
                f"{self._limits.hold_limit_per_user} requests of this key's user are waiting for {name!r} already.",
                param="model",
                retry_after_s=10,
            )

    def _serve(self, state: _Service) -> None:
        self._serve_queue(state, state.queue)
        if not len(state.queue):
            self._serve_queue(state, state.batch)
        self._schedule_recheck(state)

    def _serve_queue(self, state: _Service, queue: FairQueue[_Waiter]) -> None:
        while len(queue):
            waiter = queue.peek()
            if waiter.place.done():  # it has left, and is charged nothing
                queue.remove(waiter.owner, waiter)
                continue
            now = self._clock()
            coming = state.coming()
            found = self._open(state, waiter, now, coming)
            preferred = [candidate for candidate in found if candidate.endpoint.url == waiter.prefer]
            able = preferred or for_prompts(found, waiter.ask, state.stall_s)
            chosen = pick(state.service, state.turns, able, waiter.ask, self._choice, self._rng)
            if chosen is None:
                break
            load = state.replicas.setdefault(chosen.endpoint.url, ReplicaLoad())
            work = load.take(
                chosen.endpoint, waiter.ask, waiter.owner[0], now, self._gives_way(state, waiter)
            )
            if waiter.ask.moves and chosen.endpoint.role is ReplicaRole.PREFILL:
                work.to = self._destinations(state, waiter.ask, now, coming)
            rank = self._rank(state, waiter) if state.service.ranked else None
            queue.pop()
            waiter.place.set_result(Lease(state.service, chosen.endpoint, work, rank))

    def _rank(self, state: _Service, waiter: _Waiter) -> int:
        return LAST_RANK if waiter.ask.batch else state.queue.rank(waiter.owner)

    def _destinations(self, state: _Service, ask: Ask, now: float, coming: Coming) -> tuple[str, ...]:
        """Where the request's stream can go on: no more are sent to a replica than it computes together."""
        found = []
        for endpoint in state.service.endpoints:
            load, works = state.replicas.get(endpoint.url) or ReplicaLoad(), coming.get(endpoint.url, ())
            most = endpoint.most_running or self._limits.replica_in_flight
            if load.in_flight + len(works) < most and load.takes(endpoint, ask, most, now, works):
                found.append(load.candidate(endpoint, now, coming=works))
        return destinations(found, ask)

    def _open(self, state: _Service, waiter: _Waiter, now: float, coming: Coming) -> list[Candidate]:
        found, gives_way = [], self._gives_way(state, waiter)
        for endpoint in state.service.endpoints:
            load, works = state.replicas.get(endpoint.url) or ReplicaLoad(), coming.get(endpoint.url, ())
            if load.takes(endpoint, waiter.ask, self._limits.replica_in_flight, now, works):
                found.append(load.candidate(endpoint, now, gives_way, works))
        if waiter.ask.batch:
            return found
        if any(is_last_place(candidate) for candidate in found) and state.queue.is_ahead(waiter.owner):
            return [candidate for candidate in found if not is_last_place(candidate)]
        return found

    def _gives_way(self, state: _Service, waiter: _Waiter) -> bool:
        """Whether engines let requests of other owners go before this one's prompt."""
        return state.queue.asks_more(waiter.owner) and state.queue.is_ahead(waiter.owner)

    def _schedule_recheck(self, state: _Service) -> None:
        """Wake the queue when the first suspicion ends."""
        if state.recheck:
            state.recheck.cancel()
            state.recheck = None
        if not len(state.queue) + len(state.batch):
            return
        now = self._clock()
        ends = [r.suspect_until for r in state.replicas.values() if r.suspect_until > now]
        if ends:
            loop = asyncio.get_running_loop()
            state.recheck = loop.call_later(min(ends) - now + 0.001, self._serve, state)

    def _forget_replicas(self, state: _Service) -> None:
        urls = {endpoint.url for endpoint in state.service.endpoints}
        for url in [
            url for url, replica in state.replicas.items() if url not in urls and not replica.in_flight
        ]:
            del state.replicas[url]

    def _refuse(self, state: _Service, message: str, retry_after_s: int = 30) -> None:
        for waiter in (*state.queue.drain(), *state.batch.drain()):
            if not waiter.place.done():
                waiter.place.set_exception(Unavailable(message, retry_after_s=retry_after_s))


def _charge(service: ServiceRoute, owner: Owner, ask: Ask) -> tuple[float, float]:
    """(cost, weight) of a request in the queue."""
    terms = service.terms_of(owner[0])
    return cost_of(ask.prompt_tokens, 0, ask.output_tokens), terms.weight if terms is not None else 1.0
