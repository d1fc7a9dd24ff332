"""Moves running streams to another replica: POST /migrate, and a drain that knows peers (`migration.py`).

    {"to": "http://10.0.0.7:9400"}            every stream that can move
    {"to": ..., "limit": 3}                   the longest three

Only streams of the gateway can move, because it alone can go on with them elsewhere. Full blocks go in stages while the
stream decodes on. When at most LAST_STAGE_BLOCKS are left, the stream is held, the rest is sent and committed, and the
stream ends with the peer's address. Until that moment every failure means that it goes on here.

A replica of the role prefill does the same for each stream whose terms name destinations, but begins with the prompt: its
full blocks go while the rest of it is computed, and the stream is held at its first token. A stream that nobody took then
is offered again while it decodes, after longer and longer pauses.

The blocks are not sent where computing them anew at the destination would hold the stream up for less time than the
last stage would, by the rate measured with the earlier stages and the destination's time for a prompt token; nor where
the destination keeps blocks in another form.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from busbar.kube.contracts.bearers import Role
from busbar.kube.documents import shown
from busbar.workloads.serving.adapters import Adapter
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.errors import BadRequest, Busy, RequestError, Unauthorized
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.handover import Handover, LeftError, Snapshot, Stage
from busbar.workloads.serving.http_request import read_json
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.migration import (
    LAST_STAGE_BLOCKS,
    PART_BLOCKS,
    Abort,
    Begin,
    Begun,
    Blocks,
    Commit,
    Done,
    LastBlocks,
    SequenceHead,
    framed,
    layout_of,
)
from busbar.workloads.serving.settings import ServerSettings

log = logging.getLogger(__name__)
MOST_STAGES = 8
"""A stream that decodes faster than its blocks can be sent stays."""
MESSAGE_S, COMMIT_S, ABORT_S = 30.0, 3.0, 1.0
"""For a message to the peer, for the one during which the stream is held, and for one that nobody needs."""
RETRY_S = 0.25
AGAIN_S, MOST_AGAIN_S = 5.0, 60.0
"""Before a stream that stayed at its first token is offered again: first, and at most; each pause is twice the one before."""
AT_ONCE = 2
"""Streams that move at the same time."""
TOLD = {409: "refused", 503: "has no room", 404: "does not know it", 401: "has another bearer"}


class When(Enum):
    """At what a stream moves."""

    NOW = "now"
    FIRST_TOKEN = "first token"
    """It waits for that."""
    LATER = "later"
    """Now, but only with its blocks, as it could have at its first token."""


class StaysError(Exception):
    """The stream goes on here; why."""


class ForgottenError(StaysError):
    """The peer has forgotten the ticket."""


@dataclass(eq=False)
class Movable:
    """A running stream of the gateway."""

    name: str
    ids: list[str]
    owner: Owner
    cache_salt: str
    adapter: Adapter | None
    explains: bool
    """Its prompt's log-probabilities are wanted: their states cannot be sent."""
    tokens: Sequence[Sequence[int]]
    """Of each request the tokens that it began with."""
    moving: bool = False
    leaves: bool = False
    """A peer has it, and it is told so."""


@dataclass
class _Link:
    """What is known of the way to a peer."""

    bytes_per_second: float | None = None
    round_trip_s: float = 0.0


@dataclass
class _Course:
    """A stream on its way."""

    ticket: str
    sent: dict[str, int]
    """Of each request the blocks that are there."""
    last_most: int = LAST_STAGE_BLOCKS
    """Of the last stage."""
    waits: bool = False
    """For the first token."""
    blocks: int = 0
    stages: int = 0
    recompute: bool = False
    last_blocks: int = 0
    held_at: float = 0.0
    """Monotonic time since which the source holds it; 0: it does not."""


