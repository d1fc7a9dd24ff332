"""What plans have ordered and nobody has confirmed yet: admissions and releases whose writes are in flight.

    plan ──► begin ──► each object's reconcile ──► answer ──► settled: the snapshot follows the object again
               └── until then the snapshot counts the order as done (``Order.applied_to``)

So the next round plans while these are written: no place is given twice, no job is admitted twice, and an object gets no
further order before its last one is settled. An order whose write failed is settled too, and its place is free in the next
round. Where the answer is missing, the write may have been done, or may be done later: it is sent again, under the same
resourceVersion, until it is known which, and then the object is read; all this time its place is taken.

Orders begin in the order of their plan, so they have it in their lane (``write/lanes.py``). A write that begins is stopped
by the lease's fence as any other; an order that the fence stopped is settled, and is planned again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from busbar.operator.decisions import Decision
from busbar.operator.pods.claims import Claim
from busbar.operator.queue.controller import Controller, Item, Outcome
from busbar.scheduler import ActionKind, Job, JobId, Placement, Run

log = logging.getLogger(__name__)

WAIT_S = 0.5
"""A round waits so long for its orders: where the server is in time, the next one plans on what was written."""
AGAIN_S = 1.0
"""An order whose answer is missing is sent again after this."""
TRIES = 60
"""As often. The API server gives up a request after a minute, so an earlier one is not carried out any more."""


@dataclass(frozen=True)
class Order:
    """What is ordered for one job."""

    kind: ActionKind
    job: Job
    """As it was when this was planned."""
    to: Placement | None
    at_s: float
    """Of the plan, seconds since the epoch."""
    version: str = ""
    """The resourceVersion under which it is written; empty: under any."""

    def applied_to(self, claim: Claim) -> Claim:
        """The job's claim as it is when the order has been carried out; the same one where it shows that already."""
        job = claim.job
        if self.kind is ActionKind.START:
            if job.run is not None or self.to is None:
                return claim
            return replace(claim, job=replace(job, run=Run(self.to, self.at_s)), reservation=None)
        if job.run is None:
            return claim
        if self.kind is ActionKind.LIFT and self.to is not None:
            return replace(claim, job=replace(job, run=replace(job.run, placement=self.to)))
        return replace(claim, job=replace(job, run=replace(job.run, releasing=True)))


Ordered = Mapping[JobId, Order]
"""Of one object: a job's own, or those of a service's replicas."""
NOTHING: Mapping[Item, Ordered] = MappingProxyType({})


def with_orders(claims: Iterable[Claim], orders: Ordered, version: str | None) -> Iterator[Claim]:
    """The claims of an object with its orders carried out. A job that is being admitted holds its place even if it asks for
    none any more: the write may have been done, unless the object is another one by now.

    Args:
        version: the object's resourceVersion; None: it is gone.
    """
    left = dict(orders)
    for claim in claims:
        order = left.pop(claim.job.id, None)
        yield claim if order is None else order.applied_to(claim)
    for order in left.values():
        if order.kind is ActionKind.START and order.version in ("", version):
            yield order.applied_to(Claim(order.job))


class Orders:
    """See the module's head. One event loop."""

    def __init__(
        self,
        controller: Controller,
        read: Callable[[Item], Awaitable[bool]],
        failed: Callable[[], None],
        *,
        wait_s: float = WAIT_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            read: reads an object from the server into its cache; whether that succeeded.
            failed: called when an order was not carried out, so that its place is free again.
        """
        self._controller, self._read, self._failed = controller, read, failed
        self._wait_s, self._sleep = wait_s, sleep
        self._in_flight: dict[Item, Ordered] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> Mapping[Item, Ordered]:
        """By object, what is ordered and not settled; a copy."""
        return dict(self._in_flight)

    async def carry_out(
        self,
        decisions: Mapping[Item, Iterable[Decision]],
        orders: Mapping[Item, Ordered],
        then: Callable[[], None],
    ) -> None:
        """Begins a round's orders and waits for them, but not for long.

        Args:
            decisions: what each object's reconcile is passed.
            orders: what is planned for the jobs of these objects.
            then: called when all of them are settled.
        """
        tasks: list[asyncio.Task[None]] = []
        for item, passed in decisions.items():
            self._in_flight[item] = orders[item]
            tasks.append(asyncio.create_task(self._settle(item, tuple(passed))))
        if not tasks:
            return
        self._tasks.update(tasks)
        whole = asyncio.gather(*tasks, return_exceptions=True)
        whole.add_done_callback(lambda ended: None if ended.cancelled() else then())
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        await asyncio.wait((whole,), timeout=self._wait_s)

    async def close(self) -> None:
        """Ends what is in flight."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, item: Item, decisions: tuple[Decision, ...]) -> None:
        try:
            outcome = await self._controller.process(item, decisions)
            if outcome is Outcome.UNKNOWN:
                outcome = await self._find_out(item, decisions)
        finally:
            del self._in_flight[item]
        if outcome is not Outcome.OK:
            self._failed()

    async def _find_out(self, item: Item, decisions: tuple[Decision, ...]) -> Outcome:
        """Sends an order again until it is known whether it was carried out, and brings the object's cache up to that."""
        log.info("an order was not answered and is sent again", extra={"object": str(item)})
        outcome = Outcome.UNKNOWN
        for _ in range(TRIES):
            await self._sleep(AGAIN_S)
            outcome = await self._controller.process(item, decisions)
            if outcome in (Outcome.OK, Outcome.CONFLICT):
                break
        while not await self._read(item):
            await self._sleep(AGAIN_S)
        return outcome
