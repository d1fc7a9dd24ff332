"""Which sequence gives its place and its blocks up for another one. Pure choice: `scheduler.py` carries it out.

Batch work gives way to whoever needs a place or blocks: the newest of the most served first, and that of the own tenant
where it is the tenant's most that is reached. Others are preempted for growth, and for requests of tenants that hold less
than is guaranteed to them: then of the tenants that hold more than that, and the oldest sequence is spared.
"""

from __future__ import annotations

from math import ceil

from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.fairness import Counters
from busbar.workloads.serving.quota import Quotas
from busbar.workloads.serving.sequence import Sequence


class Preemption:
    """The sequences that hold blocks, and who of them goes first. It changes nothing."""

    def __init__(
        self,
        pool: BlockPool,
        quotas: Quotas,
        counters: Counters,
        running: list[Sequence],
        fetching: list[Sequence],
        max_running: int,
        watermark: float,
    ) -> None:
        """`running` and `fetching` are the scheduler's own lists; the last two are those of `StepLimits`."""
        self.pool, self._quotas, self._counters = pool, quotas, counters
        self._running, self._fetching = running, fetching
        self._max_running, self._watermark = max_running, watermark

    @property
    def in_batch(self) -> int:
        """Places that are taken."""
        return len(self._running) + len(self._fetching)

    @property
    def batch_work(self) -> list[Sequence]:
        """Of the sequences with a place, those that nobody waits for."""
        return [s for s in (*self._running, *self._fetching) if s.owner.batch]

    def turn(self, sequence: Sequence) -> tuple[tuple[float, float], int]:
        """Whose turn it is: smaller is served first. Among batch work, or among all else."""
        return self._counters.of(sequence.owner), sequence.order

    def watermark(self, batch: bool = True) -> int:
        """Blocks that stay free, so that those who run can grow; batch work only where it counts."""
        growing = self.in_batch - (0 if batch else len(self.batch_work))
        if not growing:
            return 0
        return max(ceil(self.pool.total * self._watermark), growing)

    def has_room(self, sequence: Sequence, need: int) -> bool:
        """Whether so many blocks more are free, and within the tenant's most."""
        tenant = sequence.owner.tenant
        return need <= self.pool.free and self.pool.held[tenant] + need <= self._quotas.most(tenant)

    def may_join(self, head: Sequence, grows: int) -> bool:
        """Whether the tenant's most allows that it holds so many blocks more, and lets those that run grow."""
        tenant = head.owner.tenant
        growing = (
            s for s in self._running if s.owner.tenant == tenant and (head.owner.batch or not s.owner.batch)
        )
        beside = sum(1 for _ in growing) if self._quotas else 0
        return self.pool.held[tenant] + grows + beside <= self._quotas.most(tenant)

    def is_owed(self, sequence: Sequence, grows: int) -> bool:
        """Whether so many blocks more are within what is guaranteed to its tenant."""
        tenant = sequence.owner.tenant
        return self.pool.held[tenant] + grows <= self._quotas.guaranteed(tenant)

    def victim(self, needy: Sequence, need: int) -> Sequence:
        """Who gives its blocks up: of the tenants that borrow, never the oldest sequence unless it is alone; where the
        needy one's tenant has reached its most, of that tenant."""
        tenant, held = needy.owner.tenant, self.pool.held
        own = held[tenant] + need
        if own > self._quotas.most(tenant):
            borrowers = {tenant}
        else:
            borrowers = {name for name in held if held[name] > self._quotas.guaranteed(name)} - {tenant}
            borrowers |= {tenant} if own > self._quotas.guaranteed(tenant) else set()
        found = [s for s in (*self._running, *self._fetching) if s.owner.tenant in borrowers] or [needy]
        batch = [s for s in found if s.owner.batch]
        if batch and not needy.owner.batch:
            return max(batch, key=self.turn)
        if needy.owner.batch:  # it takes nothing from the others
            found = batch or [needy]
        oldest = min(found, key=lambda s: s.order)
        return max((s for s in found if s is not oldest), key=self.turn, default=oldest)

    def reclaimed(self, head: Sequence, grows: int) -> Sequence | None:
        """Who gives back next what it has borrowed for a sequence that is owed so many blocks, and a place; None: there
        are enough, or nobody has borrowed."""
        if grows > self.pool.free:
            victim = self.victim(head, grows)
            return None if victim is head else victim
        if self.in_batch >= self._max_running:  # `may_take` has left a place, unless batch work has it
            return max(self.batch_work, key=self.turn, default=None)
        return None

    def displaces(self, head: Sequence, grows: int) -> bool:
        """Whether a sequence that joins needs place or blocks of batch work, and gets enough of them."""
        work = self.batch_work
        if not work or not self._lacks(head, grows):
            return False
        everything = sum(len(s.blocks) for s in work)
        own = sum(len(s.blocks) for s in work if s.owner.tenant == head.owner.tenant)
        return grows <= self.pool.free - self.watermark(False) + everything and self.may_join(
            head, grows - own
        )

    def displaced(self, head: Sequence, grows: int) -> Sequence | None:
        """Which batch work gives way next to a sequence that joins: of its own tenant, where that holds its most. None: there
        is enough, or none is left."""
        if not self._lacks(head, grows):
            return None
        work = self.batch_work
        if not self.may_join(head, grows):
            work = [s for s in work if s.owner.tenant == head.owner.tenant]
        return max(work, key=self.turn, default=None)

    def _lacks(self, head: Sequence, grows: int) -> bool:
        """Whether there is no place for the sequence, or too few blocks."""
        return (
            self.in_batch >= self._max_running
            or grows > self.pool.free - self.watermark(False)
            or not self.may_join(head, grows)
        )