@dataclass
class Departures:
    """Those of one server."""

    engine: Engine
    name: str
    settings: ServerSettings
    count: Callable[[str], None] = lambda outcome: None
    """Told of every outcome."""
    movable: dict[str, Movable] = field(default_factory=dict)
    copied: int = 0
    recomputed: int = 0
    """Streams that have left since the start, with their blocks and without."""
    leaving_now: int = 0
    """Of which the engine is being told; they are in neither count yet."""
    _links: dict[str, _Link] = field(default_factory=dict)
    _handing_over: set[asyncio.Task[None]] = field(default_factory=set)
    _session: aiohttp.ClientSession | None = None

    @contextmanager
    def offered(self, stream: Movable) -> Iterator[None]:
        """While a stream runs it can be moved."""
        self.movable[stream.name] = stream
        try:
            yield
        finally:
            del self.movable[stream.name]

    @contextmanager
    def handed_over(self, stream: Movable, peers: Sequence[str]) -> Iterator[None]:
        """While a stream runs, and has not moved, one of the peers is to take it at its first token, the first one that can."""
        task = asyncio.create_task(self._hand_over(stream, [_address(each, "handOver") for each in peers]))
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)
        try:
            yield
        finally:
            task.cancel()

    async def migrate(self, request: web.Request) -> web.Response:
        """POST /migrate."""
        if self.settings.bearers is None:
            raise Unauthorized("only a caller with a bearer may move streams, and this server has none")
        to, limit = _wish(await read_json(request))
        done = await self.move_all([to], limit)
        return web.json_response({"streams": [each.to_wire() for each in done]})

    async def move_all(self, peers: Sequence[str], limit: int | None = None) -> list[Done]:
        """Every stream, the longest first, to one of the peers in turn; where it stays, to the next one. Raises Busy
        where one is asked for that moves already."""
        if self.engine.loaded is None:
            raise self.engine.unavailable()
        asked = [each for each in self.movable.values() if not each.moving]
        if self.movable and not asked:
            raise Busy("these streams are moving already")
        looks = {each.name: await self._look(each.ids) for each in asked}
        asked.sort(key=lambda each: -sum(len(seen.tokens) for seen in looks[each.name].values()))
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(turn: int, stream: Movable) -> Done:
            done = Done(request=stream.name, outcome="stayed", why="there is no peer")
            async with slots:
                for shift in range(len(peers)):
                    done = await self.move(stream, peers[(turn + shift) % len(peers)])
                    if done.outcome != "stayed" or stream.name not in self.movable:
                        break
            self.count(done.outcome)
            return done

        return list(await asyncio.gather(*(one(i, each) for i, each in enumerate(asked[:limit]))))

    async def leave(self, peers: Sequence[str]) -> None:
        """Moves what can be moved, again and again: what computes its prompt now can move a moment later."""
        while True:
            try:
                await self.move_all(peers)
            except RequestError as error:
                log.info("nothing moves: %s", error)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def move(self, stream: Movable, to: str, when: When = When.NOW) -> Done:
        """One stream to one peer."""
        if stream.moving:
            return Done(request=stream.name, outcome="stayed", why="it is moving already")
        stream.moving = True
        try:
            return await self._move(stream, to, when)
        except (StaysError, aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            log.warning("stream %s stays: %s", stream.name, why)
            return Done(request=stream.name, outcome="stayed", why=why)
        finally:
            stream.moving = False

    # -- inside -------------------------------------------------------------------------------

    async def _hand_over(self, stream: Movable, peers: Sequence[str]) -> None:
        outcome, when, pause_s = "stayed", When.FIRST_TOKEN, AGAIN_S
        try:
            while outcome == "stayed" and stream.name in self.movable:
                for to in peers:
                    outcome = (await self.move(stream, to, when)).outcome
                    if outcome != "stayed" or stream.name not in self.movable:
                        break
                else:
                    await asyncio.sleep(pause_s)
                    when, pause_s = When.LATER, min(2 * pause_s, MOST_AGAIN_S)
        except RequestError as error:  # the engine fails, or ends
            log.info("stream %s is not handed over: %s", stream.name, error)
            return
        except asyncio.CancelledError:  # it has ended here while a peer was asked
            if not stream.leaves:
                self.count(outcome)
            raise
        self.count(outcome)

    async def _move(self, stream: Movable, to: str, when: When) -> Done:
        loaded = self.engine.loaded
        assert loaded is not None  # it has streams
        if when is When.FIRST_TOKEN:
            course = await self._begin_early(stream, to, loaded)
        else:
            course = await self._begin(stream, to, loaded, await self._look(stream.ids))
        if when is When.LATER and not course.ticket:
            raise StaysError(f"{to} keeps blocks in another form")
        try:
            try:
                if not course.recompute:
                    await self._send(to, course, loaded)
            except ForgottenError:
                if not course.waits:
                    raise
                # The request has waited here for longer than a ticket is kept; now it runs.
                course = await self._begin_early(stream, to, loaded)
                await self._send(to, course, loaded)
            await self._let_go(stream, to, course)
        except BaseException:
            ids = list(course.sent)
            self.engine.post(lambda core: Handover(core).let_go(ids))
            await self._abort(to, course)
            raise
        if course.recompute:
            await self._abort(to, course)
        return Done(
            request=stream.name,
            outcome="recomputed" if course.recompute else "copied",
            stages=course.stages,
            blocks=course.blocks,
            last_blocks=course.last_blocks,
            stall_seconds=round(time.monotonic() - course.held_at, 6) if course.held_at else 0.0,
        )

    async def _let_go(self, stream: Movable, to: str, course: _Course) -> None:
        """The engine ends the stream, and it is counted as one that has left. Raises StaysError."""
        stream.leaves = True
        self.leaving_now += 1
        try:
            if not await self.engine.hand_over(stream.ids, to, held=self._is_held(stream, course)):
                stream.leaves = False
                raise StaysError("it has ended")
            self.recomputed += course.recompute
            self.copied += not course.recompute
        finally:
            self.leaving_now -= 1

    @staticmethod
    def _is_held(stream: Movable, course: _Course) -> bool:
        return bool(course.held_at) and len(course.sent) == len(stream.ids)

    async def _abort(self, to: str, course: _Course) -> None:
        """Tells the peer that nothing more comes; it finds that out alone, only later."""
        if course.ticket:
            with suppress(StaysError, aiohttp.ClientError, TimeoutError, OSError):
                body = Abort(ticket=course.ticket).model_dump_json(by_alias=True).encode()
                await self._post(to, "/migrate/abort", body, ABORT_S)

    async def _look(self, ids: Iterable[str]) -> dict[str, Snapshot]:
        """Those of the requests that run."""

        def work(handover: Handover) -> dict[str, Snapshot]:
            found = {each: handover.look(each) for each in ids}
            return {name: seen for name, seen in found.items() if seen is not None}

        return await self.engine.in_turn(lambda core: work(Handover(core)))

    async def _begin(self, stream: Movable, to: str, loaded: Loaded, seen: dict[str, Snapshot]) -> _Course:
        # A request that has no blocks (it waits) is told of with one token: the peer must be the right one all the same.
        begun = await self._ask(stream, to, loaded, [each.tokens for each in seen.values()] or [[0]])
        if not begun.ticket or stream.explains or not seen:
            return _Course(begun.ticket, {}, recompute=True)
        link = self._links[to]
        course = _Course(begun.ticket, dict(zip(seen, begun.have, strict=True)))
        size = loaded.core.runner.cache.shape.block_tokens
        anew = sum(len(each.tokens) - course.sent[name] * size for name, each in seen.items())
        left = sum(min(each.used - course.sent[name], LAST_STAGE_BLOCKS) for name, each in seen.items())
        if begun.token_seconds is not None and link.bytes_per_second is not None:
            copying = left * loaded.core.runner.cache.shape.block_bytes / link.bytes_per_second
            course.recompute = anew * begun.token_seconds <= copying + link.round_trip_s
        return course

    async def _begin_early(self, stream: Movable, to: str, loaded: Loaded) -> _Course:
        """Of requests that need not run yet."""
        begun = await self._ask(stream, to, loaded, stream.tokens)
        if not begun.ticket:
            raise StaysError(f"{to} keeps blocks in another form")
        sent = dict(zip(stream.ids, begun.have, strict=True))
        return _Course(begun.ticket, sent, waits=True, last_most=PART_BLOCKS)

    async def _ask(
        self, stream: Movable, to: str, loaded: Loaded, sequences: Sequence[Sequence[int]]
    ) -> Begun:
        adapter = stream.adapter
        asked = Begin(
            sender=self.name,
            identity=loaded.identity,
            layout=layout_of(loaded),
            tenant=stream.owner.tenant,
            cache_salt=stream.cache_salt,
            adapter="" if adapter is None else adapter.name,
            adapter_digest="" if adapter is None else adapter.digest,
            sequences=[SequenceHead(tokens=list(tokens)) for tokens in sequences],
        )
        began = time.monotonic()
        answer = await self._post(to, "/migrate/begin", asked.model_dump_json(by_alias=True).encode())
        try:
            begun = Begun.model_validate(answer)
        except ValidationError as error:
            raise StaysError(f"{to} answered what is no beginning of a migration") from error
        self._links.setdefault(to, _Link()).round_trip_s = time.monotonic() - began
        return begun

    async def _send(self, to: str, course: _Course, loaded: Loaded) -> None:
        """Stages, until what is left can be the last one, for which the stream is held."""
        while course.stages <= MOST_STAGES:
            stage = await self._next_stage(course)
            if stage.held:
                course.held_at = time.monotonic()
            try:
                if stage.held:
                    return await self._send_last(to, course, loaded, stage)
                await self._send_stage(to, course, loaded, stage)
            finally:
                self._unpin(stage)
            course.stages += not stage.is_computing
        raise StaysError(f"after {MOST_STAGES} stages there is still more to send than the last one may have")

    async def _next_stage(self, course: _Course) -> Stage:
        asked = dict(course.sent)
        try:
            return await self.engine.when(
                lambda core: Handover(core).stage(asked, course.last_most, course.waits), self._unpin
            )
        except LeftError as error:
            raise StaysError(str(error)) from error

    def _unpin(self, stage: Stage) -> None:
        self.engine.post(lambda core: Handover(core).unpin(stage.blocks))

    async def _send_stage(self, to: str, course: _Course, loaded: Loaded, stage: Stage) -> None:
        for number, (name, pinned) in enumerate(stage.pinned.items()):
            for start in range(0, len(pinned), PART_BLOCKS):
                part = pinned[start : start + PART_BLOCKS]
                data = await asyncio.to_thread(loaded.core.runner.cache.read, part)
                header = Blocks(
                    ticket=course.ticket, sequence=number, first=course.sent[name], count=len(part)
                )
                await self._timed(to, "/migrate/blocks", framed(header, data))
                course.sent[name] += len(part)
                course.blocks += len(part)

    async def _send_last(self, to: str, course: _Course, loaded: Loaded, stage: Stage) -> None:
        # Few, and held for nobody but this: reading them here takes less time than another thread's turn.
        data = loaded.core.runner.cache.read(stage.blocks)
        parts = [
            LastBlocks(tokens=stage.seen[name].tokens, first=course.sent[name], count=len(stage.pinned[name]))
            for name in course.sent
        ]
        await self._timed(
            to, "/migrate/commit", framed(Commit(ticket=course.ticket, sequences=parts), data), COMMIT_S
        )
        course.last_blocks = len(stage.blocks)
        course.blocks += len(stage.blocks)

    async def _timed(self, to: str, path: str, body: bytes, limit_s: float = MESSAGE_S) -> None:
        began = time.monotonic()
        await self._post(to, path, body, limit_s)
        link, spent = self._links[to], max(1e-6, time.monotonic() - began)
        before = link.bytes_per_second
        now = len(body) / spent
        link.bytes_per_second = now if before is None else before + (now - before) / 2

    async def _post(self, to: str, path: str, body: bytes, limit_s: float = MESSAGE_S) -> object:
        """The peer's answer. Raises StaysError for a refusal, and what aiohttp raises."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        bearer = (self.settings.bearers or {}).get(Role.INFER, "")
        headers = {"Authorization": f"Bearer {bearer}"}
        async with self._session.post(
            to + path,
            data=io.BytesIO(body),
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=limit_s),
        ) as answer:
            text = await answer.read()
            if answer.status != 200:
                word = TOLD.get(answer.status, f"answered {answer.status}")
                kind = ForgottenError if answer.status == 404 else StaysError
                raise kind(f"{to} {word}: {text[:300].decode(errors='replace')}")
        try:
            found: object = json.loads(text)
        except ValueError as error:
            raise StaysError("the peer's answer is not JSON") from error
        return found


def peers_in(sent: object) -> list[str]:
    """The `peers` of a drain's body. Raises BadRequest."""
    if sent is None:
        return []
    found = sent.get("peers", []) if isinstance(sent, dict) else None
    if not isinstance(found, list) or len(found) > 256:
        raise BadRequest("peers must be a list of at most 256 addresses", param="peers")
    return [_address(each, "peers") for each in found]


def _wish(sent: object) -> tuple[str, int | None]:
    if not isinstance(sent, dict) or set(sent) - {"to", "limit"}:
        raise BadRequest("the body must be an object with `to`, and perhaps `limit`")
    limit = sent.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise BadRequest("limit must be a whole number from 1", param="limit")
    return _address(sent.get("to"), "to"), limit


def _address(value: object, param: str) -> str:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")) or len(value) > 300:
        raise BadRequest(
            f"{param} must be an address as http://10.0.0.7:9400, not {shown(value)}", param=param
        )
    if any(c.isspace() or not c.isprintable() for c in value):
        raise BadRequest(f"{param} must not contain blanks", param=param)
    return value.rstrip("/")
