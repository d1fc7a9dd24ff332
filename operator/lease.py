"""One operator at a time: a coordination.k8s.io Lease, and the fence in front of every write.

The holder renews the lease every third of its duration. ``check`` raises Fenced as soon as the last renewal
*that was started* is older than the duration less a margin: a process that was frozen, or cut off from the
API server, stops writing before anybody else may begin. Whoever loses the lease ends; there is no half-way.

A lease held by our own identity is taken back at once: the identity is the pod's, and when a container of a
pod starts, its predecessor is dead. A foreign lease is waited out from when *we* first saw it unchanged, so
clocks of different machines are never compared. That its pod is gone is no proof: a pod deleted by force may
still run, and the API server takes a token for some ten seconds after its pod. An operator that is asked to end
gives the lease back first of all, so a new pod waits the whole duration only after a death without a signal.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

from busbar.kube.client import KubeClient, Object
from busbar.kube.errors import AlreadyExists, ApiError, Conflict, ConnectionFailed, NotFound
from busbar.kube.resources import LEASES
from busbar.operator.errors import Fenced


class LeaseKeeper:
    """Acquires, renews and guards one Lease. Its client must have no guard of its own."""

    def __init__(
        self, client: KubeClient, namespace: str, name: str, identity: str, duration_s: float = 15.0
    ) -> None:
        self._client = client
        self._namespace, self._name, self._identity = namespace, name, identity
        self._duration_s = duration_s
        self._margin_s = duration_s * 0.2
        self._held_until = float("-inf")

    def held(self) -> bool:
        """Whether a write that starts now is covered."""
        return time.monotonic() < self._held_until

    def check(self) -> None:
        """The fence: raises Fenced when the lease is not held."""
        if not self.held():
            raise Fenced(
                f"lease {self._namespace}/{self._name} is not held by {self._identity}; nothing was written"
            )

    def drop(self) -> None:
        """Stops writing at once, without telling anybody."""
        self._held_until = float("-inf")

    async def acquire(self) -> None:
        """Waits until the lease is ours."""
        seen: tuple[str, float] | None = None
        while True:
            started = time.monotonic()
            try:
                lease = await self._read()
                holder = (lease or {}).get("spec", {}).get("holderIdentity")
                if lease is None:
                    await self._client.create(LEASES, self._body(None), self._namespace)
                elif holder in (None, "", self._identity) or self._expired(lease, seen):
                    await self._client.replace(LEASES, self._body(lease), self._namespace)
                else:
                    version = lease["metadata"]["resourceVersion"]
                    if seen is None or seen[0] != version:
                        seen = (version, time.monotonic())
                    await asyncio.sleep(min(1.0, self._duration_s / 10))
                    continue
            except (AlreadyExists, Conflict):
                continue  # somebody else was quicker; look again
            except (ApiError, ConnectionFailed):
                await asyncio.sleep(min(1.0, self._duration_s / 10))
                continue
            self._held_until = started + self._duration_s - self._margin_s
            return

    async def keep(self) -> None:
        """Renews until the lease is lost, then raises Fenced.

        An attempt gets a fifth of the duration and is made again soon: one call that hangs on a dead connection
        must not use up the whole lease. The fence closes by itself if this lasts.
        """
        while True:
            await asyncio.sleep(self._duration_s / 3)
            while True:
                started = time.monotonic()
                try:
                    async with asyncio.timeout(self._duration_s / 5):
                        lease = await self._read()
                        if lease is None or lease["spec"].get("holderIdentity") != self._identity:
                            self.drop()
                        else:
                            await self._client.replace(LEASES, self._body(lease), self._namespace)
                            self._held_until = started + self._duration_s - self._margin_s
                    break
                except (ApiError, ConnectionFailed, TimeoutError):
                    self.check()
                    await asyncio.sleep(self._duration_s / 30)
            self.check()

    async def release(self) -> None:
        """Gives the lease back, so that a successor need not wait; failure is harmless."""
        if not self.held():
            return
        self._held_until = float("-inf")
        try:
            lease = await self._read()
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
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

    def _expired(self, lease: Object, seen: tuple[str, float] | None) -> bool:
        if seen is None or seen[0] != lease["metadata"]["resourceVersion"]:
            return False
        duration = float(lease["spec"].get("leaseDurationSeconds") or self._duration_s)
        return time.monotonic() - seen[1] > duration

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
