"""Keeps the lease from a thread with an event loop and connections of its own.

The operator's own loop is late when a round is large, and its connections are busy when the API server is slow;
neither may cost the lease. The thread does nothing else, so a slow server makes the operator slow and does not end
its term. If the operator's loop hangs for good, the lease is still renewed: then the liveness probe fails, and the
kubelet ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from busbar.kube.client import ClientLimits, KubeClient
from busbar.kube.login import Login
from busbar.operator.errors import TakenOver
from busbar.operator.settings import Settings
from busbar.operator.write.lease import MOST_TRIES, Hold, LeaseKeeper

RELEASE_S = 3.0
"""Time to give the lease back when the operator stops; the kubelet may kill it soon."""


class LeaseThread:
    """One lease, kept from ``start`` until ``stop``. All methods belong to the operator's own event loop."""

    def __init__(self, login: Login, settings: Settings) -> None:
        duration_s = settings.lease_duration_s
        limits = ClientLimits(connections=MOST_TRIES, request_s=duration_s, retry_s=duration_s / 5)
        self._client = KubeClient(login, user_agent="busbar-operator-lease", limits=limits)
        self._keeper = LeaseKeeper(
            self._client, settings.namespace, settings.lease_name, settings.identity, duration_s, self._ring
        )
        self._identity = settings.identity
        self._bell = asyncio.Event()
        self._stopping = asyncio.Event()
        self._dropped = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the operator's
        self._inner: asyncio.AbstractEventLoop | None = None  # the thread's
        self._ended: asyncio.Future[None] | None = None

    @property
    def hold(self) -> Hold:
        return Hold() if self._dropped else self._keeper.hold

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        inner = self._inner = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(inner,), name="lease", daemon=True)
        self._thread.start()

    async def wait(self) -> None:
        """Returns when the thread was stopped, and raises the error that ended it."""
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def held(self) -> int:
        """Waits until the lease is held; returns the term."""
        while True:
            self._bell.clear()
            hold = self.hold
            if time.monotonic() < hold.until:
                return hold.term
            await self._bell.wait()

    async def lost(self, term: int) -> None:
        """Waits until this term has ended or was not renewed in time."""
        while True:
            self._bell.clear()
            hold = self.hold
            left_s = hold.until - time.monotonic()
            if hold.term != term or left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._bell.wait()

    async def taken(self, term: int) -> None:
        """Returns never. Raises TakenOver when another process was seen to hold the lease, or may have held it."""
        while True:
            self._bell.clear()
            hold = self.hold
            if not self._dropped and (hold.term != term or hold.holder != self._identity):
                raise TakenOver(f"the lease is, or was meanwhile, held by {hold.holder or 'nobody'}")
            await self._bell.wait()

    def drop(self) -> None:
        """Stops writing and renewing at once, without releasing the lease: what a killed process does."""
        self._dropped = True
        self._ring()
        self._stop()

    async def stop(self) -> None:
        """Releases the lease, unless it was dropped, and ends the thread."""
        self._stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 2 * RELEASE_S)

    def _stop(self) -> None:
        if self._inner is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                self._inner.call_soon_threadsafe(self._stopping.set)

    def _ring(self) -> None:
        """Wakes ``held`` and ``lost``; called from either thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the operator's loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._bell.set)

    # -- in the thread ---------------------------------------------------------------------------------

    def _run(self, inner: asyncio.AbstractEventLoop) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: inner) as runner:
                runner.run(self._keep())
        except BaseException as ended:
            error = ended
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        assert self._ended is not None
        if self._ended.done():
            return
        if error is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _keep(self) -> None:
        async with self._client:
            kept = asyncio.create_task(self._keeper.run())
            stopped = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({kept, stopped}, return_when=asyncio.FIRST_COMPLETED)
            kept.cancel()
            stopped.cancel()
            results = await asyncio.gather(kept, stopped, return_exceptions=True)
            if isinstance(results[0], Exception):
                self._keeper.drop()
                raise results[0]
            if not self._dropped:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RELEASE_S):
                        await self._keeper.release()
