"""Runs requests of batches that the API lends to this gateway, as batch work: it gets what other requests leave.

    claim ─► the key's limits and money ─► the batch queue of the service ─► replica ─► settle ─► charged

Each line runs like a request of its key. When the gateway dies, the API lends its lines again; of several runs of a line one
answer is kept and one is charged. A line that meets a limit, or a service without a
replica, is given back and tried again later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

from busbar.gateway import responses
from busbar.gateway.api_client import ApiClient, ApiRefused
from busbar.gateway.delivery import Call, Keep
from busbar.gateway.errors import BadRequest, ClientError, QuotaSpent, body
from busbar.gateway.keys import ApiUnreachable, KeyDirectory
from busbar.gateway.load_counts import Progress
from busbar.gateway.proxy import Proxy
from busbar.gateway.routes import RouteTable
from busbar.kube.contracts import batches as wire

log = logging.getLogger("busbar.gateway.batches")
LATER_S = 15.0
"""Until a line that could not run is tried again, where nothing else is said."""
LATEST_S = 300.0
GIVE_BACK_S = 5.0
"""For the last word to the API at the end: clients' streams have the time that is left."""
NOW_S = 0.1
"""Between two questions, while there is more to do."""
Held = tuple[str, int]


class BatchRunner:
    """The lines that this gateway runs."""

    def __init__(
        self,
        api: ApiClient,
        keys: KeyDirectory,
        proxy: Proxy,
        table: Callable[[], RouteTable | None],
        gateway_id: str,
        *,
        most: int,
        poll_s: float,
    ) -> None:
        self._api = api
        self._keys = keys
        self._proxy = proxy
        self._table = table
        self._gateway = gateway_id
        self._process = uuid.uuid4().hex
        self._most = most
        self._poll_s = poll_s
        self._running: dict[Held, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._most:
            self._asking = asyncio.create_task(self._ask())

    async def stop(self) -> None:
        """Give back what runs; other gateways go on with it at once."""
        if self._asking is None:
            return
        self._asking.cancel()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(self._asking, *running, return_exceptions=True)
        self._running.clear()
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._claim(0)
        except (TimeoutError, ApiUnreachable, ApiRefused) as error:
            log.warning("batches_not_given_back", extra={"error": repr(error)})

    async def _ask(self) -> None:
        while True:
            wanted = self._most - len(self._running) if self._table() is not None else 0
            found = 0
            try:
                found = await self._claim(wanted)
            except (ApiUnreachable, ApiRefused) as error:
                log.warning("no_batches", extra={"error": str(error)})
            # There may be more as soon as a line has ended, if all that was asked for came.
            self._freed.clear()
            if found and found == wanted:
                try:
                    async with asyncio.timeout(self._poll_s):
                        await self._freed.wait()
                    await asyncio.sleep(min(NOW_S, self._poll_s))
                except TimeoutError:
                    pass
            else:
                await asyncio.sleep(self._poll_s)

    async def _claim(self, most: int) -> int:
        """Keep what runs, and begin with what is lent; how many lines that is."""
        holding = [wire.LineRef(batch=batch, number=number) for batch, number in self._running]
        wanted = wire.Claim(gateway=self._gateway, process=self._process, holding=holding, most=most)
        lent = await self._api.ask(f"{wire.BATCHES}/claim", wanted, wire.Lent)
        for (batch, _), task in self._running.items():
            if batch in lent.cancelled:
                task.cancel()
        for line in lent.lines:
            held = (line.batch, line.number)
            task = asyncio.create_task(self._run(line))
            self._running[held] = task
            task.add_done_callback(lambda done, held=held: self._ended(held, done))  # type: ignore[misc]
        return len(lent.lines)

    def _ended(self, held: Held, task: asyncio.Task[None]) -> None:
        self._running.pop(held, None)
        self._freed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch_line_failed", exc_info=error)

    async def _run(self, line: wire.Line) -> None:
        """One line to its answer, or back to the API."""
        request_id = f"{line.batch}-{line.number}-{secrets.token_hex(3)}"

        async def keep(status: int, data: bytes) -> bool:
            return await self._settle(line, request_id, status, data.decode(errors="replace"))

        try:
            await self._answer(line, request_id, keep)
        except ClientError as error:
            if error.status in (429, 503):
                wait = error.retry_after_s or LATER_S
                await self._give_back(
                    line, LATEST_S if isinstance(error, QuotaSpent) else min(wait, LATEST_S)
                )
            else:
                await self._settle(line, request_id, error.status, json.dumps(body(error)))
        except ConnectionError:
            await self._give_back(line, LATER_S)
        except Exception:
            # Without a word to the API the line would be lent again at once, and for ever.
            log.exception("batch_line_failed", extra={"requestId": request_id})
            await self._give_back(line, LATEST_S)

    async def _answer(self, line: wire.Line, request_id: str, keep: Keep) -> None:
        key = await self._keys.identify_digest(line.sha256)
        table = self._table()
        assert table is not None  # nothing is claimed before there are routes
        document = json.loads(line.body)
        if line.endpoint == responses.PATH:
            responses.check(document)
        target = table.resolve(key, document["model"])
        service = target.service
        call = Call(
            path=line.endpoint,
            request_id=request_id,
            document=document,
            stream=False,
            arrived=time.monotonic(),
            tenant=key.tenant,
            key_id=key.key_id,
            weight=terms.weight if (terms := service.terms_of(key.tenant)) else 1.0,
            adapter=target.adapter,
            progress=Progress(stream=False),
            keep=keep,
        )
        await self._proxy.answer(None, call, service, key)

    async def _settle(self, line: wire.Line, request_id: str, status: int, text: str) -> bool:
        """Tell the API until it has heard; whether this was the line's first answer. What it does not take is an error."""
        if len(text) > wire.LINE_BYTES:
            problem = f"The answer has more than {wire.LINE_BYTES >> 10} KiB; lower max_tokens."
            status, text = 500, json.dumps(body(BadRequest(problem)))
        refused = False
        while True:
            told = self._told(line, status=status, request_id=request_id, body=text)
            try:
                return (await self._api.ask(f"{wire.BATCHES}/settle", told, wire.Kept)).kept
            except ApiRefused as error:
                if refused:
                    raise
                refused, status = True, 500
                text = json.dumps(body(BadRequest(f"The answer cannot be kept: {error}.")))
            except ApiUnreachable as error:
                log.warning("answer_not_kept", extra={"error": str(error), "requestId": request_id})
                await asyncio.sleep(self._poll_s)

    async def _give_back(self, line: wire.Line, again_in_s: float) -> None:
        told = self._told(line, again_in_s=again_in_s)
        try:
            await self._api.ask(f"{wire.BATCHES}/settle", told, wire.Kept)
        except (ApiUnreachable, ApiRefused) as error:  # the next claim says that it is not held
            log.warning("line_not_given_back", extra={"error": str(error)})
            await asyncio.sleep(self._poll_s)

    def _told(self, line: wire.Line, **fields: Any) -> wire.Settled:
        return wire.Settled(
            gateway=self._gateway, process=self._process, batch=line.batch, number=line.number, **fields
        )
