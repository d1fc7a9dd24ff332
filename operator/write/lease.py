"""One operator at a time: a coordination.k8s.io Lease, and the fence in front of every write.

The holder renews the lease every third of its duration, with one conditional write. A renewal that is not answered
within a fifth of the duration goes on, and another is started beside it: a slow server needs the time, a dead
connection never answers. A *term* is one uninterrupted hold: while its number stays the same, nobody else has held the
lease. ``Fence.check`` raises Fenced as soon as the last renewal *that was started* is older than the duration less a
margin: a process that was frozen, or cut off from the API server, stops writing before anybody else may begin.

A lost lease is acquired again. Where that begins a new term, another process may have written in between, and the
fence stays closed: the operator starts over, as a standby (``app.py``).

A lease held by our own identity is taken back at once: the identity is the pod's, and when a container of a
pod starts, its predecessor is dead. Another holder's lease is taken once this process has seen it unchanged for
its duration, so clocks of different machines are never compared. Where this process could not look for a while (the API
server was silent, or the process frozen), the holder gets time for one more renewal, once: what kept the one from
looking may have kept the other from renewing. A missing pod proves nothing: a pod deleted by force may still
run, and the API server accepts a token for some ten seconds after its pod is deleted. An operator that is told to
stop releases the lease first, so a successor waits the whole duration only after a crash.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from busbar.kube.client import KubeClient, Object
from busbar.kube.errors import AlreadyExists, ApiError, Conflict, ConnectionFailed, NotFound
from busbar.kube.resources import LEASES
from busbar.operator.errors import Fenced

log = logging.getLogger(__name__)

MOST_TRIES = 3
"""Renewals in flight at a time."""
NEVER = float("-inf")


@dataclass(frozen=True)
class Hold:
    """In which term the lease is held, and until which moment of the monotonic clock; replaced as a whole."""

    term: int = 0
    until: float = NEVER
    holder: str = ""
    """Whose it was when it was last read or written; empty: neither has succeeded yet."""


class LeaseKeeper:
    """Acquires and renews one Lease; ``hold`` may be read from any thread. Its client must have no guard of its own."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        duration_s: float = 30.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.hold = Hold()
        self._client = client
        self._namespace, self._name, self._identity = namespace, name, identity
        self._duration_s = duration_s
        self._margin_s = duration_s * 0.2
        self._on_change = on_change  # called with each renewal and each loss that is seen
        self._written: Object | None = None  # the lease as we wrote it last: renewed without reading it first
        self._mark: tuple[object, ...] | None = None  # of the present term
        self._renewed_at = NEVER  # when the last renewal that succeeded was started
        self._seen: tuple[str, float] | None = None  # another holder's resourceVersion, and since when
        self._looked_at = NEVER  # when another holder's lease was last read
        self._spared = ""  # the resourceVersion whose holder got more time

    def drop(self) -> None:
        """Stops writing at once, without releasing the lease."""
        self.hold = replace(self.hold, until=NEVER)
        self._on_change()

    async def run(self) -> None:
        """Acquires and renews the lease until cancelled, however long that fails."""
        while True:
            if await self._renewed():
                await asyncio.sleep(max(0.0, self._renewed_at + self._duration_s / 3 - time.monotonic()))
            else:
                await asyncio.sleep(min(1.0, self._duration_s / 10))

    async def _renewed(self) -> bool:
        """Tries until an attempt tells whether the lease is ours."""
        tries: set[asyncio.Task[bool]] = set()
        try:
            while True:
                if len(tries) < MOST_TRIES:
                    tries.add(asyncio.create_task(self._try_in_time()))
                done, tries = await asyncio.wait(
                    tries, timeout=self._duration_s / 5, return_when=asyncio.FIRST_COMPLETED
                )
                pause_s = 0.0
                for one in done:
                    try:
                        return one.result()
                    except (AlreadyExists, Conflict):
                        self._written = None  # somebody changed it, or it was written unseen: read it again
                    except (ApiError, ConnectionFailed, TimeoutError) as error:
                        log.debug("lease: %s", error)
                        self._written = None
                        pause_s = self._duration_s / 30
                await asyncio.sleep(pause_s)
        finally:
            for one in tries:
                one.cancel()
            await asyncio.gather(*tries, return_exceptions=True)

    async def _try_in_time(self) -> bool:
        async with asyncio.timeout(
            self._duration_s - self._margin_s
        ):  # later, success would be worth nothing
            return await self._try()

    async def _try(self) -> bool:
        """Renews the lease, or takes it where it is free. False: another process holds it."""
        started = time.monotonic()
        lease = self._written or await self._read()
        ours = lease is not None and self._mark is not None and _mark_of(lease) == self._mark
        if lease is not None and not ours and not self._is_free(lease):
            self._written = self._mark = None
            self.hold = Hold(self.hold.term, NEVER, str(lease["spec"]["holderIdentity"]))
            self._on_change()
            return False
        body = self._body(lease)
        if lease is None:
            answer = await self._client.create(LEASES, body, self._namespace)
        else:
            answer = await self._client.replace(LEASES, body, self._namespace)
        self._written, self._mark, self._renewed_at = answer, _mark_of(answer), started
        term = self.hold.term if ours else self.hold.term + 1
        self.hold = Hold(term, started + self._duration_s - self._margin_s, self._identity)
        self._on_change()
        return True

    async def release(self) -> None:
        """Gives the lease back, so that a successor need not wait; failure is harmless."""
        if time.monotonic() >= self.hold.until:
            return
        self.drop()
        self._written = None
        try:
            lease = await self._read()
            if lease is not None and _mark_of(lease) == self._mark:
                body = self._body(lease)
                body["spec"]["holderIdentity"] = ""
                await self._client.replace(LEASES, body, self._namespace)
        except (ApiError, ConnectionFailed):
            return

    async def _read(self) -> Object | None:
        try:
            return await self._client.get(LEASES, self._name, self._namespace)
        except NotFound:
            return None

    def _is_free(self, lease: Object) -> bool:
        """Whether nobody else holds the lease: it was released, is our pod's, or was not renewed for its duration."""
        spec, version, now = lease["spec"], lease["metadata"]["resourceVersion"], time.monotonic()
        if spec.get("holderIdentity") in (None, "", self._identity):
            return True
        duration_s = float(spec.get("leaseDurationSeconds") or self._duration_s)
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now)
        elif now - self._looked_at > duration_s / 3 and self._spared != version:
            self._seen, self._spared = (version, max(self._seen[1], now - duration_s * 2 / 3)), version
        self._looked_at = now
        return now - self._seen[1] > duration_s

    def _body(self, old: Object | None) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((old or {}).get("spec") or {})
        if spec.get("holderIdentity") != self._identity:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = now
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._duration_s)),
            "renewTime": now,
        }
        metadata: Object = {"name": self._name, "namespace": self._namespace}
        if old is not None:
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        return {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": spec}


def _mark_of(lease: Object) -> tuple[object, ...]:
    """What stays the same while one process holds the lease, and no longer."""
    spec = lease["spec"]
    return spec.get("holderIdentity"), spec.get("leaseTransitions"), spec.get("acquireTime")


class Fence:
    """Lets a write begin while the lease is held in the term for which it was opened."""

    def __init__(self, hold: Callable[[], Hold]) -> None:
        self._hold = hold
        self._term: int | None = None

    def open(self, term: int) -> None:
        """Lets writes of this term through: this process has seen everything that was written before it."""
        self._term = term

    def left_s(self) -> float:
        """For how many seconds a write that begins now may last; 0 or less: it may not begin."""
        hold = self._hold()
        return hold.until - time.monotonic() if hold.term == self._term else 0.0

    def check(self) -> float:
        """The guard of every write: ``left_s``, or Fenced where that is nothing."""
        left_s = self.left_s()
        if left_s <= 0:
            raise Fenced(
                "the lease is not held, or was held by another process meanwhile; nothing was written"
            )
        return left_s
