"""Asks the API for this gateway's parts of the limits: once a second what has changed, and at once for who runs short.

One question at a time, numbered over all processes of this state folder. While the API is away nothing is lowered, because
nothing could be raised again: the gateway goes on with what it holds (`leases`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from busbar.gateway.api_client import ApiRefused
from busbar.gateway.errors import SpoolError
from busbar.gateway.files import write_atomically
from busbar.gateway.keys import ApiUnreachable
from busbar.gateway.leases import RENEW_S
from busbar.gateway.shared_limits import SharedLimits
from busbar.kube.contracts.budget_leases import LeaseAnswer, LeaseRequest

log = logging.getLogger("busbar.gateway.leases")

ROUND_S = 1.0
PATIENCE_S = 2.0
"""A request that runs short waits at most so long for one answer of the API."""
RETRIES = 7
RETRY_S = 0.4
"""Between two tries while other gateways give back what they do not use. Each tells within `ROUND_S` what it no longer
needs, and hears within another one what others need."""
ANSWER_S = 10.0
"""An answer that takes longer is not used: the API counts leases for `WINDOW_S` (62 s) after their end."""
_NUMBERS = 2**32
"""Of one process."""

Ask = Callable[[LeaseRequest], Awaitable[LeaseAnswer]]
"""Raises ApiUnreachable or ApiRefused."""


class LeaseKeeper:
    """Keeps the parts of one gateway."""

    def __init__(
        self,
        limits: SharedLimits,
        ask: Ask,
        gateway_id: Callable[[], str],
        gateways: int,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        """`path`: the file that counts this folder's processes. Raises SpoolError when the disk refuses."""
        self._limits = limits
        self._ask = ask
        self._gateway_id = gateway_id
        self._gateways = gateways
        self._clock = clock
        self._retry_s = retry_s
        self._number = _next_process(path) * _NUMBERS
        self._asked_at = -math.inf
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None
        self._loop: asyncio.Task[None] | None = None
        self.recalled = False
        """Others need some of what is held."""
        self.away = False
        """The last question was not answered."""

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Give back what is not used. What cannot be told ends by itself."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S), self._turn:
                await self._question(last=True)

    async def more(self, attempt: int) -> bool:
        """Ask for what requests lack; whether the API has answered. Those who wait at once share a question."""
        if attempt > RETRIES or self.away:
            return False
        if attempt > 1:
            await asyncio.sleep(self._retry_s)
        if self._next is None:
            self._next = asyncio.create_task(self._round())
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(self._next)
        except TimeoutError:
            return False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            # Who holds nothing asks, too: others may lack what a former process held.
            if self._limits.held or self.away or self._clock() - self._asked_at >= RENEW_S:
                try:
                    await self._round()
                except Exception:  # without this loop no lease would be renewed again
                    log.exception("leases were not renewed")

    async def _round(self) -> bool:
        async with self._turn:
            self._next = None  # who comes from now on needs another question
            answered = await self._question()
            if answered and self.recalled:  # somebody waits for what goes back
                return await self._question()
            return answered

    async def _question(self, *, last: bool = False) -> bool:
        asked_at = self._asked_at = self._clock()
        asks = [] if self.away else self._limits.asks(asked_at, last=last)
        self._number += 1
        request = LeaseRequest(
            gateway=self._gateway_id(),
            number=self._number,
            gateways=self._gateways,
            through=self._limits.through,
            asks=asks,
        )
        try:
            answer = await self._ask(request)
            if answer.number > request.number:
                self._number = answer.number
                raise ApiUnreachable(
                    "the API knows a later question of this gateway"
                )  # the folder is an old copy
            if self._clock() - asked_at > ANSWER_S:
                raise ApiUnreachable("the answer came too late")
        except (ApiUnreachable, ApiRefused) as error:
            if not self.away:
                log.warning("leases_not_renewed", extra={"error": str(error)})
            self.away = True
            return False
        came_back, self.away = self.away, False
        self._limits.take(answer, asked_at)
        if came_back and not last:
            return await self._question()
        self.recalled = bool(answer.recalls)
        return True


def _next_process(path: Path) -> int:
    """One more than in the process before."""
    try:
        text = path.read_text().strip() if path.exists() else ""
        number = int(text) + 1 if text.isdigit() else 1
        write_atomically(path, f"{number}\n".encode())
    except OSError as error:
        raise SpoolError(f"{path}: {error}; give the gateway a writable folder") from error
    return number
