"""Usage per key, counted once: from the running request to the API's database.

    begin ── slot in the inflight table ── end ── spool (fsync) ── slot freed ── API (in order) ── forgotten

Each arrow survives the death of the process in it: see `inflight` and `spool`. When the disk refuses or the
spool is full, `begin` refuses, so nothing is served uncounted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from busbar.gateway.errors import GatewayError, SpoolError, Unavailable
from busbar.gateway.inflight import InflightTable, Slot
from busbar.gateway.keys import ApiUnreachable
from busbar.gateway.spool import Record, Spool
from busbar.kube.contracts.allowances import Price

log = logging.getLogger("busbar.gateway.usage_recorder")

TEXT_LIMIT = 253
"""Longest text of a usage record (`busbar.kube.contracts.usage`)."""

MOST_TOKENS = 10**9
"""No request has more. A replica that claims it must not make a number that no database takes: its batch would be
refused for ever, and all usage behind it."""

_PRICE = "price"
"""In a slot beside what becomes the record: the price by which its cost is counted, also after a restart."""

Deliver = Callable[[str, list[Record]], Awaitable[int]]
"""(gateway id, records in order) → highest number the API has taken. Raises ApiUnreachable."""


class Ledger(Protocol):
    """Who wants to know what became of usage."""

    def ended(self, record: Record) -> None:
        """A request has ended; its record has a number (`seq`) if it comes from the spool."""

    def numbered(self, records: list[Record]) -> None:
        """Records of `ended` got their numbers."""

    def delivered(self, through: int) -> None:
        """The API has all records up to this number."""


class Usage:
    """The usage of one running request."""

    def __init__(self, recorder: UsageRecorder, slot: Slot, who: Record) -> None:
        self._recorder = recorder
        self._slot = slot
        self._who = who
        self._ended = False

    @property
    def tokens(self) -> tuple[int, int]:
        return self._slot.prompt_tokens, self._slot.completion_tokens

    def set(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> None:
        """Tokens delivered to the client so far; `cached_tokens` are some of the prompt's."""
        if prompt_tokens > MOST_TOKENS or completion_tokens > MOST_TOKENS or cached_tokens > prompt_tokens:
            prompt_tokens, completion_tokens = (
                min(prompt_tokens, MOST_TOKENS),
                min(completion_tokens, MOST_TOKENS),
            )
            cached_tokens = min(cached_tokens, prompt_tokens)
        self._slot.set(prompt_tokens, completion_tokens, cached_tokens)

    def end(self) -> None:
        """The request is over. Does not wait for the disk; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._recorder._end(self._slot, self._who)


class UsageRecorder:
    """Owns the spool and the inflight table, and the two tasks that move records along."""

    def __init__(
        self,
        spool: Spool,
        inflight: InflightTable,
        deliver: Deliver,
        ledger: Ledger,
        *,
        batch: int,
        running_limit: int,
        retry_max_s: float,
        commit_s: float = 0.0,
        delivery_s: float = 0.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._spool = spool
        self._inflight = inflight
        self._deliver = deliver
        self._ledger = ledger
        self._batch = batch
        self._running_limit = running_limit
        self._running = 0
        self._retry_max_s = retry_max_s
        self._commit_s = commit_s
        self._delivery_s = delivery_s
        self._now = now
        self._sleep = sleep
        self._ended: list[tuple[int, Record]] = []
        self._to_write = asyncio.Event()
        self._to_ship = asyncio.Event()
        self._disk = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._disk_failed = False
        self.cut_off: dict[str, int] = {}
        """Tokens of the requests that a former process did not finish, by request id."""
        for record in spool.records():
            ledger.ended(record)
        self._collect_left_over()

    @property
    def gateway_id(self) -> str:
        """Under which name the API counts this gateway's records."""
        return self._spool.gateway_id

    @property
    def delivered(self) -> int:
        """Number of the last record that the API has taken."""
        return self._spool.acknowledged

    @property
    def undelivered(self) -> int:
        return len(self._spool) + len(self._ended)

    @property
    def oldest_s(self) -> float:
        """How long ago the oldest record that the API has not taken was made; 0: there is none."""
        oldest = self._spool.oldest or next((record for _, record in self._ended), None)
        if oldest is None:
            return 0.0
        return max(0.0, (self._now() - datetime.fromisoformat(oldest["finishedAt"])).total_seconds())

    @property
    def spool_bytes(self) -> int:
        return self._spool.bytes

    def begin(self, price: Price | None = None, /, **who: str) -> Usage:
        """Start counting a request at a service's price; raises Unavailable when usage could not be kept."""
        if self._disk_failed or self._spool.full:
            raise Unavailable(
                "The gateway cannot record usage at the moment (its disk is full or failing).",
                retry_after_s=30,
            )
        if self._running >= self._running_limit:
            raise Unavailable("The gateway has too many requests in hand.", retry_after_s=5)
        # A text over the contract's bound would make the API refuse its batch, and all usage behind it.
        record: Record = {name: text[:TEXT_LIMIT] for name, text in who.items()}
        if price is not None:
            record[_PRICE] = price.to_wire()
        try:
            slot = self._inflight.take(record)
        except SpoolError as error:  # as many again have ended and wait for a slow disk
            raise Unavailable("The gateway has too many requests in hand.", retry_after_s=5) from error
        self._running += 1
        return Usage(self, slot, record)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._write_loop()), asyncio.create_task(self._ship_loop())]
        self._to_write.set()
        self._to_ship.set()

    async def stop(self, patience_s: float) -> None:
        """Write what has ended; try to deliver for `patience_s`; the rest stays on disk for the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._write()
            async with asyncio.timeout(patience_s):
                while len(self._spool):
                    await self._ship()
        except (GatewayError, TimeoutError) as error:
            log.warning("usage_left_on_disk", extra={"records": self.undelivered, "error": str(error)})
        self._spool.close()
        self._inflight.close()

    def _collect_left_over(self) -> None:
        """Count requests that a former process did not finish, unless it got as far as the spool."""
        spooled = {record["requestId"] for record in self._spool.records()}
        for index, who in self._inflight.left_over():
            self.cut_off[who["requestId"]] = who["promptTokens"] + who["completionTokens"]
            if who["requestId"] in spooled:
                self._inflight.free(index)
            else:
                self._close_record(index, who)

    def _end(self, slot: Slot, who: Record) -> None:
        tokens = {
            "promptTokens": slot.prompt_tokens,
            "completionTokens": slot.completion_tokens,
            "cachedTokens": slot.cached_tokens,
        }
        self._running -= 1
        self._close_record(slot.index, {**who, **tokens})
        self._to_write.set()

    def _close_record(self, index: int, who: Record) -> None:
        price = who.pop(_PRICE, None)
        record = {**who, "finishedAt": self._time()}
        if price is not None:
            counts = (record[name] for name in ("promptTokens", "cachedTokens", "completionTokens"))
            record["costNano"] = Price.model_validate(price).cost_nano(*counts)
        self._ended.append((index, record))
        self._ledger.ended(record)

    def _time(self) -> str:
        return self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z")

    async def _write_loop(self) -> None:
        pause = 0.5
        while True:
            await self._to_write.wait()
            if len(self._ended) < self._running_limit // 2:
                await self._sleep(self._commit_s)
            try:
                await self._write()
                pause = 0.5
            except SpoolError as error:
                log.error("usage_not_written", extra={"error": str(error)})
                await self._sleep(pause)
                pause = min(pause * 2, self._retry_max_s)

    async def _write(self) -> None:
        """Move what has ended into the spool and free its slots: both or neither, also when cancelled."""
        await _finish(self._write_now())

    async def _write_now(self) -> None:
        self._to_write.clear()
        ended, self._ended = self._ended, []
        counted = [record for _, record in ended if record["promptTokens"] or record["completionTokens"]]
        try:
            async with self._disk:
                numbered = await asyncio.to_thread(self._spool.append, counted)
        except SpoolError:
            self._disk_failed = True
            self._ended = ended + self._ended
            self._to_write.set()
            raise
        self._disk_failed = False
        self._ledger.numbered(numbered)
        for index, _ in ended:
            self._inflight.free(index)
        if counted:
            self._to_ship.set()

    async def _ship_loop(self) -> None:
        pause = 0.5
        while True:
            await self._to_ship.wait()
            if len(self._spool) < self._batch:
                await self._sleep(self._delivery_s)
            try:
                await self._ship()
                pause = 0.5
            except (ApiUnreachable, SpoolError) as error:
                log.warning("usage_not_delivered", extra={"records": len(self._spool), "error": str(error)})
                await self._sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, self._retry_max_s)

    async def _ship(self) -> None:
        async with self._disk:
            batch = self._spool.batch(self._batch)
        if not batch:
            self._to_ship.clear()
            return
        taken = await self._deliver(self._spool.gateway_id, batch)
        async with self._disk:
            await _finish(asyncio.to_thread(self._forget, taken, batch[-1]["seq"]))
        self._ledger.delivered(taken)
        if taken < batch[0]["seq"]:
            raise ApiUnreachable(f"the API took usage only through {taken}, sent from {batch[0]['seq']}")

    def _forget(self, taken: int, sent: int) -> None:
        """Drop what the API has taken. Runs in a thread."""
        # Slots first: after a power failure a slot that looks used must still find its record in the spool.
        self._inflight.flush()
        if taken > sent:
            log.error("usage_folder_is_an_old_copy", extra={"taken": taken, "sent": sent})
            self._spool.was_restored(taken)
        else:
            self._spool.acknowledge(taken)


async def _finish(work: Awaitable[Any]) -> None:
    """Wait for disk work even while being cancelled: a thread cannot be called back."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
