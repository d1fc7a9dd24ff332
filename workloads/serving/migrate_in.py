"""Streams that come from other replicas: POST /migrate/begin, /migrate/blocks, /migrate/commit, /migrate/abort
(`migration.py`).

A ticket is for one stream. It expires where nothing comes for it, and some time after its commit; then what it holds
goes back to the pool, where committed blocks can still be found until they are evicted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from busbar.kube.contracts.wire import WireModel
from busbar.workloads.serving.adapters import Adapter
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.errors import BadRequest, Busy, NotFound, OtherStream, Overloaded, TooLarge
from busbar.workloads.serving.handover import Arriving, Handover
from busbar.workloads.serving.http_request import read_json
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.migration import (
    HEADER_LIMIT_BYTES,
    Abort,
    Begin,
    Begun,
    Blocks,
    Commit,
    header_of,
    layout_of,
)
from busbar.workloads.serving.prefix import salt_of
from busbar.workloads.serving.served_models import ServedModels

log = logging.getLogger(__name__)
M = TypeVar("M", bound=WireModel)
MOST_TICKETS = 64
EXPECTED_S = 20.0
"""A ticket for which nothing comes so long has expired."""
COMMITTED_S = 10.0
"""So long what was committed is kept for the stream."""


@dataclass(eq=False)
class Ticket:
    """A stream that is on its way here."""

    sequences: list[Arriving]
    expiry: asyncio.TimerHandle | None = None
    busy: bool = False
    """A message is being worked on."""
    committed: bool = False


class Arrivals:
    """Those of one server."""

    def __init__(
        self, engine: Engine, name: str, model_id: str, models: ServedModels, check: Callable[[], Loaded]
    ) -> None:
        """`name` is of this process; `check` gives the loaded model, or raises where the replica takes nothing."""
        self._engine = engine
        self._name = name
        self._model_id = model_id
        self._models = models
        self._check = check
        self._tickets: dict[str, Ticket] = {}

    @property
    def open(self) -> int:
        """Streams on their way here."""
        return len(self._tickets)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/migrate/begin", self.begin),
            web.post("/migrate/blocks", self.blocks),
            web.post("/migrate/commit", self.commit),
            web.post("/migrate/abort", self.abort),
        ]

    async def begin(self, request: web.Request) -> web.Response:
        loaded, asked = self._check(), _parsed(Begin, await read_json(request))
        if asked.sender == self._name:
            raise OtherStream("a stream cannot move to the replica that it is at")
        if asked.identity != loaded.identity:
            raise OtherStream("this replica serves another model than the one that began the stream")
        if len(self._tickets) >= MOST_TICKETS:
            raise Busy(f"{MOST_TICKETS} streams are on their way here already")
        async with self._models.chosen(
            self._model_id + (f":{asked.adapter}" if asked.adapter else "")
        ) as adapter:
            if asked.adapter_digest != ("" if adapter is None else adapter.digest):
                raise OtherStream("this replica's adapter of that name is another one")
            salt = salt_of(asked.tenant, asked.cache_salt, *_salt(adapter))
        seconds = loaded.core.speed.prompt_token_s
        if asked.layout != layout_of(loaded):
            return web.json_response(Begun(token_seconds=seconds).to_wire())

        def expect(handover: Handover) -> list[tuple[Arriving, int]]:
            return [handover.expect(salt, asked.tenant, each.tokens) for each in asked.sequences]

        # A sender that leaves meanwhile never gets the ticket.
        found = await self._engine.when(lambda core: expect(Handover(core)), self._forget_untold)
        name = secrets.token_hex(16)
        self._tickets[name] = ticket = Ticket([arriving for arriving, _ in found])
        self._expire(name, ticket, EXPECTED_S)
        begun = Begun(ticket=name, have=[have for _, have in found], token_seconds=seconds)
        return web.json_response(begun.to_wire())

    async def blocks(self, request: web.Request) -> web.Response:
        asked, data = await self._framed(request, Blocks)
        with _Use(self, asked.ticket) as ticket:
            if asked.sequence >= len(ticket.sequences):
                raise BadRequest("the ticket has no such sequence", param="sequence")
            await self._store(ticket.sequences[asked.sequence], asked.first, asked.count, data)
        return web.json_response({})

    async def commit(self, request: web.Request) -> web.Response:
        asked, data = await self._framed(request, Commit)
        size = self._check().core.runner.cache.shape.block_bytes
        with _Use(self, asked.ticket) as ticket:
            if len(asked.sequences) != len(ticket.sequences):
                raise BadRequest("the ticket is for another number of sequences", param="sequences")
            start = 0
            for arriving, last in zip(ticket.sequences, asked.sequences, strict=True):
                end = start + last.count * size
                await self._store(arriving, last.first, last.count, data[start:end])
                start = end
            tokens = [last.tokens for last in asked.sequences]
            arrived = list(zip(ticket.sequences, tokens, strict=True))
            # Whoever goes on with the stream comes behind this command.
            self._engine.post(lambda core: Handover(core).commit(arrived))
            ticket.committed = True
        return web.json_response({})

    async def abort(self, request: web.Request) -> web.Response:
        asked = _parsed(Abort, await read_json(request))
        with _Use(self, asked.ticket):
            pass
        self._forget(asked.ticket)
        return web.json_response({})

    # -- inside -------------------------------------------------------------------------------

    async def _store(self, arriving: Arriving, first: int, count: int, data: memoryview) -> None:
        loaded = self._check()
        cache, most = loaded.core.runner.cache, loaded.core.scheduler.pool.total
        if len(data) != count * cache.shape.block_bytes:
            raise BadRequest(f"{count} blocks do not have {len(data)} bytes here")
        wanted = range(first, first + count)
        room: list[int] | None = None
        if all(place in arriving.blocks for place in wanted):
            room = [arriving.blocks[place] for place in wanted]
        elif first + count <= most:
            room = await self._engine.in_turn(
                lambda core: Handover(core).make_room(arriving, first, first + count)
            )
        if room is None:
            raise Overloaded("this replica has no free KV blocks for a stream from elsewhere")
        await asyncio.to_thread(cache.write, room, data)

    async def _framed(self, request: web.Request, kind: type[M]) -> tuple[M, memoryview]:
        """The header and the blocks behind it, of which no more are read than a message may have."""
        shape = self._check().core.runner.cache.shape
        try:
            length = int.from_bytes(await request.content.readexactly(4), "big")
            if length > HEADER_LIMIT_BYTES:
                raise TooLarge(f"the header has {length} bytes; at most {HEADER_LIMIT_BYTES} are read")
            header = _parsed(kind, header_of(await request.content.readexactly(length)))
            counts = [header.count] if isinstance(header, Blocks) else []
            if isinstance(header, Commit):
                counts = [each.count for each in header.sequences]
            data = await request.content.readexactly(sum(counts) * shape.block_bytes)
        except asyncio.IncompleteReadError as error:
            raise BadRequest("the body ends too early") from error
        if not request.content.at_eof() and await request.content.read(1):
            raise BadRequest("the body has more blocks than its header says")
        return header, memoryview(data)

    def _forget_untold(self, found: list[tuple[Arriving, int]]) -> None:
        self._engine.post(lambda core: Handover(core).forget(arriving for arriving, _ in found))

    def _expire(self, name: str, ticket: Ticket, after_s: float) -> None:
        if ticket.expiry is not None:
            ticket.expiry.cancel()
        ticket.expiry = asyncio.get_running_loop().call_later(after_s, self._forget, name)

    def _forget(self, name: str) -> None:
        ticket = self._tickets[name]
        if ticket.busy:
            self._expire(name, ticket, EXPECTED_S)
            return
        del self._tickets[name]
        if ticket.expiry is not None:
            ticket.expiry.cancel()
        self._engine.post(lambda core: Handover(core).forget(ticket.sequences))


class _Use:
    """A message for a ticket: one at a time, and it lives on meanwhile."""

    def __init__(self, arrivals: Arrivals, name: str) -> None:
        self._arrivals, self._name = arrivals, name
        ticket = arrivals._tickets.get(name)
        if ticket is None:
            raise NotFound("there is no such ticket; it may have expired")
        if ticket.busy or ticket.committed:
            raise Busy("the ticket is in use by another message, or committed")
        self._ticket = ticket

    def __enter__(self) -> Ticket:
        self._ticket.busy = True
        return self._ticket

    def __exit__(self, *_: object) -> None:
        self._ticket.busy = False
        left = COMMITTED_S if self._ticket.committed else EXPECTED_S
        self._arrivals._expire(self._name, self._ticket, left)


def _salt(adapter: Adapter | None) -> tuple[str, ...]:
    return () if adapter is None else adapter.salt


def _parsed(kind: type[M], sent: object) -> M:
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise BadRequest(f"{where or 'the body'}: {problem['msg']}", param=where or None) from error
